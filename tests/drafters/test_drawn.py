"""Planned shapes filled with draws: which places exist, in which order, and from which law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foretell.drafters.drawn import DraftLaw, draw_tree
from foretell.tree.shape import Shape, positional_shape
from foretell.tree.token_tree import TokenTree
from foretell.verify.chance import KeyedChance
from foretell.verify.draws import DrawPlan

IDS = np.array([3, 5, 8, 9])
SHAPE = positional_shape([0.6, 0.3, 0.1], 14, max_depth=4)


class Laws:
    """A law for each last token; keeps what it was asked for."""

    def __init__(self, num_possible: int = 4) -> None:
        self.num_possible = num_possible
        self.asked: list[list[int]] = []

    def probs(self, last_token: int) -> np.ndarray:
        probs = np.random.default_rng(last_token).dirichlet(np.ones(4))
        probs[self.num_possible :] = 0.0
        return probs

    def __call__(self, tree: TokenTree, nodes: list[int]) -> list[DraftLaw]:
        self.asked.append(nodes)
        assert len({tree.depths()[node] for node in nodes}) == 1
        return [DraftLaw(IDS, self.probs(tree.token_ids[node])) for node in nodes]


def drawn(laws: Laws, seed: int, shape: Shape = SHAPE, leaf_ids: Sequence[int] = ()) -> TokenTree:
    plan = DrawPlan(shape, KeyedChance("draft", seed, 0, 7))
    return draw_tree(1, plan, laws, "toy", frozenset(leaf_ids))


@pytest.mark.parametrize("seed", range(20))
def test_the_shape_is_filled_level_by_level(seed: int) -> None:
    laws = Laws()
    tree = drawn(laws, seed)
    assert len(tree) == len(SHAPE)
    assert sorted(tree.log_accept) == sorted(SHAPE.log_accept)
    assert len(laws.asked) == max(tree.depths())
    assert tree.draws is not None
    for node, children in enumerate(tree.children()):
        assert (node in tree.draws) == bool(children)
        if children:
            assert tree.draws[node].ids == tuple(children)  # distinct, in the order of their draws
            np.testing.assert_array_equal(tree.draws[node].law_probs, laws.probs(tree.token_ids[node]))
            estimates = [tree.log_accept[child] for child in children.values()]
            assert estimates == sorted(estimates, reverse=True)
    assert drawn(Laws(), seed).token_ids == tree.token_ids


def test_draws_follow_the_law_of_their_node() -> None:
    firsts = [drawn(Laws(), seed, SHAPE.first(2)).token_ids[1] for seed in range(2000)]
    shares = [firsts.count(token_id) / 2000 for token_id in IDS.tolist()]
    assert shares == pytest.approx(Laws().probs(1).tolist(), abs=0.04)


def test_below_an_end_places_stay_empty() -> None:
    """Nothing moves into them: the other nodes are those of the same shape with another token in that place."""
    num_ends = 0
    for seed in range(30):
        tree = drawn(Laws(), seed, leaf_ids=[8])
        ends = [node for node in range(1, len(tree)) if tree.token_ids[node] == 8]
        num_ends += len(ends)
        assert not any(tree.children()[node] for node in ends)
        assert set(tree.log_accept) <= set(SHAPE.log_accept)
        if not ends:
            assert len(tree) == len(SHAPE)
    assert num_ends > 10
    assert len(drawn(Laws(), 0, leaf_ids=[1])) == len(SHAPE)  # the root is no draw


def test_an_exhausted_law_leaves_places_empty() -> None:
    tree = drawn(Laws(num_possible=1), 0)
    assert tree.token_ids[1:] == [3] * (len(tree) - 1)
    assert tree.parents == list(range(-1, len(tree) - 1))


def test_the_root_alone_asks_nobody() -> None:
    laws = Laws()
    assert len(drawn(laws, 0, Shape([-1], [0.0]))) == 1
    assert laws.asked == []
