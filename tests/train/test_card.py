"""Cards tell what was measured, and nothing of kinds of text that none was held out of."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.train.card import draft_card
from foretell.train.prompt_card import prompt_card

FACTS: dict[str, Any] = {
    "target": "tiny",
    "argv": ["foretell", "train"],
    "foretell": "0",
    "torch": "0",
    "cpu": "some",
    "num_kept": 9,
    "text": {"num_tokens": 100, "num_chat_documents": 3, "num_raw_documents": 0},
}


def scores_of(**kinds: dict[str, Any]) -> dict[str, Any]:
    return {**kinds, "num_steps": 2, "training_s": 60}


@pytest.mark.parametrize("has_raw", [False, True])
def test_a_drafts_card_leaves_out_what_was_not_measured(has_raw: bool) -> None:
    agreement = {"by_depth": [[0.5, 0.6, 0.7, 0.8]], "coverage": 0.9, "chain_tokens_per_pass": 1.5, "num_choices": 7}
    raw = agreement | {"num_choices": 7 * has_raw, "coverage": 0.25, "chain_tokens_per_pass": 1.25}
    recipe = {"kind": "lm", "size": "tiny"}
    card = draft_card({**FACTS, "recipe": recipe, "scores": scores_of(chat=agreement, raw=raw)})
    assert "| chat | 1 | 0.500 |" in card
    assert ("| raw | 1 |" in card) == has_raw
    assert ("and 25.0% of the choices in raw text" in card) == has_raw
    assert ("yield 1.50 and 1.25 tokens" in " ".join(card.split())) == has_raw
    none = agreement | {"num_choices": 0}
    card = draft_card({**FACTS, "recipe": recipe, "scores": scores_of(chat=none, raw=none)})
    assert "No text was held out" in card
    assert "Kept ids" not in card


@pytest.mark.parametrize("has_raw", [False, True])
def test_the_card_of_prompt_tokens_leaves_out_what_was_not_measured(has_raw: bool) -> None:
    accuracy = {"by_slot": [[0.5, 0.6, 0.7]], "num_places": 7}
    scores = scores_of(chat=accuracy, raw=accuracy | {"num_places": 8 * has_raw})
    card = prompt_card({**FACTS, "recipe": {"capacity": "sampler", "num_slots": 1, "num_chains": 1}, "scores": scores})
    assert "| chat | 7 | 1 | 0.500 |" in card
    assert ("| raw |" in card) == has_raw
