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


PROMPTS: Final = "prompts"
"""The drafter of prompt tokens alone, and the source of its nodes."""

_GAIN_EVERY: Final = 4
"""Steps between two that find out what guesses bring beside other drafts."""

_PRIOR_SHARE: Final = 0.5
"""Of what a guess is worth alone, what it is worth beside other drafts, before any was measured."""

_PRIOR_GAINS: Final = 8.0
"""Measured gains that the prior is worth."""


class Prompting:
    """Values the guesses of prompt tokens by the passes of this machine, and by what else is drafted.

    Args:
        tokens: the prompt tokens.
        vocab_size: of the target; their ids follow it.
    """

    def __init__(self, tokens: PromptTokens, vocab_size: int) -> None:
        self.tokens, self.ids = tokens, tokens.ids(vocab_size)
        self._policies: dict[tuple[float, ...], PromptPolicy] = {}
        self._rates: dict[str, _Rate] = {}
        self._gains: dict[str, _Gain] = {}

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
        values = worth.values
        if not use.startswith(PROMPTS):
            share = self._gains.setdefault(use, _Gain()).share
            values = tuple(share * value for value in values)
        rate = self._rates.get(use)
        if rate is None:
            return PromptWorth(values, worth.tokens_per_s, worth.num_chains)
        prior_s = _PRIOR_STEPS * pass_s[0]
        tokens_per_s = (rate.num_tokens + prior_s * worth.tokens_per_s) / (rate.seconds + prior_s)
        return PromptWorth(values, tokens_per_s, worth.num_chains)

    def is_due(self, use: str) -> bool:
        """Return whether a step that has guesses should find out what they bring beside other drafts."""
        if use.startswith(PROMPTS):
            return False
        gain = self._gains.setdefault(use, _Gain())
        gain.num_steps += 1
        return gain.num_steps % _GAIN_EVERY == 0

    def record_gain(self, use: str, pass_s: Sequence[float], num_guesses: int, gain: float) -> None:
        """Take in by how much a step with guesses is worth more than it would be with the other drafts alone."""
        alone = self.policy(pass_s).worth.values[num_guesses]
        learned = self._gains.setdefault(use, _Gain())
        learned.measured = _DECAY * learned.measured + gain
        learned.alone = _DECAY * learned.alone + alone

    def record(self, use: str, num_tokens: int, seconds: float) -> None:
        """Take in what a step emitted, and the seconds that it was expected to take."""
        rate = self._rates.setdefault(use, _Rate())
        rate.num_tokens = _DECAY * rate.num_tokens + num_tokens
        rate.seconds = _DECAY * rate.seconds + seconds


def use_of(sequence: DecodingSequence) -> str:
    """Return who drafts, and whether text is sampled: rates are measured apart."""
    request = sequence.request
    return f"{request.drafter.name}{'' if request.draft_sampling is None else ' (sampled)'}"


class _Gain:
    """What guesses bring beside other drafts, as a share of what they are worth alone: decayed sums."""

    def __init__(self) -> None:
        self.measured, self.alone = _PRIOR_GAINS * _PRIOR_SHARE, _PRIOR_GAINS
        self.num_steps = 0

    @property
    def share(self) -> float:
        return min(1.0, max(0.0, self.measured / self.alone))


class _Rate:
    """Decayed sums."""

    def __init__(self) -> None:
        self.num_tokens = self.seconds = 0.0
