"""Bytes that target passes read: weights once a pass, and every committed slot that its rows see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foretell.params import SamplingParams

SLOT_BYTES = 2 * 2 * 2 * 8 * 8
"""Keys and values of 2 layers, 2 heads, 8 numbers in float64: the lab's llama."""


def test_plain_decoding_reads_weights_and_context_once_a_token(lab: Any) -> None:
    prompt = lab.prompt(0, 6)
    run = lab.run(lab.engine(), lab.request(prompt, params=SamplingParams(max_new_tokens=4)))
    num_slots = 5 + 6 + 7 + 8  # the root's own slot is written, not read
    assert run.sequence.stats.target_bytes == 4 * lab.model.num_bytes + num_slots * SLOT_BYTES


@pytest.mark.parametrize("policy", ["canonical", "copy"])
def test_accepted_drafts_save_passes_and_their_bytes(lab: Any, policy: Any) -> None:
    prompt = lab.prompt(0, 6)
    truth = lab.decode(None, prompt)
    run = lab.run(lab.engine(policy), lab.request(prompt, lab.Sideways(truth)))
    starts, length = [], len(prompt) - 1
    for block in run.blocks:
        starts.append(length)
        length += len(block)
    stats = run.sequence.stats
    assert stats.num_passes < stats.num_output_tokens
    assert stats.target_bytes == stats.num_passes * lab.model.num_bytes + sum(starts) * SLOT_BYTES


def test_a_batch_shares_the_weights_evenly(lab: Any) -> None:
    engine = lab.engine()
    prompts = [lab.prompt(seed, size) for seed, size in enumerate((3, 9, 5, 9))]
    sequences = [engine.start(lab.request(prompt)) for prompt in prompts]
    engine.step(sequences)
    shares = [each.stats.target_bytes - (len(prompt) - 1) * SLOT_BYTES for each, prompt in zip(sequences, prompts)]
    assert set(shares) == {lab.model.num_bytes // 4}


def test_sliding_layers_see_their_window(make_lab: Callable[..., Any]) -> None:
    fields = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    runner = make_lab("gemma3_text", **fields).engine().runner
    layer_bytes = 2 * 2 * 16 * 8
    assert [runner.visible_bytes(length) for length in (0, 7, 8, 100)] == [
        0, 14 * layer_bytes, 15 * layer_bytes, 107 * layer_bytes,
    ]  # fmt: skip
