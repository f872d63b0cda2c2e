"""Prompt tokens in the target's passes: what they are called, and what they are worth here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foretell.drafters.prompt_tokens import PromptTokens
from foretell.engine.sequence import DecodingSequence
from foretell.hardware.prompt_policy import PromptPolicy, solve
from foretell.hardware.prompt_rows import PromptWorth

_DECAY: Final = 0.97
"""What a step leaves of the older ones in the measured rate."""

_PRIOR_STEPS: Final = 16.0
"""Steps that the rate of the policy is worth before any was measured."""


class Prompting:
    """Values the guesses of prompt tokens by the passes of this machine.

    Args:
        tokens: the prompt tokens.
        vocab_size: of the target; their ids follow it.
    """

    def __init__(self, tokens: PromptTokens, vocab_size: int) -> None:
        self.tokens, self.ids = tokens, tokens.ids(vocab_size)
        self._policies: dict[tuple[float, ...], PromptPolicy] = {}
        self._rates: dict[str, _Rate] = {}

    def policy(self, pass_s: Sequence[float]) -> PromptPolicy:
        """Return what to buy where passes take these seconds, T(1), T(2), …; solved once."""
        key = tuple(pass_s)
        if key not in self._policies:
            self._policies[key] = solve(self.tokens.ranks, pass_s, num_chains=self.ids.num_chains)
        return self._policies[key]

    def worth(self, pass_s: Sequence[float], use: str) -> PromptWorth:
        """Return what guesses and seconds are worth; the rate is the policy's, and by and by the measured one.

        Args:
            pass_s: T(1), T(2), …
            use: what is measured apart: who drafts, and whether text is sampled.
        """
        worth = self.policy(pass_s).worth
        rate = self._rates.get(use)
        if rate is None:
            return worth
        prior_s = _PRIOR_STEPS * pass_s[0]
        tokens_per_s = (rate.num_tokens + prior_s * worth.tokens_per_s) / (rate.seconds + prior_s)
        return PromptWorth(worth.values, tokens_per_s, worth.num_chains)

    def record(self, use: str, num_tokens: int, seconds: float) -> None:
        """Take in what a step emitted, and the seconds that it was expected to take."""
        rate = self._rates.setdefault(use, _Rate())
        rate.num_tokens = _DECAY * rate.num_tokens + num_tokens
        rate.seconds = _DECAY * rate.seconds + seconds


def use_of(sequence: DecodingSequence) -> str:
    """Return who drafts, and whether text is sampled: rates are measured apart."""
    request = sequence.request
    return f"{request.drafter.name}{'' if request.draft_sampling is None else ' (sampled)'}"


class _Rate:
    """Decayed sums."""

    def __init__(self) -> None:
        self.num_tokens = self.seconds = 0.0
