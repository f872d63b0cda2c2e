"""What guesses are worth on this machine: a policy for prompt tokens from how often they are right and measured T(N).

A step begins with 0 to m usable guesses, its state. It buys nodes of the tree that those allow, and prompt tokens for
the next step; how many of these stand behind the node where decoding leaves the tree is the next state. The policy
that yields the most tokens per second in the long run, and what each state is worth under it, follow by iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretell.hardware.prompt_rows import PromptWorth, RowPurchase, buy_rows

_MAX_NODES: Final = 64
"""Nodes of a tree that are looked at."""

MAX_COUNT: Final = 2**31 - 1
"""Of places, so that no sum of counts overflows."""

_MAX_ROUNDS: Final = 40

_ENDING: Final = 1e-3
"""Chance that a text ends with a step: the next one begins without guesses, whatever the policy."""


@dataclass(frozen=True, slots=True)
class GuessRanks:
    """How often the right tokens were guesses of which rank, jointly for all slots.

    Args:
        counts: [R + 1] * m; `counts[r1, r2, …]` places where the right token of slot 1 was guess r1 and so on, the last
            index for tokens beyond the first R guesses.
    """

    counts: NDArray[np.int64]

    @property
    def num_slots(self) -> int:
        """Guesses that a state can have, m."""
        return self.counts.ndim

    def accuracy(self, slot: int, num_best: int) -> float:
        """Return the share of places whose token was among the `num_best` first guesses of a slot, counted from 0."""
        axes = tuple(axis for axis in range(self.counts.ndim) if axis != slot)
        by_rank = self.counts.sum(axes)  # [R + 1]
        return float(by_rank[: min(num_best, len(by_rank) - 1)].sum() / max(1, by_rank.sum()))

    def tree(self, depth: int, max_nodes: int = _MAX_NODES) -> RankTree:
        """Return the likeliest paths of at most `depth` guesses, best first.

        A path's probability is the share of places where all its guesses were right, one observation added and spread
        as if slots did not depend on each other.
        """
        total = int(self.counts.sum())
        num_ranks = self.counts.shape[0] - 1
        joint = [
            self.counts.sum(tuple(range(size, self.counts.ndim))).astype(np.float64) for size in range(1, depth + 1)
        ]  # [R + 1] * size each
        single = [
            self.counts.sum(tuple(axis for axis in range(self.counts.ndim) if axis != slot)) / max(1, total)
            for slot in range(depth)
        ]  # [R + 1] each
        tree = RankTree([-1], [0.0], [()])
        heap: list[tuple[float, int, tuple[int, ...]]] = []
        node = 0
        while True:
            path = tree.paths[node]
            if len(path) < depth:
                for rank in range(num_ranks):
                    longer = (*path, rank)
                    spread = math.prod(float(single[slot][each]) for slot, each in enumerate(longer))
                    share = (float(joint[len(path)][longer]) + spread) / (total + 1)
                    share = min(share, math.exp(tree.log_accept[node]))
                    if share > 0:
                        heappush(heap, (-share, node, longer))
            if not heap or len(tree.paths) >= max_nodes:
                return tree
            negative, parent, path = heappop(heap)
            node = len(tree.paths)
            tree.parents.append(parent)
            tree.log_accept.append(math.log(-negative))
            tree.paths.append(path)


@dataclass(frozen=True, slots=True)
class RankTree:
    """Paths of guesses by rank, best first."""

    parents: list[int]
    log_accept: list[float]
    paths: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PromptPolicy:
    """What to buy in each state, and what that yields."""

    worth: PromptWorth
    purchases: tuple[RowPurchase, ...]
    """By state."""
    visits: tuple[float, ...]
    """Share of steps that begin in each state."""

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of a step in the long run."""
        return sum(
            share * purchase.expected_tokens for share, purchase in zip(self.visits, self.purchases, strict=True)
        )

    def replay(self, ranks: GuessRanks, texts: Sequence[NDArray[np.int64]]) -> float:
        """Return the tokens of a step when texts are decoded by this policy's trees from first place to last.

        In the long run that is `tokens_per_pass`, if guesses were as good behind a miss as elsewhere. They are not.

        Args:
            ranks: those that the policy was solved for; its trees are theirs.
            texts: for every place of a text the ranks of what followed, [A, m].
        """
        trees = [ranks.tree(state).paths for state in range(len(self.purchases))]
        num_steps = num_tokens = 0
        for text in texts:
            place = state = 0
            while place < len(text):
                bought = self.purchases[state].num_prompts
                found = tuple(text[place].tolist())
                node = max(
                    (node for node, path in enumerate(trees[state][: len(bought)]) if path == found[: len(path)]),
                    key=lambda node: len(trees[state][node]),
                )
                place += len(trees[state][node]) + 1
                state = bought[node]
                num_steps += 1
            num_tokens += place
        return num_tokens / max(1, num_steps)

    @property
    def rows_per_pass(self) -> float:
        """Rows of a step in the long run."""
        return sum(share * purchase.num_rows for share, purchase in zip(self.visits, self.purchases, strict=True))


def solve(ranks: GuessRanks, pass_s: Sequence[float], draft_s: float = 0.0, num_chains: int = 1) -> PromptPolicy:
    """Return the policy with the most tokens per second; "no speculation" is one of them.

    Args:
        ranks: how good the guesses are.
        pass_s: T(1), T(2), …
        draft_s: host seconds of a step that has guesses.
        num_chains: rows that a prompt token takes.

    Cost: 20 ms for three slots and 12 rows.
    Source: average-reward policy iteration (Howard); the problem is that of arXiv:2405.18628 §3.3.
    """
    trees = [ranks.tree(state) for state in range(ranks.num_slots + 1)]
    nothing = (RowPurchase((0,), 1, 1.0, 0.0),) * len(trees)
    policy = best = _evaluate(trees, nothing, pass_s, draft_s, num_chains)
    for _ in range(_MAX_ROUNDS):
        purchases = tuple(
            _improve(tree, before, pass_s, draft_s if state else 0.0, policy.worth)
            for state, (tree, before) in enumerate(zip(trees, policy.purchases, strict=True))
        )
        if purchases == policy.purchases:
            break
        policy = _evaluate(trees, purchases, pass_s, draft_s, num_chains)
        if policy.worth.tokens_per_s >= best.worth.tokens_per_s:
            best = policy
    return best


def _improve(
    tree: RankTree, before: RowPurchase, pass_s: Sequence[float], draft_s: float, worth: PromptWorth
) -> RowPurchase:
    """Return the best purchase; the one before where none is better, or equals would take turns for ever."""
    best = buy_rows(tree.log_accept, tree.parents, pass_s, draft_s, worth)
    shares = _leaving(tree, len(before.num_prompts))
    later = sum(share * worth.values[size] for share, size in zip(shares, before.num_prompts, strict=True))
    gain = before.expected_tokens + later - worth.tokens_per_s * (draft_s + pass_s[before.num_rows - 1])
    return best if best.gain > gain + 1e-9 else before


def _evaluate(
    trees: Sequence[RankTree],
    purchases: tuple[RowPurchase, ...],
    pass_s: Sequence[float],
    draft_s: float,
    num_chains: int,
) -> PromptPolicy:
    """Return what a policy yields: solve h + g T = r + M h with h[0] = 0 for h and g."""
    size = len(trees)
    moves = np.zeros((size, size))  # probability of each next state
    seconds, tokens = np.zeros(size), np.zeros(size)
    for state, (tree, purchase) in enumerate(zip(trees, purchases, strict=True)):
        shares = _leaving(tree, len(purchase.num_prompts))
        for share, num_prompts in zip(shares, purchase.num_prompts, strict=True):
            moves[state, num_prompts] += share
        tokens[state] = purchase.expected_tokens
        seconds[state] = pass_s[purchase.num_rows - 1] + (draft_s if state else 0.0)
    moves /= moves.sum(1, keepdims=True)
    system = np.eye(size) - (1 - _ENDING) * moves
    system[:, 0] = seconds  # h[0] = 0 makes room for g
    solution = np.linalg.solve(system, tokens)
    return PromptPolicy(
        PromptWorth(_concave([0.0, *solution[1:].tolist()]), float(solution[0]), num_chains),
        purchases,
        tuple(_stationary(moves).tolist()),
    )


def _leaving(tree: RankTree, num_nodes: int) -> list[float]:
    """Return the probability that decoding leaves the first `num_nodes` of a tree at each of them."""
    shares = [math.exp(each) for each in tree.log_accept[:num_nodes]]
    for node in range(num_nodes - 1, 0, -1):
        shares[tree.parents[node]] -= math.exp(tree.log_accept[node])
    return [max(share, 0.0) for share in shares]


def _concave(values: Sequence[float]) -> tuple[float, ...]:
    """Return the least values that are not below these, do not fall, and rise by no more than before at each step."""
    rising = list(accumulate(values, max))
    hull = list(rising)
    for start, end in combinations(range(len(values)), 2):
        step = (rising[end] - rising[start]) / (end - start)
        for between in range(start + 1, end):
            hull[between] = max(hull[between], rising[start] + step * (between - start))
    return tuple(hull)


def _stationary(moves: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of steps in each state, in the long run from state 0."""
    shares = np.zeros(len(moves))
    shares[0] = 1.0
    average = np.zeros(len(moves))
    for step in range(1, 401):  # the average converges where the chain alternates, too
        shares = shares @ moves
        if step > 100:
            average += shares
    total: float = average.sum()
    return average / total
