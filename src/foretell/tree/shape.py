"""Which nodes of a tree to keep."""

from __future__ import annotations

from foretell.tree.token_tree import TokenTree


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
    if num_nodes >= len(tree):
        return tree
    kept = sorted(best_first(tree)[: max(num_nodes, 1)])
    places = {node: place for place, node in enumerate(kept)}
    places[-1] = -1
    return TokenTree(
        [tree.token_ids[node] for node in kept],
        [places[tree.parents[node]] for node in kept],
        [tree.log_accept[node] for node in kept],
        [tree.sources[node] for node in kept],
    )
