"""Ranks of what the target said among the guesses of prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from foretell.drafters.prompt_tokens import PromptTokens
from foretell.hardware.prompt_policy import GuessRanks, solve
from foretell.llm import LLM
from foretell.models.sampler import Sampler
from foretell.train.anchors import Anchors, read_texts, run_prompts
from foretell.train.guess_ranks import RANKS, Text, count_ranks, rank_right, rank_texts
from tiny import save_model

KEPT_IDS = np.arange(3, 259, 2)
TEXTS = [Text(list(range(40, 64)), 6), Text([9, 9, 200, 31, 77, 8, 14, 90, 91], 3), Text([5, 6, 7, 8], 2)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        yield LLM(save_model(tmp_path_factory.mktemp("tiny")), dtype="float64", threads=1)
    torch.set_num_threads(before)


def tokens_of(llm: LLM, *, has_sampler: bool, num_slots: int = 2) -> PromptTokens:
    model, draw = llm.engine.runner.model, torch.Generator().manual_seed(0)
    width = model.config.hidden_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=model.dtype)

    sampler = None
    if has_sampler:
        weights = {
            "sampler.mix.weight": random(width, 2 * width),
            "sampler.mix.bias": random(width),
            "sampler.out.weight": random(width, width),
        }
        head = random(len(KEPT_IDS), width)
        sampler = Sampler(weights, model.embedding, head, KEPT_IDS, model.dtype, model.device)  # type: ignore[attr-defined]
    return PromptTokens(random(2, num_slots, width), GuessRanks(np.ones([3] * num_slots, dtype=np.int64)), sampler)


@pytest.mark.parametrize("has_sampler", [False, True])
def test_every_place_is_ranked_as_it_is_alone(llm: LLM, has_sampler: bool) -> None:
    tokens, model = tokens_of(llm, has_sampler=has_sampler), llm.engine.runner.model
    ranked = rank_texts(tokens, model, TEXTS)
    assert [len(ranks) for ranks in ranked] == [24 - 1 - 2 - 5, 9 - 1 - 2 - 2]  # the third text is too short
    columns = {token_id: place for place, token_id in enumerate(KEPT_IDS if has_sampler else range(259))}
    for text, ranks in zip(TEXTS, ranked, strict=False):
        token_ids = torch.tensor([text.token_ids])
        for at, found in enumerate(ranks):
            place = text.num_prompt_tokens - 1 + at
            anchors = Anchors(torch.tensor([[place]]), torch.ones(1, 1, dtype=torch.bool))
            states = run_prompts(model, read_texts(model, token_ids), anchors, tokens.embeddings)[0, 0]  # [m, E]
            for slot, state in enumerate(states):
                if tokens.sampler is None:
                    scores = model.logits(state[None])[0]  # [V]
                else:
                    scores = tokens.sampler(state[None], [text.token_ids[place + slot + 1]])[0]  # [K]
                column = columns.get(text.token_ids[place + slot + 2])
                expected = RANKS if column is None else min(RANKS, int((scores > scores[column]).sum()))
                assert found[slot] == expected


def test_counts() -> None:
    counts = count_ranks([np.array([[0, 1], [0, 1]]), np.array([[RANKS, 0]])], 2)
    assert counts.shape == (RANKS + 1, RANKS + 1)
    assert (counts[0, 1], counts[RANKS, 0], counts.sum()) == (2, 1, 3)


def test_a_rank_is_the_number_of_better_ones() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 5.0], [1.0, 2.0, 3.0]])
    assert rank_right(scores, torch.tensor([2, 2, -1])).tolist() == [1, 0, RANKS]


def test_a_replay_emits_what_the_trees_hit() -> None:
    counts = np.zeros((3, 3), dtype=np.int64)
    counts[0, 0], counts[2, 2] = 60, 40
    ranks = GuessRanks(counts)
    policy = solve(ranks, [1.0, 1.0, 1.0, 1.0])
    always, never = np.zeros((30, 2), dtype=np.int64), np.full((30, 2), 2)
    assert policy.replay(ranks, [never]) == pytest.approx(1.0)
    assert policy.replay(ranks, [always]) > 1.8
    mixed = policy.replay(ranks, [np.where(np.random.default_rng(0).random((4000, 1)) < 0.6, 0, 2).repeat(2, 1)])
    assert mixed == pytest.approx(policy.tokens_per_pass, rel=0.08)
