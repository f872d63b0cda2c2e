"""Which nodes of a tree to keep, and which to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from foretell.tree.draws import Draws
from foretell.tree.token_tree import TokenTree, depths


def best_first(tree: TokenTree) -> list[int]:
    """Return the node indices by decreasing `log_accept`, root first, parents before children.

    Every prefix of the list is a tree, and of all trees with as many nodes the one with the most expected tokens.
    A stable sort is enough: a child's estimate never exceeds its parent's, and a tie keeps the smaller index, the
    parent, first.

    Source: Chen et al. 2024, Sequoia, arXiv:2402.12374, proposition 3.4 (expected tokens are linear in the nodes).
    """
    log_accept = tree.log_accept
    return sorted(range(len(log_accept)), key=log_accept.__getitem__, reverse=True)


def prune(tree: TokenTree, num_nodes: int) -> TokenTree:
    """Return the best `num_nodes` nodes, root included, in the order they have in `tree`; at least the root."""
    return tree if num_nodes >= len(tree) else subtree(tree, best_first(tree)[: max(num_nodes, 1)])


def subtree(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """Return these nodes, the root and every node's parent among them, in the order they have in `tree`.

    Children stay drawn where those kept are the first that were drawn, and become deterministic elsewhere. That is
    sound only if the choice of nodes is blind to what was drawn; see `Draws`.
    """
    kept = sorted(nodes)
    places = {node: place for place, node in enumerate(kept)}
    places[-1] = -1
    return TokenTree(
        [tree.token_ids[node] for node in kept],
        [places[tree.parents[node]] for node in kept],
        [tree.log_accept[node] for node in kept],
        [tree.sources[node] for node in kept],
        None if tree.draws is None else _kept_draws(tree, tree.draws, places),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens, best first, so that every prefix is a tree too; siblings in the order of their draws."""

    parents: list[int]
    """-1 for the root, always smaller than the node itself."""
    log_accept: list[float]

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """The deepest node's distance from the root."""
        return max(depths(self.parents))

    def first(self, num_nodes: int) -> Shape:
        """Return the best `num_nodes` nodes, root included."""
        return Shape(self.parents[:num_nodes], self.log_accept[:num_nodes])


def positional_shape(acceptance: Sequence[float], max_nodes: int, max_depth: int) -> Shape:
    """Return the shape with the most expected tokens, chosen before anything is drawn.

    Args:
        acceptance: probability that the first, second, … child of an accepted node is the accepted one; a value above
            the one before it counts as equal to it.
        max_nodes: nodes besides the root.
        max_depth: deepest node's distance from the root.

    Source: Chen et al. 2024, Sequoia, arXiv:2402.12374, §3.1: acceptance by position alone. Its dynamic programme and
    this heap agree where `acceptance` does not rise.
    """
    log_acceptance: list[float] = []
    for probability in acceptance:
        log_acceptance.append(min([math.log(probability), *log_acceptance[-1:]]))
    parents, log_accept = [-1], [0.0]
    heap: list[tuple[float, int, int, int]] = []  # (-log_accept, parent, place among its children, depth)
    node, depth = 0, 0
    while len(parents) <= max_nodes:
        if depth < max_depth:
            heappush(heap, (-log_accept[node] - log_acceptance[0], node, 0, depth + 1))
        if not heap:
            break
        negative, parent, place, depth = heappop(heap)
        node = len(parents)
        parents.append(parent)
        log_accept.append(-negative)
        if place + 1 < len(log_acceptance):
            heappush(heap, (-log_accept[parent] - log_acceptance[place + 1], parent, place + 1, depth))
    return Shape(parents, log_accept)


def _kept_draws(tree: TokenTree, draws: dict[int, Draws], places: dict[int, int]) -> dict[int, Draws] | None:
    """Return the draws of the nodes in `places`, by their new places."""
    children: dict[int, set[int]] = {}
    for node in range(1, len(tree)):
        if node in places:
            children.setdefault(tree.parents[node], set()).add(tree.token_ids[node])
    kept = {places[node]: draws[node].keep(token_ids) for node, token_ids in children.items() if node in draws}
    return {node: node_draws for node, node_draws in kept.items() if node_draws is not None} or None
