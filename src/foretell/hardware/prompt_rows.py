"""Which nodes a step buys, and which prompt tokens behind them: rows now for tokens later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from typing import Final

MAX_SLOTS: Final = 5
"""Most prompt tokens of a chain: ranks are counted jointly, 11 ** m counts with ten ranks told apart."""


@dataclass(frozen=True, slots=True)
class PromptWorth:
    """What a step that begins with guesses is worth beyond one that begins without."""

    values: tuple[float, ...]
    """Tokens that 0, 1, … m usable guesses are worth in the long run; the first is 0, none is below the one before it,
    and each adds no more than that did."""
    tokens_per_s: float
    """The long-run rate: what a second is worth in tokens."""
    num_chains: int = 1
    """Rows that a prompt token takes: one in each chain of the ensemble."""

    @property
    def num_slots(self) -> int:
        """Most prompt tokens behind a node, m."""
        return len(self.values) - 1


@dataclass(frozen=True, slots=True)
class RowPurchase:
    """Nodes of a tree, and the prompt tokens behind each."""

    num_prompts: tuple[int, ...]
    """Prompt tokens behind each bought node, in best-first order; its length is the number of nodes."""
    num_rows: int
    """Rows of nodes and prompt tokens."""
    expected_tokens: float
    """Tokens of the step, prompt tokens' worth left out."""
    gain: float
    """Tokens of the step and of those after it, less what its seconds are worth."""


def buy_rows(
    log_accept: Sequence[float],
    parents: Sequence[int],
    pass_s: Sequence[float],
    draft_s: float,
    worth: PromptWorth,
    num_certain: int = 1,
) -> RowPurchase:
    """Choose the nodes and prompt tokens that maximise expected tokens, those of later steps included, less time.

    A node's prompt tokens count where decoding leaves the tree at that very node. For every number of nodes and every
    step of T(N), the rows that are left go to the prompt tokens that are worth most.

    Args:
        log_accept: of the tree's nodes in best-first order, the root first.
        parents: of each node its parent's place in that order; -1 for the root.
        pass_s: seconds of a pass of 1, 2, … rows; its length limits the purchase.
        draft_s: seconds that the draft took, paid whatever is bought.
        worth: what guesses and seconds are worth.
        num_certain: nodes that ride in any case, see `foretell.hardware.budget.buy`.

    Cost: 0.1 ms for 12 rows.
    Source: parallel prompt decoding, arXiv:2405.18628 §3.3 (trees with prompt tokens, sized by measured latency);
        choosing by long-run reward instead of by fixed trees is ours.
    """
    tops = [size for size in range(1, len(pass_s)) if pass_s[size] > pass_s[size - 1]] + [len(pass_s)]
    leaving: list[float] = []  # probability that decoding leaves the tree at each node
    expected, best = 0.0, None
    for node in range(min(len(log_accept), len(pass_s))):
        probability = math.exp(log_accept[node])
        expected += probability
        leaving.append(probability)
        if node:
            leaving[parents[node]] -= probability
        if node + 1 < num_certain:
            continue
        best = _best(best, leaving, expected, tops, pass_s, draft_s, worth)
    assert best is not None
    return best


def _best(
    best: RowPurchase | None,
    leaving: Sequence[float],
    expected: float,
    tops: Sequence[int],
    pass_s: Sequence[float],
    draft_s: float,
    worth: PromptWorth,
) -> RowPurchase:
    """Return the better of a purchase and those of these nodes with 0, 1, … prompt tokens."""
    values, num_nodes = worth.values, len(leaving)
    steps = [after - before for before, after in pairwise(values)]
    gains = [(share * step, node) for node, share in enumerate(leaving) if share > 0.005 for step in steps if step > 0]
    num_chains = worth.num_chains
    ranked = nlargest(min(len(gains), (tops[-1] - num_nodes) // num_chains), gains) if gains else []
    total, taken = 0.0, 0
    for top in tops:
        if top < num_nodes:
            continue
        while taken < min((top - num_nodes) // num_chains, len(ranked)):
            total += ranked[taken][0]
            taken += 1
        rows = num_nodes + num_chains * taken
        gain = expected + total - worth.tokens_per_s * (draft_s + pass_s[rows - 1])
        if best is None or gain > best.gain + 1e-12:
            num_prompts = [0] * num_nodes
            for _, node in ranked[:taken]:
                num_prompts[node] += 1
            best = RowPurchase(tuple(num_prompts), rows, expected, gain)
        if taken == len(ranked):
            break
    assert best is not None
    return best
