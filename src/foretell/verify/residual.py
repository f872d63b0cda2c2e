"""The target's law at a node, less what draws that were turned down have already stood for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from foretell.errors import ConfigError
from foretell.tree.draws import DrawMode, Draws
from foretell.tree.pack import PackedTree
from foretell.verify.chance import Chance
from foretell.verify.processors import Law

LawOf = Callable[[int, list[int]], Law]
"""Given a row and the token ids from the root's child to that row, the target's next-token law there."""

NO_MASS: Final = 1e-12
"""A residual as small as this is rounding: what is left of the two laws is equal."""


class Residual:
    """What the target still has to say at one node, while the node's draws are tested in their order.

    Args:
        law: the target's.
        draws: those of the node's children; None where it has none.

    Source: Leviathan et al. 2023, arXiv:2211.17192, §2.3 (the residual); MCSD, arXiv:2401.06706, and Sequoia,
        arXiv:2402.12374, §3.2 (draws without replacement); SpecInfer, arXiv:2305.09781, §4.3 (independent draws).
    """

    def __init__(self, law: Law, draws: Draws | None) -> None:
        self._law = law
        self._target_probs = np.exp(law.log_probs)  # [K]
        self._draws = draws
        if draws is None:
            return
        self._law_probs = draws.law_probs.astype(np.float64)  # [M], a copy: of a token that was drawn, 0
        self._left = float(self._law_probs.sum())
        is_whole = law.ids[-1] == len(law.ids) - 1  # then an id is its own place, and a search would take 5 ms
        places = draws.law_ids if is_whole else np.searchsorted(law.ids, draws.law_ids)  # [M]
        places = np.minimum(places, len(law.ids) - 1)  # [M]
        is_shared = law.ids[places] == draws.law_ids  # [M]
        self._draft_probs = np.zeros(len(law.ids))  # [K], the draws' law on the target's ids
        self._draft_probs[places[is_shared]] = self._law_probs[is_shared]

    def target_prob(self, token_id: int) -> float:
        """Return the probability that is left for a token; 0 for one that the target never says."""
        place = self._law.find(token_id)
        return 0.0 if place is None else float(self._target_probs[place])

    def draft_prob(self, token_id: int) -> float:
        """Return the probability with which the next draw was this token."""
        return float(self._law_probs[self._drawn(token_id)]) / self._left

    def reject(self, token_id: int, weight: float = 1.0) -> float:
        """Turn the next draw down, and leave what the target says beyond it.

        Args:
            token_id: what was drawn.
            weight: how much of the target's law was in question; below 1 only where several tokens are tested at once.

        Returns:
            The mass of (weight * target - draft)+ before normalising. Where it is rounding, the law stays as it is.
        """
        rest = np.maximum(weight * self._target_probs - self._draft_probs / self._left, 0.0)  # [K]
        mass = float(rest.sum())
        if mass > NO_MASS:
            self._target_probs = rest / mass  # [K]
        assert self._draws is not None
        if self._draws.mode is DrawMode.WITHOUT_REPLACEMENT:
            self._law_probs[self._drawn(token_id)] = 0.0
            self._draft_probs[self._law.ids == token_id] = 0.0
            self._left = float(self._law_probs.sum())
        return mass

    def draw(self, chance: Chance) -> int:
        """Return a token of what is left."""
        return int(self._law.ids[chance.draw(self._target_probs)])

    def _drawn(self, token_id: int) -> int:
        assert self._draws is not None
        (place,) = np.flatnonzero(self._draws.law_ids == token_id)
        return int(place)


def drawn_children(tree: PackedTree, row: int) -> Draws | None:
    """Return how a row's children were drawn; None where it has none.

    Raises:
        ConfigError: they were not drawn.
    """
    if not tree.children[row]:
        return None
    draws = (tree.draws or {}).get(row)
    if draws is None:
        raise ConfigError(
            f"rejection tests drawn children, row {row} of a draft has {len(tree.children[row])} that were not drawn: "
            "use `verification`='match', or a drafter that draws"
        )
    return draws
