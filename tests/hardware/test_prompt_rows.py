"""Which nodes and prompt tokens a step buys: the best of all there are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.hardware.prompt_rows import PromptWorth, RowPurchase, buy_rows
from foretell.tree.shape import best_first
from foretell.tree.token_tree import TokenTree


@st.composite
def drafts(draw: Any) -> TokenTree:
    """Draw a tree, best first, that decoding leaves at each node in one to twenty of some hundred cases."""
    size = draw(st.integers(1, 5))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    cases = draw(st.lists(st.integers(1, 20), min_size=size, max_size=size))
    for node in range(size - 1, 0, -1):
        cases[parents[node]] += cases[node]
    tree = TokenTree([*range(size)], parents, [math.log(each / cases[0]) for each in cases], ["a"] * size)
    order = best_first(tree)
    return TokenTree(
        order, [-1, *(order.index(parents[node]) for node in order[1:])], [tree.log_accept[node] for node in order]
    )


STEPS = st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]), max_size=6)
RISES = st.lists(st.floats(0.0, 0.8), min_size=1, max_size=3).map(lambda rises: sorted(rises, reverse=True))


def value(tree: TokenTree, num_prompts: tuple[int, ...], pass_s: list[float], worth: PromptWorth) -> float:
    """Return what a purchase is worth, from its definition."""
    num_nodes = len(num_prompts)
    reached = [math.exp(each) for each in tree.log_accept[:num_nodes]]
    total = sum(reached)
    for node, size in enumerate(num_prompts):
        left = reached[node] - sum(reached[child] for child in range(num_nodes) if tree.parents[child] == node)
        total += left * worth.values[size]
    return total - worth.tokens_per_s * pass_s[num_nodes + worth.num_chains * sum(num_prompts) - 1]


@settings(max_examples=150, deadline=None)
@given(drafts(), STEPS, RISES, st.floats(0.2, 1.2), st.integers(1, 2), st.integers(1, 2))
def test_no_purchase_is_better(
    tree: TokenTree, steps: list[float], rises: list[float], tokens_per_s: float, num_chains: int, num_certain: int
) -> None:
    pass_s = np.cumsum([1.0, *steps]).tolist()
    num_certain = min(num_certain, len(tree), len(pass_s))
    worth = PromptWorth((0.0, *np.cumsum(rises).tolist()), tokens_per_s, num_chains)
    bought = buy_rows(tree.log_accept, tree.parents, pass_s, 0.0, worth, num_certain)
    num_nodes = len(bought.num_prompts)
    assert bought.num_rows == num_nodes + num_chains * sum(bought.num_prompts) <= len(pass_s)
    assert num_nodes >= num_certain
    assert bought.expected_tokens == pytest.approx(sum(map(math.exp, tree.log_accept[:num_nodes])))
    assert bought.gain == pytest.approx(value(tree, bought.num_prompts, pass_s, worth))
    possible = (
        num_prompts
        for size in range(num_certain, min(len(tree), len(pass_s)) + 1)
        for num_prompts in itertools.product(range(len(worth.values)), repeat=size)
        if size + num_chains * sum(num_prompts) <= len(pass_s)
    )
    assert bought.gain == pytest.approx(max(value(tree, each, pass_s, worth) for each in possible))


def buy(pass_s: list[float], draft_s: float = 0.0, num_chains: int = 1) -> RowPurchase:
    """Buy of a chain of four that is accepted with 0.8 at each node."""
    log_accept = [node * math.log(0.8) for node in range(4)]
    worth = PromptWorth((0.0, 0.4, 0.6), 1.0 / pass_s[0], num_chains)
    return buy_rows(log_accept, [-1, 0, 1, 2], pass_s, draft_s, worth)


def test_rows_that_cost_a_pass_each_are_not_bought() -> None:
    assert buy([1.0, 2.0, 3.0, 4.0, 5.0]).num_prompts == (0,)


def test_rows_that_cost_nothing_are_all_bought() -> None:
    assert buy([1.0] * 20).num_prompts == (2, 2, 2, 2)
    assert buy([1.0] * 12, num_chains=2).num_prompts == (1, 1, 0, 2)


def test_a_draft_that_was_slow_changes_the_gain_and_no_row() -> None:
    pass_s = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    quick, slow = buy(pass_s), buy(pass_s, draft_s=0.5)
    assert (slow.num_prompts, slow.gain) == (quick.num_prompts, pytest.approx(quick.gain - 0.5))
