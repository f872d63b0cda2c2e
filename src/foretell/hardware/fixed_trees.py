"""Trees of guesses that do not change from step to step, one for each state: what a policy that looks is compared with.

A state is the number of usable guesses. A tree holds paths of guesses by rank, parents first, and how many prompt
tokens stand behind each; its rows are at most those that a pass may have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretell.hardware.prompt_policy import GuessRanks, RankTree, solve


@dataclass(frozen=True, slots=True)
class FixedTree:
    """Nodes of one state, the root first, and the prompt tokens behind each."""

    paths: tuple[tuple[int, ...], ...]
    num_prompts: tuple[int, ...]


FixedTrees = tuple[FixedTree, ...]
"""By state, 0 to m."""


def policy_trees(ranks: GuessRanks, pass_s: Sequence[float], num_chains: int = 1) -> FixedTrees:
    """Return the trees that yield the most tokens per second in the long run, see `solve`."""
    policy = solve(ranks, pass_s, num_chains=num_chains)
    return tuple(
        FixedTree(tuple(ranks.tree(state).paths[: len(purchase.num_prompts)]), purchase.num_prompts)
        for state, purchase in enumerate(policy.purchases)
    )


def equal_trees(ranks: GuessRanks, max_rows: int, num_chains: int = 1) -> FixedTrees:
    """Return trees of the likeliest paths where every node has all m prompt tokens behind it."""
    node_rows = 1 + num_chains * ranks.num_slots
    num_nodes = max(1, max_rows // node_rows)
    return tuple(_with_prompts(ranks.tree(state), num_nodes, ranks.num_slots) for state in range(ranks.num_slots + 1))


def random_trees(ranks: GuessRanks, max_rows: int, num_chains: int = 1, seed: int = 0) -> FixedTrees:
    """Return trees of random paths of good guesses, with random numbers of prompt tokens, of at most these rows."""
    chance = random.Random(seed)
    trees = []
    for state in range(ranks.num_slots + 1):
        paths: list[tuple[int, ...]] = [()]
        num_prompts = [1]
        rows = 1 + num_chains
        while rows < max_rows:
            extends = chance.random() < 0.5 and state > 0
            if extends:
                parent = chance.choice(paths)
                longer = (*parent, chance.randrange(4))
                if len(parent) < state and longer not in paths:
                    paths.append(longer)
                    num_prompts.append(0)
                    rows += 1
                    continue
            possible = [node for node, size in enumerate(num_prompts) if size < ranks.num_slots]
            if not possible or rows + num_chains > max_rows:
                break
            num_prompts[chance.choice(possible)] += 1
            rows += num_chains
        trees.append(FixedTree(tuple(paths), tuple(num_prompts)))
    return tuple(trees)


def published_trees(ranks: GuessRanks, max_rows: int, num_chains: int = 1) -> FixedTrees:
    """Return trees by the paper's procedure.

    For each state the likeliest paths, all with m prompt tokens; then the last prompt token of the node that loses
    least by it goes, one at a time, until the rows suffice; the root keeps all. The number of paths is the one with
    the most expected tokens in the long run, of all between a quarter and half of the rows.

    Source: arXiv:2405.18628 §3.3; its state for "nothing was accepted" is the last one, since the root has m prompts.
    """
    num_slots = ranks.num_slots
    best: tuple[float, FixedTrees] | None = None
    for num_nodes in range(max(1, max_rows // 4), max(2, max_rows // 2 + 1)):
        trees = [FixedTree(((),), (num_slots,))]
        values = [float(state) for state in range(num_slots + 1)]
        for state in range(1, num_slots + 1):
            trees.append(_pruned(ranks.tree(state), num_nodes, num_slots, max_rows, num_chains, values))
        tokens = _long_run_tokens(ranks, trees)
        if best is None or tokens > best[0]:
            best = (tokens, tuple(trees))
    assert best is not None
    return best[1]


def _with_prompts(tree: RankTree, num_nodes: int, num_prompts: int) -> FixedTree:
    paths = tuple(tree.paths[:num_nodes])
    return FixedTree(paths, (num_prompts,) * len(paths))


def _pruned(
    tree: RankTree, num_nodes: int, num_slots: int, max_rows: int, num_chains: int, values: Sequence[float]
) -> FixedTree:
    num_nodes = min(num_nodes, len(tree.paths))
    leaving = _leaving(tree, num_nodes)
    num_prompts = [num_slots] * num_nodes
    while num_nodes + num_chains * sum(num_prompts) > max_rows:
        possible = [node for node in range(1, num_nodes) if num_prompts[node] > 1]
        if not possible:
            break
        loss = {node: leaving[node] * (values[num_prompts[node]] - values[num_prompts[node] - 1]) for node in possible}
        num_prompts[min(possible, key=loss.__getitem__)] -= 1
    return FixedTree(tuple(tree.paths[:num_nodes]), tuple(num_prompts))


def _leaving(tree: RankTree, num_nodes: int) -> list[float]:
    """Return the probability that decoding leaves the first nodes of a tree at each of them."""
    leaving = [math.exp(each) for each in tree.log_accept[:num_nodes]]
    for node in range(1, num_nodes):
        leaving[tree.parents[node]] -= math.exp(tree.log_accept[node])
    return leaving


def _long_run_tokens(ranks: GuessRanks, trees: Sequence[FixedTree]) -> float:
    """Return the expected tokens of a step in the long run."""
    size = len(trees)
    moves, tokens = np.zeros((size, size)), np.zeros(size)
    for state, fixed in enumerate(trees):
        tree = ranks.tree(state)
        leaving = _leaving(tree, len(fixed.paths))
        for share, num_prompts in zip(leaving, fixed.num_prompts, strict=True):
            moves[state, num_prompts] += max(share, 0.0)
        tokens[state] = sum(math.exp(each) for each in tree.log_accept[: len(fixed.paths)])
    moves /= moves.sum(1, keepdims=True)
    shares = np.linalg.matrix_power(moves, 512)[0]
    return float(shares @ tokens)
