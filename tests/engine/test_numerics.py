"""NaN, padding of the vocabulary, and other logits that must not become tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.drafters.drafter import NoDrafter
from foretell.errors import NumericsError
from foretell.params import SamplingParams
from foretell.passes.runner import PassOutput


def spoil(engine: Any, value: float, *, at_pass: int, row: int) -> None:
    """Let one pass return a row of `value`."""
    decode, num_passes = engine.runner.decode, 0

    def spoiled(rows: Any) -> PassOutput:
        nonlocal num_passes
        output: PassOutput = decode(rows)
        num_passes += 1
        if num_passes != at_pass or row >= len(output.logits[0]):
            return output
        logits = output.logits[0].clone()
        logits[row] = value
        return PassOutput(output.hidden, (logits,))

    engine.runner.decode = spoiled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at_pass", [1, 2])
def test_a_row_without_a_best_token_raises_and_emits_nothing(
    lab: Any, value: float, temperature: float, at_pass: int
) -> None:
    """vllm#53029: argmax over NaN is an id like any other, and fails much later."""
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=1 if temperature else None)
    prompt = lab.prompt(0)
    truth = lab.decode(None, prompt, params)
    for drafter in (NoDrafter(), lab.Oracle(truth)):
        engine = lab.engine()
        spoil(engine, value, at_pass=at_pass, row=0)
        sequence = engine.start(lab.request(prompt, drafter, params))
        for _ in range(at_pass - 1):
            engine.step([sequence])
        before = list(sequence.token_ids)
        with pytest.raises(NumericsError):
            engine.step([sequence])
        assert sequence.token_ids == before == truth[: len(before)]
        engine.finish(sequence)
        assert engine.runner.cache.num_bytes == 0


def test_a_bad_row_below_an_accepted_one_emits_nothing(lab: Any) -> None:
    """Not even the tokens before it, which plain decoding would have emitted: the pass cannot be trusted."""
    prompt = lab.prompt(0)
    truth = lab.decode(None, prompt)
    engine = lab.engine()
    spoil(engine, float("nan"), at_pass=1, row=3)
    sequence = engine.start(lab.request(prompt, lab.Oracle(truth)))
    with pytest.raises(NumericsError):
        engine.step([sequence])
    assert sequence.token_ids == prompt


def test_a_bad_row_that_nobody_visits_is_of_no_consequence(lab: Any) -> None:
    prompt = lab.prompt(0)
    truth = lab.decode(None, prompt)
    engine = lab.engine()
    spoil(engine, float("nan"), at_pass=1, row=3)
    assert lab.run(engine, lab.request(prompt, lab.Liar(truth))).sequence.token_ids == truth


class Poisoned:
    """A model one of whose tokens has no finite embedding."""

    def __init__(self, model: Any, token_id: int) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self._model, self._token_id = model, token_id

    def forward(self, batch: Any, keys_values: Any) -> Tensor:
        is_bad = (batch.token_ids == self._token_id).view(-1)  # [B * N]
        hidden: Tensor = self._model.forward(batch, keys_values)
        hidden[is_bad] = float("nan")
        for sequence, slots in zip(range(batch.token_ids.shape[0]), batch.slots, strict=True):
            bad_slots = slots[batch.token_ids[sequence] == self._token_id]
            for layer in keys_values:
                layer[sequence, :, bad_slots] = float("nan")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.logits(hidden)
        return logits


def test_nan_does_not_outlive_its_sequence(lab: Any) -> None:
    """A hidden slot counts 0 times its value, and 0 times NaN is NaN: it would reach whoever gets the region next."""
    prompt = lab.prompt(0)
    truth = lab.decode(None, prompt)
    bad_id = next(token_id for token_id in range(3, 64) if token_id not in truth)
    engine = lab.engine()
    engine.runner.model = Poisoned(lab.model, bad_id)
    bystander = engine.start(lab.request(prompt))
    victim = engine.start(lab.request([*prompt, bad_id, 5]))
    with pytest.raises(NumericsError):
        engine.step([victim])
    engine.finish(victim)
    assert lab.run(engine, lab.request(prompt)).sequence.token_ids == truth
    while not bystander.is_finished:
        engine.step([bystander])
    assert bystander.token_ids == truth


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_chosen(lab: Any, temperature: float) -> None:
    """Logits may be wider than the vocabulary; ids beyond it are no tokens, whoever proposes them."""
    prompt = [token_id % 40 for token_id in lab.prompt(0, 8)]
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=2 if temperature else None)
    whole = lab.decode(None, prompt, params)
    assert max(whole) >= 40
    truth = lab.decode(None, prompt, params, vocab_size=40)
    assert max(truth) < 40
    for drafter in (lab.RandomTrees, lab.Liar):
        assert lab.decode(drafter(truth, 1), prompt, params, vocab_size=40) == truth


def test_nothing_left_to_choose_from(lab: Any) -> None:
    def ban_everything(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] > 8 else scores

    prompt, params = lab.prompt(0), SamplingParams(max_new_tokens=20, logits_processors=[ban_everything])
    engine = lab.engine()
    sequence = engine.start(lab.request(prompt, None, params))
    while len(sequence.token_ids) < 9:
        engine.step([sequence])
    with pytest.raises(NumericsError, match="processors"):
        engine.step([sequence])
    assert len(sequence.token_ids) == 9
