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

    Every step that asked, or emitted what an earlier one had accepted, is booked in plain passes: its tokens less its
    time. The gate closes when the account is `max_loss` in the red. Now and then a step asks nevertheless: if that
    pays, the gate opens; if not, the next one comes when the cost has become `probe_share` of the steps since.
    """

    max_loss: float = 2.0
    max_credit: float = 4.0
    """What past success can pay for: a drafter that stops hitting is closed after this and `max_loss`."""
    probe_share: float = 0.01
    max_pause: int = 64
    _account: float = 0.0
    _is_closed: bool = False
    _pause: int = 0
    """Steps until the next one that asks."""
    _deferred: float = 0.0
    """Gain of a step that the next one is booked with."""

    def is_open(self) -> bool:
        """Return whether this step should draft; counts the steps that do not."""
        if self._pause == 0:
            return True
        self._pause -= 1
        return False

    def record(self, num_tokens: int, step_s: float, plain_s: float, *, is_for_next: bool = False) -> None:
        """Take in a step: `num_tokens` emitted at the price of `step_s`; a plain pass costs `plain_s`.

        `is_for_next`: it paid for the next step's draft and had none itself. Both are booked together, once in a row.
        """
        gain = num_tokens - step_s / plain_s
        if is_for_next and not self._deferred:
            self._deferred = gain
            return
        gain, self._deferred = gain + self._deferred, 0.0
        if self._is_closed and gain >= 0:
            self._account, self._is_closed = 0.0, False
        self._account = min(self.max_credit, self._account + gain)
        if self._account <= -self.max_loss:
            self._is_closed = True
        if self._is_closed:
            self._pause = min(self.max_pause, math.ceil(-gain / self.probe_share))
