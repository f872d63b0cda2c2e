"""Prompt tokens in the target's passes: what they are called, and what they are worth here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from foretell.drafters.drafter import DrawingDrafter
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.engine.sequence import DecodingSequence
from foretell.hardware.prompt_policy import MAX_COUNT, GuessRanks, PromptPolicy, solve
from foretell.hardware.prompt_rows import PromptWorth

_DECAY: Final = 0.97
"""What a step leaves of the older ones in the measured rate."""

_PRIOR_STEPS: Final = 16.0
"""Steps that the rate of the policy is worth before any was measured."""


PROMPTS: Final = "prompts"
"""The drafter of prompt tokens alone, and the source of its nodes."""

_SHARE_BESIDE_DRAFT: Final = 0.1
_SHARE_BESIDE_TABLES: Final = 0.3
"""Of what a guess is worth alone, what it is worth beside a draft model, or beside drafters that look texts up.

`all` on 13 prompts of Spec-Bench (SmolLM2, compiled, two cores), shares 0, 0.1, 0.25, 0.5: 1.51, 1.51, 1.47 and less
with a draft model, 1.41, 1.41, 1.47, 1.47 times plain decoding without."""


class Prompting:
    """Values the guesses of prompt tokens by the passes of this machine, and by what else is drafted.

    Args:
        tokens: the prompt tokens.
        vocab_size: of the target; their ids follow it.
        ranks: how good the guesses are here; None takes what held-out text said after training.
    """

    def __init__(self, tokens: PromptTokens, vocab_size: int, ranks: GuessRanks | None = None) -> None:
        self.tokens, self.ids = tokens, tokens.ids(vocab_size)
        self.ranks = ranks or tokens.ranks
        self._policies: dict[tuple[float, ...], PromptPolicy] = {}
        self._rates: dict[Use, _Rate] = {}

    def policy(self, pass_s: Sequence[float]) -> PromptPolicy:
        """Return what to buy where passes take these seconds, T(1), T(2), …; solved once."""
        key = tuple(pass_s)
        if key not in self._policies:
            self._policies[key] = solve(self.ranks, pass_s, num_chains=self.ids.num_chains)
        return self._policies[key]

    def worth(self, pass_s: Sequence[float], use: Use) -> PromptWorth:
        """Return what guesses and seconds are worth; the rate is the policy's, and by and by the measured one.

        Args:
            pass_s: T(1), T(2), …
            use: rates are measured apart for each.
        """
        worth = self.policy(pass_s).worth
        values = tuple(use.share * value for value in worth.values)
        rate = self._rates.get(use)
        if rate is None:
            return PromptWorth(values, worth.tokens_per_s, worth.num_chains)
        prior_s = _PRIOR_STEPS * pass_s[0]
        tokens_per_s = (rate.num_tokens + prior_s * worth.tokens_per_s) / (rate.seconds + prior_s)
        return PromptWorth(values, tokens_per_s, worth.num_chains)

    def record(self, use: Use, num_tokens: int, seconds: float) -> None:
        """Take in what a step emitted, and the seconds that it was expected to take."""
        rate = self._rates.setdefault(use, _Rate())
        rate.num_tokens = _DECAY * rate.num_tokens + num_tokens
        rate.seconds = _DECAY * rate.seconds + seconds


def known_ranks(document: Mapping[str, Any], tokens: PromptTokens) -> GuessRanks | None:
    """Return the ranks that a tuning kept for these very prompt tokens; None where it kept others or damage."""
    if document.get("digest") != tokens.digest:
        return None
    try:
        counts = np.array(document.get("counts"))  # [R + 1] * m
    except ValueError:  # ragged
        return None
    if counts.dtype != np.int64 or counts.shape != tokens.ranks.counts.shape:
        return None
    return GuessRanks(counts) if counts.min() >= 0 and counts.max() <= MAX_COUNT else None


@dataclass(frozen=True, slots=True)
class Use:
    """What the guesses of prompt tokens are used for."""

    drafter: str
    is_sampled: bool
    share: float
    """Of what a guess is worth alone."""


def use_of(sequence: DecodingSequence) -> Use:
    """Return what a sequence uses the guesses for."""
    drafter = sequence.request.drafter
    if isinstance(drafter, DrawingDrafter):
        share = _SHARE_BESIDE_DRAFT
    else:
        share = 1.0 if drafter.name.startswith(PROMPTS) else _SHARE_BESIDE_TABLES
    return Use(drafter.name, sequence.request.draft_sampling is not None, share)


class _Rate:
    """Decayed sums."""

    def __init__(self) -> None:
        self.num_tokens = self.seconds = 0.0
