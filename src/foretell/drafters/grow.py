"""Best-first growth of a draft tree, shared by the drafters that can say what may follow a state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Final, TypeVar

from foretell.drafters.drafter import Proposal
from foretell.tree.token_tree import TokenTree

State = TypeVar("State")

MAX_PROBABILITY: Final = 0.99
"""No draft is certain: 1 is for tokens that are already accepted."""

MIN_PATH_PROBABILITY: Final = 0.01
"""Less likely paths are not worth the time to rank them."""


def grow(
    proposal: Proposal,
    start: State,
    expand: Callable[[State, float], Iterable[tuple[float, int, State]]],
    source: str,
    leaf_ids: frozenset[int],
) -> TokenTree:
    """Return the tree of the `max_nodes` most likely paths, at most `max_depth` deep.

    Args:
        proposal: limits, and the root: its `tip`.
        start: state of the root.
        expand: called with a state and its path's probability; gives `(probability, token id, next state)`, token ids
            distinct.
        source: name for the tree's nodes.
        leaf_ids: tokens below which nothing is drafted (EOS), the root excepted.

    Cost: at most `max_nodes` calls of `expand` and a heap of their answers.
    """
    tree = TokenTree.root(proposal.tip)
    token_ids, parents, log_accept = tree.token_ids, tree.parents, tree.log_accept
    max_nodes, max_depth = proposal.max_nodes, proposal.max_depth
    heap: list[tuple[float, int, int, int, int, State]] = []
    num_pushed = 0  # breaks ties: older first, so that states are never compared
    node, depth, state, path_probability = 0, 0, start, 1.0
    while len(token_ids) <= max_nodes:
        if depth < max_depth and (depth == 0 or token_ids[node] not in leaf_ids):
            for probability, token_id, next_state in expand(state, path_probability):
                joint = path_probability * min(probability, MAX_PROBABILITY)
                if joint >= MIN_PATH_PROBABILITY:
                    num_pushed += 1
                    heappush(heap, (-joint, num_pushed, node, depth + 1, token_id, next_state))
        if not heap:
            break
        negative_joint, _, parent, depth, token_id, state = heappop(heap)
        path_probability = -negative_joint
        node = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        log_accept.append(math.log(path_probability))
    tree.sources.extend([source] * (len(token_ids) - 1))
    return tree
