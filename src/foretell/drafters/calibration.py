"""Learn from outcomes how far drafters' estimates can be trusted."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretell.tree.shape import best_first
from foretell.tree.token_tree import TokenTree

PRIOR_WEIGHT: Final = 16.0
"""Observations that a drafter's own estimate is worth."""

DECAY: Final = 0.998
"""What an observation of a bucket leaves of the older ones: it remembers about 500."""

_LOG_EDGES: Final = tuple(map(math.log, (0.02, 0.05, 0.1, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)))
_NUM_CONFIDENCES: Final = len(_LOG_EDGES) + 1
_NUM_RANKS: Final = 4
"""Best child, second, third, and all others."""
_DEPTH_BUCKETS: Final = (0, 0, 1, 2, 2, 3)
"""Depth 1, 2, 3 to 4, and deeper."""
_NUM_DEPTHS: Final = 4
_NUM_BUCKETS: Final = _NUM_RANKS * _NUM_DEPTHS * _NUM_CONFIDENCES


class Calibration:
    """Beta counts of "the child was right, given that its parent was", by source, rank, depth and own confidence.

    The estimate of a node is the posterior mean of its bucket, whose prior is the drafter's own estimate; a path's is
    the product. It holds for any drafter and any mixture of them. Sampled text is counted apart from greedy text: what
    is likely comes true less often there.

    Cost: about 1 µs a node, for either method.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def calibrate(self, tree: TokenTree, *, is_sampled: bool = False) -> TokenTree:
        """Return the tree with `log_accept` made of calibrated conditionals; nodes keep their places."""
        raw, parents, sources = tree.log_accept, tree.parents, tree.sources
        log_accept = [0.0] * len(raw)
        buckets = _buckets(tree)
        for node in range(1, len(raw)):
            parent, counts = parents[node], self._counts.get(_key(sources[node], is_sampled))
            conditional = raw[node] - raw[parent]
            if counts is not None and (tested := counts.tested[buckets[node]]):
                right = counts.right[buckets[node]] + PRIOR_WEIGHT * math.exp(conditional)
                conditional = math.log(right / (tested + PRIOR_WEIGHT))
            log_accept[node] = log_accept[parent] + conditional
        return TokenTree(tree.token_ids, parents, log_accept, sources)

    def update(self, tree: TokenTree, token_ids: Sequence[int], *, is_sampled: bool = False) -> None:
        """Learn from what came after a tree's root.

        Whether a node was bought does not matter: it is judged by the text, so plain steps teach as well.

        Args:
            tree: as the drafter proposed it, not calibrated and not pruned.
            token_ids: the tokens that followed the root, as far as they are known; judged until they leave the tree.
            is_sampled: whether they were drawn with a temperature above 0.
        """
        if len(tree) == 1:
            return
        buckets, children = _buckets(tree), tree.children()
        node: int | None = 0
        for token_id in token_ids:
            if node is None:
                return
            for child_id, child in children[node].items():
                counts = self._counts.setdefault(_key(tree.sources[child], is_sampled), _Counts())
                bucket = buckets[child]
                counts.tested[bucket] = DECAY * counts.tested[bucket] + 1.0
                counts.right[bucket] = DECAY * counts.right[bucket] + (child_id == token_id)
            node = children[node].get(token_id)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain data, for `from_json`."""
        sources = {
            source: {
                str(bucket): [round(tested, 3), round(counts.right[bucket], 3)]
                for bucket, tested in enumerate(counts.tested)
                if tested
            }
            for source, counts in self._counts.items()
        }
        return {"num_buckets": _NUM_BUCKETS, "sources": sources}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Calibration:
        """Return what `to_json` gave; an empty calibration where the buckets are not today's or the data is damaged."""
        calibration = cls()
        if document.get("num_buckets") != _NUM_BUCKETS:
            return calibration
        try:
            for source, buckets in document["sources"].items():
                counts = calibration._counts[source] = _Counts()
                for bucket, (tested, right) in buckets.items():
                    counts.tested[int(bucket)], counts.right[int(bucket)] = float(tested), float(right)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return cls()
        return calibration


class _Counts:
    __slots__ = ("right", "tested")

    def __init__(self) -> None:
        self.tested = [0.0] * _NUM_BUCKETS
        self.right = [0.0] * _NUM_BUCKETS


def _key(source: str, is_sampled: bool) -> str:
    return f"{source} (sampled)" if is_sampled else source


def _buckets(tree: TokenTree) -> list[int]:
    """Return each node's bucket; the root's is meaningless."""
    raw, parents = tree.log_accept, tree.parents
    num_children, depths, buckets = [0] * len(raw), [0] * len(raw), [0] * len(raw)
    for node in best_first(tree)[1:]:
        parent = parents[node]
        rank, depth = num_children[parent], depths[parent] + 1
        num_children[parent], depths[node] = rank + 1, depth
        place = min(rank, _NUM_RANKS - 1) * _NUM_DEPTHS + (_DEPTH_BUCKETS[depth] if depth <= 4 else _NUM_DEPTHS - 1)
        buckets[node] = place * _NUM_CONFIDENCES + bisect_right(_LOG_EDGES, raw[node] - raw[parent])
    return buckets
