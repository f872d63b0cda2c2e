"""Several sequences at once: each says what it says alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from foretell.hardware.profile import LatencyProfile
from foretell.params import SamplingParams

POLICIES = ("canonical", "copy")
SIZES = (1, 30, 4, 446, 9, 520, 2, 17)  # the fourth outgrows its pool on the way, the sixth starts in a larger one


def requests_of(lab: Any, truths: dict[int, list[int]], seed: int) -> list[Any]:
    """Return requests of all kinds: plain and drafted, greedy and sampled, short and long."""
    requests = []
    for place, size in enumerate(SIZES):
        params = SamplingParams(
            max_new_tokens=8 + 3 * place, temperature=place % 2, seed=place if place % 2 else None, logprobs=2
        )
        prompt = lab.prompt(place, size)
        if place not in truths:
            truths[place] = lab.run(lab.engine(), lab.request(prompt, None, params)).sequence.token_ids
        drafter = (None, lab.RandomTrees, lab.Sideways, lab.Oracle)[(place + seed) % 4]
        requests.append(lab.request(prompt, drafter and drafter(truths[place], seed), params))
    return requests


@pytest.mark.parametrize("policy", POLICIES)
def test_together_as_alone(lab: Any, policy: Any) -> None:
    truths: dict[int, list[int]] = {}
    for seed in range(4):
        engine = lab.engine(policy)
        sequences = [engine.start(request) for request in requests_of(lab, truths, seed)]
        while active := [each for each in sequences if not each.is_finished]:
            engine.step(active)
            assert all(each.region.length == len(each.token_ids) - 1 for each in active)
        assert {place: each.token_ids for place, each in enumerate(sequences)} == truths
        for sequence in sequences:
            engine.finish(sequence)
        assert engine.runner.cache.num_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_joining_and_leaving(lab: Any, policy: Any) -> None:
    """Sequences start, pause and end while others go on: regions move, and nobody notices."""
    truths: dict[int, list[int]] = {}
    for seed in range(4):
        engine, draw = lab.engine(policy), random.Random(seed)
        waiting = list(enumerate(requests_of(lab, truths, seed)))
        draw.shuffle(waiting)
        active: dict[int, Any] = {}
        while waiting or active:
            if waiting and (not active or draw.random() < 0.3):
                place, request = waiting.pop()
                active[place] = engine.start(request)
            stepped = [each for each in active.values() if draw.random() < 0.7]
            draw.shuffle(stepped)
            emissions = engine.step(stepped)
            for sequence, emitted in zip(stepped, emissions, strict=True):
                ids = [emission.token_id for emission in emitted]
                assert ids
                assert sequence.token_ids[-len(ids) :] == ids
            for place in [place for place, each in active.items() if each.is_finished]:
                assert active[place].token_ids == truths[place]
                engine.finish(active.pop(place))
        assert engine.runner.cache.num_bytes == 0


def test_no_sequences(lab: Any) -> None:
    assert lab.engine().step([]) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_every_family_in_one_pass(family_lab: Any, policy: Any) -> None:
    """TensorRT-LLM#1795: what others say in the same batch changes nothing."""
    prompts = [family_lab.prompt(seed, size) for seed, size in enumerate((3, 40, 1, 12))]
    truths = [family_lab.decode(None, prompt) for prompt in prompts]
    engine = family_lab.engine(policy)
    sequences = [
        engine.start(family_lab.request(prompt, family_lab.RandomTrees(truth, 4)))
        for prompt, truth in zip(prompts, truths, strict=True)
    ]
    while active := [each for each in sequences if not each.is_finished]:
        engine.step(active)
    assert [each.token_ids for each in sequences] == truths


# Forks


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_of_one_prompt(lab: Any, policy: Any) -> None:
    """vllm#6038, #9441: a sample depends on its seed and number, not on who else is sampled."""
    prompt = lab.prompt(0, 30)
    params = SamplingParams(max_new_tokens=20, temperature=1.5, seed=3)
    truths = [lab.decode(None, prompt, params, sequence_key=key) for key in range(6)]
    assert len(set(map(tuple, truths))) == 6
    engine = lab.engine(policy)
    requests = [
        lab.request(prompt, lab.RandomTrees(truth, key), params, sequence_key=key) for key, truth in enumerate(truths)
    ]
    first = engine.start(requests[0])
    for request in requests[1:]:
        request.drafter.begin(prompt)
    sequences = [first, *(engine.fork(first, request) for request in requests[1:])]
    while active := [each for each in sequences if not each.is_finished]:
        engine.step(active)
    assert [each.token_ids for each in sequences] == truths
    for sequence in sequences:
        engine.finish(sequence)
    assert engine.runner.cache.num_bytes == 0


def test_a_fork_copies_no_work(lab: Any) -> None:
    prompt = lab.prompt(0, 30)
    engine = lab.engine()
    first = engine.start(lab.request(prompt))
    prefills: list[int] = []
    engine.runner.prefill = lambda rows: prefills.append(len(rows.token_ids))
    fork = engine.fork(first, lab.request(prompt))
    assert prefills == []
    assert fork.region.length == 29
    assert fork.stats.num_prompt_tokens == 30


def test_sequences_that_share_a_pass_pay_for_the_rows_of_all(lab: Any) -> None:
    """One more row of each of four sequences is four more rows of the pass."""
    profile = LatencyProfile(key={}, contexts=(0,), num_rows=(1, 4, 8), pass_s=((1.0, 1.1, 3.0),))
    engine = lab.engine(profile=profile)
    alone, together = engine.drafting.curve(0), engine.drafting.curve(0, 4)
    assert alone == [1.0, 1.1, 1.1, 1.1, 3.0, 3.0, 3.0, 3.0]
    assert together[:3] == pytest.approx([1.1 / 4, 3.0 / 4, (3.0 + 4 * 1.9 / 4) / 4])  # a share of the seconds


# A row budget


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_rows", [1, 3, 8, 20])
def test_few_rows_for_all_change_nothing(lab: Any, policy: Any, max_rows: int) -> None:
    truths: dict[int, list[int]] = {}
    engine = lab.engine(policy)
    sequences = [
        engine.start(replace(request, priority=place % 3))
        for place, request in enumerate(requests_of(lab, truths, seed=1))
    ]
    while active := [each for each in sequences if not each.is_finished]:
        num_rows_before = sum(each.stats.num_rows for each in sequences)
        emissions = engine.step(active, max_rows=max_rows)
        assert 0 < sum(each.stats.num_rows for each in sequences) - num_rows_before <= max_rows
        assert sum(map(bool, emissions)) == min(max_rows, len(active))
    assert {place: each.token_ids for place, each in enumerate(sequences)} == truths


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_a_request_keeps_to_its_rows(lab: Any, policy: Any, max_rows: int) -> None:
    prompt = lab.prompt(0)
    truth = lab.decode(None, prompt)
    engine = lab.engine(policy)
    sequence = engine.start(replace(lab.request(prompt, lab.RandomTrees(truth, 1)), max_rows=max_rows))
    while not sequence.is_finished:
        num_rows_before = sequence.stats.num_rows
        engine.step([sequence])
        assert sequence.stats.num_rows - num_rows_before <= max_rows
    assert sequence.token_ids == truth
    assert bool(sequence.stats.drafted) == (max_rows > 1)


def test_the_urgent_go_first_and_nobody_starves(lab: Any) -> None:
    engine = lab.engine()
    params = SamplingParams(max_new_tokens=40)
    sequences = [
        engine.start(replace(lab.request(lab.prompt(place), None, params), priority=priority))
        for place, priority in enumerate((0, 0, 4))
    ]
    for _ in range(20):
        engine.step(sequences, max_rows=1)
    slow, slow_too, urgent = (each.num_new_tokens for each in sequences)
    assert urgent > slow + slow_too
    assert slow >= 3
    assert slow_too >= 3
