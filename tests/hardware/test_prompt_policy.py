"""Policies for prompt tokens: what they promise comes true, and none is better."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.hardware.prompt_policy import GuessRanks, PromptPolicy, RankTree, solve

LINEAR = [1.0 + 0.05 * row for row in range(12)]
BUCKETS = [1.0] * 4 + [1.3] * 2 + [2.0] * 6
FLAT = [1.0] * 12


def independent(*slots: Sequence[float]) -> GuessRanks:
    """Return counts of guesses whose slots do not depend on each other, by the share of each rank."""
    joint = np.ones(())
    for shares in slots:
        joint = np.multiply.outer(joint, [*shares, 1.0 - sum(shares)])
    return GuessRanks(np.round(joint * 1e8).astype(np.int64))


GOOD = ([0.6, 0.15], [0.45, 0.2], [0.3, 0.2])
POOR = ([0.3, 0.1], [0.15, 0.1], [0.1, 0.05])


def simulate(
    policy: PromptPolicy, ranks: GuessRanks, slots: Sequence[Sequence[float]], pass_s: list[float]
) -> tuple[float, float]:
    """Return tokens of a step and tokens per second of the policy's own purchases, drawn one by one."""
    draw = random.Random(0)
    trees = [ranks.tree(state) for state in range(len(slots) + 1)]
    num_tokens, seconds, state, num_steps = 0, 0.0, 0, 30_000
    for _ in range(num_steps):
        bought = policy.purchases[state]
        paths = trees[state].paths[: len(bought.num_prompts)]
        path: tuple[int, ...] = ()
        for shares in slots[:state]:
            (rank,) = draw.choices([*range(len(shares) + 1)], [*shares, 1.0 - sum(shares)])
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        num_tokens += 1 + len(path)
        seconds += pass_s[bought.num_rows - 1]
        state = bought.num_prompts[paths.index(path)]
    return num_tokens / num_steps, num_tokens / seconds


@pytest.mark.parametrize("pass_s", [LINEAR, BUCKETS, FLAT], ids=["linear", "buckets", "flat"])
@pytest.mark.parametrize("slots", [GOOD, POOR, GOOD[:1]], ids=["good", "poor", "one slot"])
def test_what_is_promised_comes_true(slots: Sequence[Sequence[float]], pass_s: list[float]) -> None:
    ranks = independent(*slots)
    policy = solve(ranks, pass_s)
    tokens_per_pass, tokens_per_s = simulate(policy, ranks, slots, pass_s)
    assert policy.tokens_per_pass == pytest.approx(tokens_per_pass, rel=0.03)
    assert policy.worth.tokens_per_s == pytest.approx(tokens_per_s, rel=0.03)
    assert tokens_per_s > 1.02 / pass_s[0]
    assert policy.rows_per_pass > 1.4
    assert sum(policy.visits) == pytest.approx(1.0)
    assert policy.worth.values[0] == 0.0
    rises = np.diff(policy.worth.values)
    assert rises[0] > 0
    assert (rises >= 0).all()
    assert (np.diff(rises) <= 1e-9).all()


@pytest.mark.parametrize("num_chains", [1, 3])
def test_off_where_a_row_costs_a_pass(num_chains: int) -> None:
    policy = solve(independent(*GOOD), [1.0, 2.0, 3.0, 4.0], num_chains=num_chains)
    assert policy.purchases[0].num_prompts == (0,)
    assert policy.rows_per_pass == pytest.approx(1.0)
    assert (policy.tokens_per_pass, policy.worth.tokens_per_s) == (pytest.approx(1.0), pytest.approx(1.0))


def test_an_ensemble_pays_for_its_chains() -> None:
    ranks = independent(*GOOD)
    one, two = (solve(ranks, LINEAR, num_chains=num_chains) for num_chains in (1, 2))
    assert one.worth.tokens_per_s > two.worth.tokens_per_s > 1.0


def brute_force(ranks: GuessRanks, pass_s: list[float]) -> float:
    """Return the tokens per second of the best of all policies."""
    trees = [ranks.tree(state) for state in range(ranks.num_slots + 1)]
    rates = []
    for policy in itertools.product(*(_purchases(tree, ranks.num_slots, len(pass_s)) for tree in trees)):
        moves, tokens, seconds = np.zeros((len(trees), len(trees))), [], []
        for state, (tree, num_prompts) in enumerate(zip(trees, policy, strict=True)):
            reached = np.exp(tree.log_accept[: len(num_prompts)])
            for node, size in enumerate(num_prompts):
                children = [child for child in range(len(num_prompts)) if tree.parents[child] == node]
                moves[state, size] += reached[node] - reached[children].sum()
            tokens.append(reached.sum())
            seconds.append(pass_s[len(num_prompts) + sum(num_prompts) - 1])
        shares = np.linalg.matrix_power(0.5 * moves + 0.5 * np.eye(len(trees)), 2**12)[0]  # lazy, so that it converges
        rates.append(float(shares @ tokens / (shares @ seconds)))
    return max(rates)


def _purchases(tree: RankTree, num_slots: int, num_rows: int) -> list[tuple[int, ...]]:
    return [
        num_prompts
        for size in range(1, min(num_rows, len(tree.paths)) + 1)
        for num_prompts in itertools.product(range(num_slots + 1), repeat=size)
        if size + sum(num_prompts) <= num_rows
    ]


@pytest.mark.parametrize("pass_s", [[1.0, 1.0], [1.0, 1.3, 1.6], [1.0, 1.2, 1.2, 1.5], [1.0, 1.0, 1.0, 1.9]], ids=str)
@pytest.mark.parametrize("slots", [([0.7], [0.6]), ([0.3, 0.2],), ([0.2], [0.95])], ids=str)
def test_no_policy_is_better(slots: Sequence[Sequence[float]], pass_s: list[float]) -> None:
    """The last slots make a second guess worth more than the first."""
    ranks = independent(*slots)
    rate = solve(ranks, pass_s).worth.tokens_per_s
    assert rate == pytest.approx(brute_force(ranks, pass_s), rel=0.005)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_trees_are_best_first_whatever_was_counted(num_slots: int, num_ranks: int, data: st.DataObject) -> None:
    shape = (num_ranks + 1,) * num_slots
    size = math.prod(shape)
    counts = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    ranks = GuessRanks(np.reshape(counts, shape))
    for depth in range(num_slots + 1):
        tree = ranks.tree(depth, max_nodes=20)
        assert tree.paths[0] == ()
        assert len(set(tree.paths)) == len(tree.paths) <= 20
        assert tree.log_accept == sorted(tree.log_accept, reverse=True)
        assert max(map(len, tree.paths)) <= depth
        for node in range(1, len(tree.paths)):
            parent = tree.parents[node]
            assert parent < node
            assert tree.paths[node][:-1] == tree.paths[parent]
            assert 0 <= tree.paths[node][-1] < num_ranks
        leaving = np.exp(tree.log_accept)
        np.subtract.at(leaving, tree.parents[1:], np.exp(tree.log_accept[1:]))
        assert (leaving > -1e-9).all(), "children are no likelier than their parent"


def test_nothing_is_guessed_where_nothing_was_counted() -> None:
    ranks = GuessRanks(np.zeros((4, 4), dtype=np.int64))
    assert ranks.tree(2).paths == [()]
    assert ranks.accuracy(0, 3) == 0.0
    assert solve(ranks, LINEAR).purchases[0].num_prompts == (0,)


def test_accuracy_counts_the_best_ranks_of_one_slot() -> None:
    ranks = GuessRanks(np.array([[4, 1, 1], [2, 0, 0], [0, 1, 1]]))
    assert [ranks.accuracy(0, size) for size in (1, 2, 9)] == [0.6, 0.8, 0.8]
    assert [ranks.accuracy(1, size) for size in (1, 2)] == [0.6, 0.8]
