"""Trees: merging, choosing nodes, packing into rows."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.tree.merge import merge
from foretell.tree.pack import PackedTree, pack
from foretell.tree.shape import best_first, prune
from foretell.tree.token_tree import TokenTree


@st.composite
def trees(draw: Any, root: int = 7, max_nodes: int = 24, source: str = "a") -> TokenTree:
    """Draw a valid tree; few distinct tokens and probabilities, so that paths and estimates collide."""
    tree = TokenTree.root(root)
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, len(tree) - 1))
        token_id = draw(st.integers(0, 4))
        if token_id in tree.children()[parent]:
            continue
        probability = draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.25, 1e-9]))
        tree.add(parent, token_id, tree.log_accept[parent] + math.log(probability), source)
    return tree


def token_paths(tree: TokenTree) -> dict[tuple[int, ...], int]:
    """Return `{token path from the root's child: node}`; equal in size to the tree iff siblings are distinct."""
    return {tuple(tree.token_ids[i] for i in tree.path(node)): node for node in range(len(tree))}


def check(tree: TokenTree) -> None:
    """Assert every invariant of a tree."""
    size = len(tree)
    assert len(tree.parents) == len(tree.log_accept) == len(tree.sources) == size
    assert tree.parents[0] == -1
    assert tree.log_accept[0] == 0.0
    for node in range(1, size):
        assert 0 <= tree.parents[node] < node
        assert tree.log_accept[node] <= tree.log_accept[tree.parents[node]]
    assert len(token_paths(tree)) == size, "siblings carry the same token"


@given(trees())
def test_random_trees_are_valid(tree: TokenTree) -> None:
    check(tree)
    assert tree.depths() == [len(tree.path(node)) for node in range(len(tree))]


@given(st.lists(st.sampled_from("abc").flatmap(lambda source: trees(source=source)), min_size=1, max_size=4))
def test_merge_is_the_union_with_the_best_estimates(drafts: list[TokenTree]) -> None:
    before = [list(draft.token_ids) for draft in drafts]
    merged = merge(drafts)
    check(merged)
    assert [draft.token_ids for draft in drafts] == before
    union: dict[tuple[int, ...], list[tuple[float, str]]] = {}
    for draft in drafts:
        for path, node in token_paths(draft).items():
            union.setdefault(path, []).append((draft.log_accept[node], draft.sources[node]))
    paths = token_paths(merged)
    assert paths.keys() == union.keys()
    for path, node in paths.items():
        best = max(log_accept for log_accept, _ in union[path])
        first = next(source for log_accept, source in union[path] if log_accept == best)
        assert (merged.log_accept[node], merged.sources[node]) == (best, first)


def test_merge_refuses_other_roots() -> None:
    with pytest.raises(AssertionError, match="different roots"):
        merge([TokenTree.root(1), TokenTree.root(2)])


def test_merge_returns_a_new_tree() -> None:
    tree = TokenTree.root(1)
    merged = merge([tree])
    merged.add(0, 5, -1.0, "a")
    assert len(tree) == 1


def heap_order(tree: TokenTree) -> list[int]:
    """Slow twin of `best_first`: pop the best node whose parent is already out."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    heap, order = [(0.0, 0)], []
    while heap:
        _, node = heapq.heappop(heap)
        order.append(node)
        for child in children[node]:
            heapq.heappush(heap, (-tree.log_accept[child], child))
    return order


@given(trees())
def test_best_first_agrees_with_a_heap(tree: TokenTree) -> None:
    order = best_first(tree)
    assert order[0] == 0
    assert sorted(order) == list(range(len(tree)))
    estimates = [tree.log_accept[node] for node in order]
    assert estimates == sorted(estimates, reverse=True) == [tree.log_accept[node] for node in heap_order(tree)]
    for size in range(1, len(order) + 1):
        assert all(tree.parents[node] in order[:size] for node in order[1:size])


@settings(max_examples=50)
@given(trees(max_nodes=7))
def test_best_first_prefixes_are_optimal_trees(tree: TokenTree) -> None:
    order = best_first(tree)
    for size in range(1, len(tree) + 1):
        best = -1.0
        for kept in itertools.combinations(range(len(tree)), size):
            if 0 in kept and all(tree.parents[node] in kept for node in kept if node):
                best = max(best, sum(math.exp(tree.log_accept[node]) for node in kept))
        assert sum(math.exp(tree.log_accept[node]) for node in order[:size]) == pytest.approx(best)


@given(trees(), st.integers(0, 30))
def test_prune_keeps_the_best_nodes(tree: TokenTree, num_nodes: int) -> None:
    pruned = prune(tree, num_nodes)
    check(pruned)
    assert len(pruned) == min(max(num_nodes, 1), len(tree))
    paths = token_paths(tree)
    kept = {paths[path] for path in token_paths(pruned)}
    assert kept == set(best_first(tree)[: len(pruned)])
    for path, node in token_paths(pruned).items():
        assert pruned.log_accept[node] == tree.log_accept[paths[path]]
        assert pruned.sources[node] == tree.sources[paths[path]]


def slow_mask(packed: PackedTree) -> np.ndarray:
    mask = np.zeros((len(packed), len(packed)), dtype=bool)
    for row in range(len(packed)):
        seen = row
        while seen >= 0:
            mask[row, seen] = True
            seen = packed.parents[seen]
    return mask


@given(trees(max_nodes=40))
def test_pack_keeps_the_tree(tree: TokenTree) -> None:
    packed = pack(tree)
    assert (packed.parents[0], packed.depths[0], packed.token_ids[0]) == (-1, 0, tree.token_ids[0])
    as_tree = TokenTree(packed.token_ids, packed.parents, packed.log_accept, packed.sources)
    check(as_tree)
    assert packed.depths == as_tree.depths()
    assert packed.children == as_tree.children()
    paths = token_paths(tree)
    assert paths.keys() == token_paths(as_tree).keys()
    for path, row in token_paths(as_tree).items():
        assert packed.log_accept[row] == tree.log_accept[paths[path]]
        assert packed.sources[row] == tree.sources[paths[path]]


@given(trees(max_nodes=40))
def test_pack_puts_the_first_chain_first(tree: TokenTree) -> None:
    packed = pack(tree)
    chain = packed.chain_length
    assert packed.parents[:chain] == list(range(-1, chain - 1))
    for row in range(chain):
        below = [packed.log_accept[child] for child in packed.children[row].values()]
        if row == chain - 1:
            assert not below
        else:
            assert packed.log_accept[row + 1] == max(below)
    rest = packed.log_accept[chain:]
    assert rest == sorted(rest, reverse=True)


@given(trees(max_nodes=70))
def test_mask_shows_ancestors_and_self(tree: TokenTree) -> None:
    packed = pack(tree)
    mask = packed.mask()
    assert mask.dtype == np.bool_
    np.testing.assert_array_equal(mask, slow_mask(packed))


def test_mask_of_the_root_row_shows_nothing_else() -> None:
    """sgl-project/sglang-jax#1188: the root row saw other nodes."""
    tree = TokenTree.root(1)
    for token_id in range(20):
        tree.add(0, token_id, -1.0, "a")
    np.testing.assert_array_equal(pack(tree).mask()[0], [True] + [False] * 20)


def test_certain_tokens_lead_the_first_chain() -> None:
    """Provisional tokens come in with `log_accept` 0, whatever was drafted beside them."""
    tree = TokenTree.root(1)
    node = 0
    for token_id in (5, 6, 7):
        node = tree.add(node, token_id, 0.0, "refed")
    rival = tree.add(0, 9, -1e-6, "a")
    tree.add(rival, 9, -1e-6, "a")
    tree.add(node, 8, -3.0, "a")
    packed = pack(tree)
    assert packed.token_ids == [1, 5, 6, 7, 8, 9, 9]
    assert packed.chain_length == 5


def test_pack_of_plain_decoding_is_one_row() -> None:
    packed = pack(TokenTree.root(3))
    assert (len(packed), packed.chain_length, packed.children) == (1, 1, [{}])
    assert packed.mask().tolist() == [[True]]
