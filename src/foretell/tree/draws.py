"""How the children of a node were drawn: what rejection rules have to know of a draft."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class DrawMode(Enum):
    """How draws at one node depend on each other. Children without draws are deterministic: some ranking chose them."""

    WITHOUT_REPLACEMENT = "without replacement"
    INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What was drawn at one node, and from which law.

    A rule that tests draws is exact only if this is the very law that they were drawn from, and if what was drawn had
    no say in what is here: whether a node has draws, and how many, may depend on its ancestors and on nothing else.
    """

    ids: tuple[int, ...]
    """In the order in which they were drawn; independent draws may repeat an id, which is one child nevertheless."""
    law_ids: NDArray[np.int64]
    """[K], distinct."""
    law_probs: NDArray[np.float64]
    """[K], at least 0; only their ratios matter."""
    mode: DrawMode = DrawMode.WITHOUT_REPLACEMENT

    def keep(self, kept: Set[int]) -> Draws | None:
        """Return the draws with which a node has these children; None where they are not the first that were drawn."""
        if set(self.ids) <= kept:
            return self
        first: set[int] = set()
        for num_draws, token_id in enumerate(self.ids, start=1):
            if token_id not in kept:
                return None
            first.add(token_id)
            if len(first) == len(kept):
                return replace(self, ids=self.ids[:num_draws])
        raise AssertionError("children are kept that were not drawn")
