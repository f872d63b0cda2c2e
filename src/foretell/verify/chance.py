"""The chance that drawing and testing a draft need, as a function of a key: no generator is consumed."""

from __future__ import annotations

from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from foretell.verify.noise import keyed_uniform

Purpose = Literal["draft", "verify"]

_PURPOSES: Final[dict[Purpose, int]] = {"draft": 1, "verify": 2}


class Chance(Protocol):
    """Decides what a rule leaves to chance; every decision is independent of all others."""

    def accepts(self, target_prob: float, draft_prob: float) -> bool:
        """Return True with probability min(1, target_prob / draft_prob); never where `target_prob` is 0."""

    def draw(self, weights: NDArray[np.float64]) -> int:
        """Return an index with probabilities in the ratio of `weights`, [K]; never one whose weight is 0."""


class KeyedChance:
    """The chance of one step of one sequence, for one purpose: numbered uniform numbers under the step's key.

    Drawing and verifying have keys of their own, because a draft is tested with chance that knows nothing of it. The
    position is that of the step's first token, not of the token that is decided: a rule that has looked at a deep
    node and then gone back has spent its number, and the next step, which comes to that position again, needs another.
    """

    def __init__(self, purpose: Purpose, seed: int, sequence_key: int, position: int) -> None:
        self._key = (_PURPOSES[purpose], seed, sequence_key, position)
        self._num_used = 0

    def accepts(self, target_prob: float, draft_prob: float) -> bool:
        return self._uniform() * draft_prob < target_prob  # strict: 0 must not accept what the target never says

    def draw(self, weights: NDArray[np.float64]) -> int:
        sums = np.cumsum(weights)  # [K]
        index = int(np.searchsorted(sums, self._uniform() * sums[-1], side="right"))
        if index == len(weights):  # a product rounded up to the total
            index = int(np.flatnonzero(weights)[-1])
        return index

    def _uniform(self) -> float:
        self._num_used += 1
        return keyed_uniform(*self._key, self._num_used)
