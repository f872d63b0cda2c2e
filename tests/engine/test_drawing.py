"""How large a drawn draft should be, learned from draws that were tested."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretell.engine.drawing import DrawnAcceptance
from foretell.tree.draws import Draws
from foretell.tree.pack import pack
from foretell.tree.shape import Shape
from foretell.tree.token_tree import TokenTree
from foretell.verify.match import Verdict

Paths = dict[tuple[int, ...], float]


def test_acceptance_is_learned_by_the_place_of_a_draw() -> None:
    drawn = DrawnAcceptance()
    flat = [1.0 + 0.01 * size for size in range(16)]
    before = drawn.plan(flat, 15, 6)
    assert len(before) > 3
    tree = TokenTree.root(9)
    for token_id in (5, 6):
        tree.add(0, token_id, -0.1, "toy")
    tree.draws = {0: Draws((5, 6), np.arange(8), np.ones(8))}
    packed = pack(tree)
    for _ in range(200):
        drawn.record(packed, Verdict([], 7))
    assert len(drawn.plan(flat, 15, 6)) < len(before)
    for token_id in (5, 6) * 2000:
        drawn.record(packed, Verdict([packed.children[0][token_id]], 7))
    shape = drawn.plan(flat, 15, 6)
    assert shape.parents[:3] == [-1, 0, 0]
    assert shape.log_accept[1:3] == pytest.approx([math.log(0.5)] * 2, rel=0.2)


def test_a_plan_keeps_limits_and_costs() -> None:
    drawn = DrawnAcceptance()
    assert drawn.plan([1.0, 9.0, 9.0], 2, 4) == Shape([-1], [0.0])
    assert len(drawn.plan([1.0] * 4, 9, 4)) == 4
    assert len(drawn.plan([1.0] * 16, 2, 4)) == 3
    assert set(drawn.plan([1.0] * 16, 15, 1).parents) == {-1, 0}
