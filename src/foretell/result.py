"""What a request gives back: text, token ids, why it ended, and raw counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "context"]
"""`stop`: EOS, a stop id or a stop string; `length`: `max_new_tokens`; `context`: the model's context is full."""


@dataclass(slots=True)
class DraftWork:
    """What a drafter that runs a model did, since `begin`."""

    num_passes: int = 0
    """Passes of the draft model, the prompt's excluded."""
    num_rows: int = 0
    num_confirmed: int = 0
    """Tokens of the second stage that the draft model's own choice confirmed: each is a pass that it did not need."""
    num_staged_passes: int = 0
    """Passes that carried a draft of the second stage."""
    num_bytes: int = 0
    """Weights, keys and values that those passes read."""
    num_exhausted_steps: int = 0
    """Proposals that it took no part in, because the text was longer than its context."""


@dataclass(slots=True)
class Stats:
    """Raw counters of one request; every ratio is a property."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_passes: int = 0
    """Target passes after prefill."""
    num_rows: int = 0
    """Rows of those passes, padding excluded."""
    num_plain_passes: int = 0
    """Passes that carried no draft."""
    num_refed_rows: int = 0
    """Rows computed again in their canonical slots."""
    drafted: Counter[str] = field(default_factory=Counter)
    """Draft tokens by source."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Accepted draft tokens by source."""
    tokens_per_pass_counts: Counter[int] = field(default_factory=Counter)
    """Passes by the number of tokens that they emitted."""
    prefill_s: float = 0.0
    num_first_tokens: int = 1
    """Tokens that the first pass emitted; they arrived together."""
    first_token_s: float = 0.0
    """From the request's start to its first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    draft_s: float = 0.0
    """Time spent in drafters, the first pass's included."""
    forward_s: float = 0.0
    """Time spent in target passes after prefill, the first included; in a batch the whole pass's."""
    drafter_memory_bytes: int = 0
    """What the drafter held when the request ended."""
    num_draft_passes: int = 0
    """Passes of a draft model, its prompt's excluded."""
    num_draft_rows: int = 0
    num_confirmed: int = 0
    """Tokens of the second stage that the draft model's own choice confirmed: each is a pass that it did not need."""
    num_staged_passes: int = 0
    """Draft passes that carried a draft of the second stage."""
    num_exhausted_steps: int = 0
    """Steps that the draft model took no part in, because the text was longer than its context."""
    target_bytes: int = 0
    """Weights, committed keys and values that target passes after prefill read; in a batch the weights are shared."""
    draft_bytes: int = 0
    """The same for draft passes."""

    def take_draft_work(self, work: DraftWork) -> None:
        """Copy what the drafter counted."""
        self.num_draft_passes, self.num_draft_rows = work.num_passes, work.num_rows
        self.num_confirmed, self.num_staged_passes = work.num_confirmed, work.num_staged_passes
        self.draft_bytes, self.num_exhausted_steps = work.num_bytes, work.num_exhausted_steps

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per target pass, the papers' τ; 0 before the first pass."""
        return self.num_output_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per draft token; 0 when nothing was drafted."""
        num_drafted = sum(self.drafted.values())
        return sum(self.accepted.values()) / num_drafted if num_drafted else 0.0

    @property
    def rows_per_pass(self) -> float:
        """Rows per target pass."""
        return self.num_rows / self.num_passes if self.num_passes else 0.0

    @property
    def draft_passes_per_token(self) -> float:
        """Draft passes per emitted token; 0 before the first token."""
        return self.num_draft_passes / self.num_output_tokens if self.num_output_tokens else 0.0

    @property
    def e2(self) -> float:
        """Tokens of the draft's own choice per draft pass, E₂; 1 without a second stage."""
        return 1.0 + (self.num_confirmed / self.num_draft_passes if self.num_draft_passes else 0.0)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that target and draft passes read per emitted token; 0 before the first token."""
        return (self.target_bytes + self.draft_bytes) / self.num_output_tokens if self.num_output_tokens else 0.0

    @property
    def draft_share(self) -> float:
        """Share of the time after prefill that drafting took; 0 before the first token."""
        total_s = self.first_token_s - self.prefill_s + self.decode_s
        return self.draft_s / total_s if total_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after those of the first pass ÷ seconds after it."""
        return (self.num_output_tokens - self.num_first_tokens) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """All tokens ÷ seconds from the request's start to its last token."""
        total_s = self.first_token_s + self.decode_s
        return self.num_output_tokens / total_s if total_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the model's own distribution, before any sampling parameter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids with their log-probabilities, best first."""


@dataclass(slots=True)
class Chunk:
    """One emitted token of a stream."""

    token_id: int
    text: str
    """Text that this token completed; may be empty (a partial character, or a possible stop string)."""
    source: str
    """The drafter that proposed the token; "target" when the target itself chose it."""
    logprobs: TokenLogprobs | None = None
    completion: Completion | None = None
    """The whole result, on the last chunk only."""


@dataclass(slots=True)
class Completion:
    """The result of one request (or of one of its `n` samples)."""

    text: str
    token_ids: list[int]
    """Emitted ids: the EOS id included when it ended the output, none that begins in a stop string or after it."""
    finish_reason: FinishReason
    sources: list[str]
    """For each token the drafter that proposed it, or "target"."""
    stats: Stats
    seed: int | None = None
    """The seed of the noise; None when greedy."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
