"""Rejection and traversal on a toy model of four tokens: what they emit follows the target, to the last digit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from foretell.tree.draws import Draws
from foretell.tree.pack import pack
from foretell.tree.token_tree import TokenTree
from foretell.verify.chance import Chance, KeyedChance
from foretell.verify.rejection import verify_rejection
from foretell.verify.traversal import verify_traversal
from toy import (
    DRAFT_PROBS,
    DRAWN_RULES,
    EXACT,
    FIRST,
    IDS,
    IN_ORDER,
    INDEPENDENT,
    PARAMETERS,
    TARGET_PROBS,
    DrawNode,
    Toy,
    V,
    Verify,
    decode,
    draw_tree,
    enumerate_outcomes,
    enumerate_step,
    run_step,
    toy,
)

# Sound drafts


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_three_tokens_follow_the_target(verify: Verify, name: str) -> None:
    law = enumerate_step(partial(draw_tree, IN_ORDER, (2, 1)), verify, toy(**PARAMETERS[name]))
    assert law.distance < EXACT
    if name != "plain":  # the test can tell the parameter from its absence
        assert replace(law, target=toy().extend(())).distance > 0.02


@pytest.mark.parametrize("widths", [(1,), (3,), (4,), (1, 1), (1, 2), (1, 1, 1)])
@pytest.mark.parametrize("draw_node", [IN_ORDER, INDEPENDENT])
@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_any_shape_is_exact(verify: Verify, draw_node: DrawNode, widths: Sequence[int]) -> None:
    assert enumerate_step(partial(draw_tree, draw_node, widths), verify, toy()).distance < EXACT


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_independent_draws_below_repeated_ones(verify: Verify) -> None:
    """A child that was drawn twice is tested twice; what lies below it, once."""
    law = enumerate_step(partial(draw_tree, INDEPENDENT, (2, 1)), verify, toy(top_k=3))
    assert law.distance < EXACT


def test_acceptance_is_what_theory_says() -> None:
    tree_of = partial(draw_tree, IN_ORDER)
    overlap = float(np.minimum(TARGET_PROBS[FIRST], DRAFT_PROBS[FIRST]).sum())
    one = enumerate_step(partial(tree_of, (1,)), verify_rejection, toy())
    assert one.mean_accepted == pytest.approx(overlap) == pytest.approx(0.65)
    # Known figures for these two laws, from independent enumeration.
    assert enumerate_step(partial(tree_of, (2,)), verify_rejection, toy()).mean_accepted == pytest.approx(
        0.866, abs=6e-4
    )
    assert enumerate_step(partial(tree_of, (3,)), verify_rejection, toy()).mean_accepted == pytest.approx(
        0.950, abs=6e-4
    )
    # All tokens drawn cover whatever the target says.
    assert enumerate_step(partial(tree_of, (4,)), verify_rejection, toy()).mean_accepted == pytest.approx(1.0)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 1, 1)])
def test_traversal_accepts_more_than_rejection(widths: Sequence[int]) -> None:
    tree_of = partial(draw_tree, IN_ORDER, widths)
    rejection, traversal = (enumerate_step(tree_of, verify, toy()).mean_accepted for verify in DRAWN_RULES)
    assert traversal > rejection + 0.01


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_a_draw_from_a_law_that_is_nan_is_never_accepted(verify: Verify) -> None:
    tree = TokenTree.chain([FIRST, 1, 1], [0.0] * 3, "toy")
    tree.draws = {node: Draws((1,), IDS, np.full(V, np.nan)) for node in (0, 1)}
    verdict = verify(pack(tree), toy().law_of, KeyedChance("verify", 1, 0, 2))
    assert verdict.accepted == []


# One child a node: block verification


def verify_block(drawn: Sequence[int], target: Toy, chance: Chance) -> tuple[int, ...]:
    """Block verification of a chain as its paper states it (arXiv:2403.10444, algorithm 2), a slow twin."""
    weights, rests = [1.0], []
    for length in range(len(drawn) + 1):
        law, draft_probs = target.law(tuple(drawn[:length])), DRAFT_PROBS[(FIRST, *drawn)[length]]
        target_probs = np.zeros(V)
        target_probs[law.ids] = np.exp(law.log_probs)
        if length == len(drawn):
            rests.append(target_probs)
        else:
            rests.append(np.maximum(weights[-1] * target_probs - draft_probs, 0.0))
            weights.append(min(1.0, weights[-1] * target_probs[drawn[length]] / draft_probs[drawn[length]]))
    accepted = 0
    for length in range(1, len(drawn) + 1):
        mass = float(rests[length].sum())
        threshold = weights[-1] if length == len(drawn) else mass / (mass + 1.0 - weights[length])
        if chance.accepts(threshold, 1.0):
            accepted = length
    return (*drawn[:accepted], chance.draw(rests[accepted]))


@pytest.mark.parametrize("drawn", [(0, 1), (1, 1, 2), (1, 3, 3), (3, 0, 0), (2, 2, 0)])
def test_traversal_of_a_chain_is_block_verification(drawn: Sequence[int]) -> None:
    tree = TokenTree.chain([FIRST, *drawn], [0.0] * (len(drawn) + 1), "toy")
    tree.draws = {
        node: Draws((token_id,), IDS, DRAFT_PROBS[last])
        for node, (last, token_id) in enumerate(zip((FIRST, *drawn), drawn))
    }
    ours = enumerate_outcomes(partial(run_step, lambda _: tree, verify_traversal, toy().law_of))
    assert ours == pytest.approx(enumerate_outcomes(partial(verify_block, drawn, toy())))


# With the chance that the engine uses


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_sampled_tokens_follow_the_target(verify: Verify, name: str, p_value: Callable[..., float]) -> None:
    target = toy(**PARAMETERS[name])
    counts = Counter(decode(seed, IN_ORDER, (2, 1), verify, target) for seed in range(600))
    assert p_value(counts, target.extend(())) > 1e-3
