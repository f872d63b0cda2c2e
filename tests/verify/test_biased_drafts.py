"""Procedures of which sound drafting is a word away: what the children are tested with is not how they were drawn.

They go through the test that sound drafts pass, and fail it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from foretell.tree.draws import Draws
from foretell.tree.pack import pack
from foretell.tree.token_tree import TokenTree
from foretell.verify.chance import Chance, KeyedChance
from foretell.verify.draws import draw_children
from foretell.verify.rejection import verify_rejection
from toy import (
    DRAFT_PROBS,
    DRAWN_RULES,
    EXACT,
    FIRST,
    IDS,
    IN_ORDER,
    INDEPENDENT,
    TARGET_PROBS,
    DrawNode,
    Verify,
    decode,
    draw_tree,
    enumerate_step,
    toy,
)


def best(probs: np.ndarray, num: int) -> tuple[int, ...]:
    return tuple(np.argsort(-probs, kind="stable")[:num].tolist())


def ranked_as_if_drawn(chance: Chance, last_token: int, num: int) -> Draws:
    return Draws(best(DRAFT_PROBS[last_token], num), IDS, DRAFT_PROBS[last_token])


def sorted_draws(chance: Chance, last_token: int, num: int) -> Draws:
    draws = IN_ORDER(chance, last_token, num)
    return replace(draws, ids=tuple(sorted(draws.ids, key=lambda token_id: -DRAFT_PROBS[last_token, token_id])))


def best_of_more_draws(chance: Chance, last_token: int, num: int) -> Draws:
    draws = sorted_draws(chance, last_token, num + 1)
    return replace(draws, ids=draws.ids[:num])


def drawn_from_the_best_tested_with_all(chance: Chance, last_token: int, num: int) -> Draws:
    probs = DRAFT_PROBS[last_token] * np.isin(IDS, best(DRAFT_PROBS[last_token], 2))
    return replace(draw_children(IDS, probs, num, chance), law_probs=DRAFT_PROBS[last_token])


def unlikely_draws_dropped(chance: Chance, last_token: int, num: int) -> Draws:
    draws = IN_ORDER(chance, last_token, num)
    return draws if DRAFT_PROBS[last_token, draws.ids[0]] >= 0.2 else replace(draws, ids=())


def repeated_draws_dropped(chance: Chance, last_token: int, num: int) -> Draws:
    draws = INDEPENDENT(chance, last_token, num)
    return replace(draws, ids=tuple(dict.fromkeys(draws.ids)))


BIASED: dict[str, tuple[DrawNode, int, float]] = {
    "ranked children as if drawn: transformers#32867": (ranked_as_if_drawn, 2, 0.250),
    "draws sorted by probability": (sorted_draws, 2, 0.164),
    "best two of three draws": (best_of_more_draws, 2, 0.237),
    "drawn from the best two, tested with all: transformers#47932": (drawn_from_the_best_tested_with_all, 1, 0.111),
    "unlikely draws dropped": (unlikely_draws_dropped, 1, 0.089),
    "repeated draws dropped": (repeated_draws_dropped, 2, 0.011),
}
"""With the distance of the first token's law from the target's, known from independent enumeration."""


@pytest.mark.parametrize("verify", DRAWN_RULES)
@pytest.mark.parametrize("name", BIASED)
def test_a_biased_draft_is_caught(name: str, verify: Verify) -> None:
    draw_node, width, distance = BIASED[name]
    law = enumerate_step(partial(draw_tree, draw_node, (width,)), verify, toy())
    assert law.distance == pytest.approx(distance, abs=6e-4)

    def draw_first_level(chance: Chance, last_token: int, num: int) -> Draws:
        return (draw_node if num == width else IN_ORDER)(chance, last_token, num)

    two_levels = enumerate_step(partial(draw_tree, draw_first_level, (width, 1)), verify, toy())
    assert two_levels.distance > 0.005


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_a_purchase_that_looks_at_what_was_drawn_is_caught(verify: Verify) -> None:
    """Two nodes are bought or none: settled before drawing it is sound, for the worth of what was drawn it is not."""

    def tree_of(chance: Chance, is_bought: Callable[[TokenTree], bool]) -> TokenTree:
        tree = draw_tree(IN_ORDER, (1, 1), chance)
        return tree if is_bought(tree) else TokenTree.root(FIRST)

    def is_likely(tree: TokenTree) -> bool:
        return all(DRAFT_PROBS[last, token_id] >= 0.3 for last, token_id in zip(tree.token_ids, tree.token_ids[1:]))

    for is_settled in (True, False):
        assert (
            enumerate_step(partial(tree_of, is_bought=lambda _, is_it=is_settled: is_it), verify, toy()).distance
            < EXACT
        )
    assert enumerate_step(partial(tree_of, is_bought=is_likely), verify, toy()).distance > 0.02


# With the chance that the engine uses


@pytest.mark.parametrize("name", list(BIASED)[:5])  # the sixth is too near for so few samples
def test_sampled_tokens_of_a_biased_draft_are_caught(name: str, p_value: Callable[..., float]) -> None:
    draw_node, width, _ = BIASED[name]
    for verify in DRAWN_RULES:
        counts = Counter(decode(seed, draw_node, (width,), verify, toy()) for seed in range(600))
        assert p_value(counts, toy().extend(())) < 1e-6


def test_a_draft_tested_with_its_own_chance_is_caught(p_value: Callable[..., float]) -> None:
    def decode_with_one_key(seed: int) -> tuple[int, ...]:
        tree = pack(draw_tree(IN_ORDER, (1,), KeyedChance("draft", seed, 0, 2)))
        verdict = verify_rejection(tree, toy().law_of, KeyedChance("draft", seed, 0, 2))
        return (*(tree.token_ids[row] for row in verdict.accepted), verdict.last_token)[:1]

    first_token = {(token_id,): probability for token_id, probability in enumerate(TARGET_PROBS[FIRST].tolist())}
    assert p_value(Counter(map(decode_with_one_key, range(600))), first_token) < 1e-6
