"""How large a drawn draft should be: settled before it is drawn, and without a clock, so that a seed repeats it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from foretell.hardware.budget import buy
from foretell.tree.pack import PackedTree
from foretell.tree.shape import Shape, positional_shape
from foretell.tree.token_tree import depths
from foretell.verify.match import Verdict

LEVEL_SHARE: Final = 0.1
"""What drawing one level is taken to cost, in plain passes of the target: a draft model is 15 to 20 times smaller."""

_PRIOR: Final = (0.7, 0.12, 0.05, 0.03)
_PRIOR_WEIGHT: Final = 10.0
"""Nodes that the prior is worth."""


class DrawnAcceptance:
    """How often the first, second, … child drawn at an accepted node was the accepted one, in one sequence.

    Nothing is taken over from other requests, which would make a request's output depend on them.

    Source: the acceptance vector of Sequoia, arXiv:2402.12374, §3.1, learned while decoding.
    """

    def __init__(self) -> None:
        self._accepted = [_PRIOR_WEIGHT * probability for probability in _PRIOR]
        self._tested = [_PRIOR_WEIGHT] * len(_PRIOR)

    def record(self, tree: PackedTree, verdict: Verdict) -> None:
        """Take in what became of a draft."""
        accepted_ids = [tree.token_ids[row] for row in verdict.accepted]
        for row, accepted_id in zip([0, *verdict.accepted], [*accepted_ids, None], strict=True):
            draws = (tree.draws or {}).get(row)
            for place, token_id in enumerate(() if draws is None else draws.ids):
                self._tested[place] += 1.0
                self._accepted[place] += token_id == accepted_id

    def plan(self, pass_s: Sequence[float], max_nodes: int, max_depth: int) -> Shape:
        """Return the shape that promises the most tokens per second; may be the root alone.

        Args:
            pass_s: seconds of a pass of 1, 2, … rows.
            max_nodes: nodes besides the root.
            max_depth: deepest node's distance from the root.
        """
        acceptance = [accepted / tested for accepted, tested in zip(self._accepted, self._tested, strict=True)]
        shape = positional_shape(acceptance, min(max_nodes, len(pass_s) - 1), max_depth)
        deepest = accumulate(depths(shape.parents), max)  # of the first 1, 2, … nodes
        step_s = [seconds + depth * LEVEL_SHARE * pass_s[0] for seconds, depth in zip(pass_s, deepest)]
        return shape.first(buy(shape.log_accept, step_s, 0.0).num_nodes)
