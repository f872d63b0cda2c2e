"""Draws stay with a tree as long as they say how it came about, and shapes are chosen before anything is drawn."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.tree.draws import DrawMode, Draws
from foretell.tree.merge import graft, merge
from foretell.tree.pack import pack
from foretell.tree.shape import positional_shape, prune
from foretell.tree.token_tree import TokenTree

IDS, PROBS = np.arange(5), np.full(5, 0.2)


def drawn(*token_ids: int, mode: DrawMode = DrawMode.WITHOUT_REPLACEMENT) -> Draws:
    return Draws(token_ids, IDS, PROBS, mode)


def tree_of(scores: dict[tuple[int, ...], float], draws: dict[int, Draws]) -> TokenTree:
    """Return a tree from token paths with their estimates, parents first."""
    tree, nodes = TokenTree.root(9), {(): 0}
    for path, probability in scores.items():
        nodes[path] = tree.add(nodes[path[:-1]], path[-1], math.log(probability), "toy")
    tree.draws = draws
    return tree


def kept(draws: Draws, *token_ids: int) -> tuple[int, ...] | None:
    left = draws.keep(set(token_ids))
    return None if left is None else left.ids


def test_only_the_first_draws_may_be_kept() -> None:
    assert kept(drawn(3, 1, 2), 1, 2, 3) == (3, 1, 2)
    assert kept(drawn(3, 1, 2), 3, 1) == (3, 1)
    assert kept(drawn(3, 1, 2), 3) == (3,)
    assert kept(drawn(3, 1, 2), 1) is None
    assert kept(drawn(3, 1, 2), 3, 2) is None


def test_repeated_draws_end_where_the_last_kept_child_first_came() -> None:
    repeated = drawn(3, 1, 3, 2, 1, mode=DrawMode.INDEPENDENT)
    assert kept(repeated, 1, 2, 3) == (3, 1, 3, 2, 1)
    assert kept(repeated, 1, 3) == (3, 1)  # the third draw stays only because of what it is
    assert kept(repeated, 2, 3) is None


def test_pruning_keeps_first_draws_and_drops_others() -> None:
    scores = {(3,): 0.9, (1,): 0.5, (2,): 0.2, (3, 0): 0.8, (3, 4): 0.85, (1, 1): 0.4}
    tree = tree_of(scores, {0: drawn(3, 1, 2), 1: drawn(0, 4), 2: drawn(1)})
    assert prune(tree, 7) is tree
    six = prune(tree, 6)  # loses (2,)
    assert six.draws is not None
    assert {node: draws.ids for node, draws in six.draws.items()} == {0: (3, 1), 1: (0, 4), 2: (1,)}
    three = prune(tree, 3)  # keeps (3,) and (3, 4), of which 0 was drawn before
    assert three.token_ids == [9, 3, 4]
    assert three.draws is not None
    assert {node: draws.ids for node, draws in three.draws.items()} == {0: (3,)}
    assert prune(tree, 1).draws is None
    assert tree.draws is not None
    assert tree.draws[0].ids == (3, 1, 2)


def test_merging_makes_children_deterministic() -> None:
    tree = tree_of({(3,): 0.9}, {0: drawn(3)})
    assert merge([tree]).draws == tree.draws
    assert merge([tree, TokenTree.root(9)]).draws is None
    assert merge([tree, tree]).draws is None


def test_grafting_and_packing_move_draws_along() -> None:
    tree = tree_of({(3,): 0.5, (1,): 0.9, (3, 0): 0.4, (1, 1): 0.7}, {0: drawn(3, 1), 1: drawn(0), 2: drawn(1)})
    assert graft(TokenTree.root(9), tree) is tree
    grafted = graft(TokenTree.chain([7, 8, 9], [0.0, 0.0, 0.0], "refed"), tree)
    assert grafted.token_ids == [7, 8, 9, 3, 1, 0, 1]
    assert grafted.draws is not None
    assert {node: draws.ids for node, draws in grafted.draws.items()} == {2: (3, 1), 3: (0,), 4: (1,)}
    packed = pack(grafted)
    assert packed.token_ids == [7, 8, 9, 1, 1, 3, 0]
    assert packed.draws is not None
    for row, draws in packed.draws.items():
        assert set(draws.ids) == set(packed.children[row])
    assert pack(TokenTree.root(1)).draws is None
    assert graft(TokenTree.chain([7, 9], [0.0, 0.0], "refed"), TokenTree.root(9)).draws is None


def expected_tokens(children: tuple[int, ...], acceptance: list[float]) -> float:
    """Return the sum of acceptance of a tree given by each node's number of children, breadth first; -1 for none."""
    scores, open_nodes = [1.0], [0]
    for num_children in children:
        if not open_nodes or num_children > len(acceptance):
            return -1.0
        node = open_nodes.pop(0)
        for place in range(num_children):
            scores.append(scores[node] * acceptance[place])
            open_nodes.append(len(scores) - 1)
    return sum(scores) if len(scores) == len(children) else -1.0


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3), st.integers(0, 4))
def test_the_shape_has_the_most_expected_tokens(acceptance: list[float], max_nodes: int) -> None:
    falling = [min(acceptance[: place + 1]) for place in range(len(acceptance))]
    shape = positional_shape(acceptance, max_nodes, max_depth=9)
    assert len(shape) == max_nodes + 1
    ours = sum(map(math.exp, shape.log_accept))
    shapes = itertools.product(range(max_nodes + 1), repeat=max_nodes + 1)
    assert ours == pytest.approx(max(expected_tokens(children, falling) for children in shapes))
    assert shape.log_accept == sorted(shape.log_accept, reverse=True)
    for node in range(1, len(shape)):
        assert shape.parents[node] < node
        assert shape.log_accept[node] <= shape.log_accept[shape.parents[node]]


def test_a_shape_keeps_its_depth_and_its_prefixes() -> None:
    assert positional_shape([0.9], 6, max_depth=2).parents == [-1, 0, 1]
    assert positional_shape([0.9, 0.5], 6, max_depth=1).parents == [-1, 0, 0]
    assert positional_shape([0.9, 0.5], 6, max_depth=0).parents == [-1]
    assert [positional_shape([0.9, 0.5], 9, max_depth=depth).depth for depth in (0, 1, 3)] == [0, 1, 3]
    shape = positional_shape([0.6, 0.3, 0.1], 9, max_depth=4)
    assert shape.first(4) == positional_shape([0.6, 0.3, 0.1], 3, max_depth=4)
