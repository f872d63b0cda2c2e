"""Draw the children of a node from a draft's law, so that rejection rules may test them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretell.tree.draws import DrawMode, Draws
from foretell.tree.shape import Shape
from foretell.verify.chance import Chance


@dataclass(frozen=True, slots=True, eq=False)
class DrawPlan:
    """What a step asks a drafter to draw. The shape is settled before anything is drawn: see `Draws`."""

    shape: Shape
    chance: Chance
    """For this step's draws alone."""


def draw_children(
    law_ids: NDArray[np.int64],
    law_probs: NDArray[np.float64],
    num: int,
    chance: Chance,
    mode: DrawMode = DrawMode.WITHOUT_REPLACEMENT,
) -> Draws:
    """Draw at most `num` children of a node; without replacement, fewer where the law has fewer tokens.

    Args:
        law_ids: [K], distinct.
        law_probs: [K], at least 0, of any sum above 0; float64, as it is these very numbers that will be tested.
        num: at least 1.
        chance: used once for each draw.
        mode: see `DrawMode`.

    Cost: 0.15 ms for four draws of 8,192 ids, 0.75 ms of 49,152 (one core).
    """
    assert num >= 1
    assert law_ids.shape == law_probs.shape
    weights = law_probs.astype(np.float64)  # [K], a copy
    ids: list[int] = []
    while len(ids) < num and weights.any():
        index = chance.draw(weights)
        ids.append(int(law_ids[index]))
        if mode is DrawMode.WITHOUT_REPLACEMENT:
            weights[index] = 0.0
    return Draws(tuple(ids), law_ids, law_probs, mode)
