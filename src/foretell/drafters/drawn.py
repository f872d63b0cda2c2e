"""Fill a planned shape with draws, for drafters that know their own law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretell.tree.token_tree import TokenTree
from foretell.verify.draws import DrawPlan, draw_children


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaw:
    """What a drafter draws the children of one node from."""

    ids: NDArray[np.int64]
    """[K], distinct."""
    probs: NDArray[np.float64]
    """[K], at least 0; only their ratios matter."""


def draw_tree(
    root: int,
    plan: DrawPlan,
    laws_of: Callable[[TokenTree, list[int]], Sequence[DraftLaw]],
    source: str,
    leaf_ids: frozenset[int],
) -> TokenTree:
    """Draw a tree of the plan's shape, level by level.

    Places stay empty below an end of text, and where a law has fewer tokens than the shape has children. Nothing moves
    into them, so which places exist depends on nothing but the nodes above.

    Args:
        root: token at the root.
        plan: shape and chance.
        laws_of: called once for each level, with the tree so far and the nodes of one depth that get children.
        source: name for the tree's nodes.
        leaf_ids: tokens below which nothing is drawn (EOS), the root excepted.
    """
    tree, shape = TokenTree.root(root), plan.shape
    children: list[list[int]] = [[] for _ in range(len(shape))]
    for node in range(1, len(shape)):
        children[shape.parents[node]].append(node)
    places, level, tree.draws = {0: 0}, [0], {}
    while level:
        parents = [
            node for node in level if children[node] and (node == 0 or tree.token_ids[places[node]] not in leaf_ids)
        ]
        laws, level = laws_of(tree, [places[node] for node in parents]) if parents else (), []
        for parent, law in zip(parents, laws, strict=True):
            draws = draw_children(law.ids, law.probs, len(children[parent]), plan.chance)
            tree.draws[places[parent]] = draws
            for node, token_id in zip(children[parent], draws.ids):
                places[node] = tree.add(places[parent], token_id, shape.log_accept[node], source)
                level.append(node)
    return tree
