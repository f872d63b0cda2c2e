"""Which rows a step buys: those that maximise expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Purchase:
    """How many rows to buy, and what they are expected to bring."""

    num_nodes: int
    """Nodes of the tree, in best-first order, root included."""
    tokens_per_s: float
    plain_tokens_per_s: float
    """What a pass without drafts would bring."""


def buy(log_accept: Sequence[float], pass_s: Sequence[float], draft_s: float, num_certain: int = 1) -> Purchase:
    """Choose the number of nodes that maximises expected tokens per second.

    Args:
        log_accept: of the tree's nodes in best-first order, the root first.
        pass_s: seconds of a pass of 1, 2, … rows; its length limits the purchase.
        draft_s: seconds that the draft took, paid whether or not its nodes are bought.
        num_certain: nodes that ride in any case: the root, and accepted tokens that must be computed again.

    Returns:
        The best count over *all* counts: T(N) is a staircase, so the first dip says nothing.

    Source: `(1 + Σ acceptance) / (T_draft + T(N))`, Sequoia, arXiv:2402.12374 §3.3, and CaDDTree, arXiv:2606.01813.
    """
    expected, best = 0.0, Purchase(num_certain, 0.0, num_certain / pass_s[min(num_certain, len(pass_s)) - 1])
    for num_nodes, node_log_accept in enumerate(log_accept[: len(pass_s)], start=1):
        expected += math.exp(node_log_accept)
        if num_nodes < num_certain:
            continue
        tokens_per_s = expected / (draft_s + pass_s[num_nodes - 1])
        if tokens_per_s > best.tokens_per_s:
            best = Purchase(num_nodes, tokens_per_s, best.plain_tokens_per_s)
    return best


@dataclass(slots=True)
class DraftGate:
    """Stops asking a drafter that does not pay, and asks again now and then.

    Drafting is judged over a window of steps by what it brought: tokens per second measured against what plain
    passes would have brought. While closed, every `pause`-th step still drafts; each failure doubles the pause.
    """

    max_pause: int = 64
    window: int = 8
    _pause: int = 0
    _skipped: int = 0
    _gain: float = 0.0
    _num_seen: int = 0

    def is_open(self) -> bool:
        """Return whether this step should draft; counts the steps that do not."""
        if self._pause == 0:
            return True
        self._skipped += 1
        if self._skipped <= self._pause:
            return False
        self._skipped = 0
        return True

    def record(self, num_tokens: int, step_s: float, plain_s: float) -> None:
        """Take in a step that drafted: `num_tokens` emitted at the price of `step_s`; a plain pass costs `plain_s`."""
        self._gain += num_tokens - step_s / plain_s
        self._num_seen += 1
        if self._gain > 0 and self._pause:
            self._pause, self._num_seen, self._gain = 0, 0, 0.0
        elif self._num_seen >= (self.window if self._pause == 0 else 1):
            if self._gain < 0:
                self._pause = min(self.max_pause, max(4, 2 * self._pause))
            self._num_seen, self._gain = 0, 0.0
