"""One sequence being decoded: what was asked, what was emitted, what must be computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from foretell.cache.kv_cache import Region
from foretell.drafters.drafter import Drafter, DraftSampling, DrawingDrafter
from foretell.engine.drawing import DrawnAcceptance
from foretell.errors import ConfigError
from foretell.hardware.budget import DraftGate
from foretell.result import FinishReason, Stats, TokenLogprobs
from foretell.verify.rule import Rule

TARGET = "target"
"""Source of a token that no drafter proposed."""


class Chooser(Protocol):
    """Chooses the target's next token; the same for the same context, whoever asks and how often."""

    def choose(self, logits: Tensor, context_ids: Sequence[int]) -> int:
        """Return the token that follows `context_ids`, given logits [V]."""

    def logprobs(self, logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
        """Return log-probabilities of the raw logits [V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine needs to know to decode one sequence. Token ids only, no text.

    Raises:
        ConfigError: the rule tests draws, and the drafter draws nothing.
    """

    prompt_ids: Sequence[int]
    chooser: Chooser
    drafter: Drafter
    max_new_tokens: int
    stop_ids: frozenset[int]
    """Ids that end the sequence and are emitted last."""
    should_stop: Callable[[int], bool] | None = None
    """Called once for every emitted token, in order; True ends the sequence with that token."""
    num_logprobs: int | None = None
    draft_sampling: DraftSampling | None = None
    """What drafters with probabilities need to know of the chooser; None when greedy."""
    rule: Rule | None = None
    """How drafts are accepted; None is match, of which the tokens do not depend on the draft."""
    is_eager: bool = False
    """Take no compiled passes, which hold one sequence each: its rows ride in one pass with those of others."""
    max_rows: int | None = None
    """Most rows of this sequence in a pass; None leaves it to what pays. 1 drafts nothing."""
    priority: int = 0
    """Who goes first where a pass has too few rows for all: the highest; every step waited adds 1."""

    def __post_init__(self) -> None:
        assert self.max_rows is None or self.max_rows > 0
        if self.rule is not None and self.rule.needs_draws and not isinstance(self.drafter, DrawingDrafter):
            raise ConfigError(
                f"drafter {self.drafter.name!r} proposes no drawn children, `verification`={self.rule.name!r} tests "
                "draws: use 'match', or a drafter that runs a draft model"
            )


@dataclass(frozen=True, slots=True)
class Emission:
    """One token that a step emitted."""

    token_id: int
    source: str
    logprobs: TokenLogprobs | None = None


@dataclass(eq=False, slots=True)
class DecodingSequence:
    """State of one request; the engine's step is its only writer.

    Invariant between steps: the region holds keys and values of `token_ids[:-1]`, in slots equal to their positions.
    """

    request: Request
    region: Region
    token_ids: list[int]
    stats: Stats = field(default_factory=Stats)
    provisional: list[int] = field(default_factory=list)
    """Tokens accepted through rows outside the first chain: the next pass's chain starts with them."""
    provisional_sources: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    started_s: float = 0.0
    first_token_at_s: float | None = None
    num_waited: int = 0
    """Steps since it last took part in one."""
    num_guesses: int = 0
    """Guesses of prompt tokens that the next step may use."""
    gate: DraftGate = field(default_factory=DraftGate)
    drawn: DrawnAcceptance = field(default_factory=DrawnAcceptance)

    @property
    def num_new_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be emitted."""
        return self.finish_reason is not None
