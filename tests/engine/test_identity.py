"""Whatever the drafter, its trees, or the commit policy: the tokens are plain decoding's."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.drafters.calibration import Calibration
from foretell.drafters.catalog import DRAFTERS, make_drafter
from foretell.drafters.drafter import Drafter
from foretell.params import SamplingParams

POLICIES = ("canonical", "copy")

SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top": {"temperature": 1.5, "top_k": 12, "top_p": 0.9},
    "min": {"temperature": 1.5, "min_p": 0.05},
    "typical": {"temperature": 1.2, "typical_p": 0.8},
    "penalties": {
        "temperature": 1.5,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "bans": {
        "temperature": 1.0,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5], [7, 8]],
        "logit_bias": {3: 4.0, 11: -2.0},
    },
    "greedy penalties": {"repetition_penalty": 1.6, "presence_penalty": 1.0},
    "greedy bans": {"no_repeat_ngram_size": 2, "bad_words_ids": [[41], [3, 7]], "logit_bias": {9: 2.0}},
}


def params_of(name: str, seed: int, **fields: Any) -> SamplingParams:
    fields = {"max_new_tokens": 20, **SAMPLINGS[name], **fields}
    return SamplingParams(seed=seed if "temperature" in fields else None, **fields)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", ["Oracle", "Liar", "Sideways", "RandomTrees"])
def test_greedy(family_lab: Any, drafter: str, policy: Any) -> None:
    engine = family_lab.engine(policy)
    for seed in range(3):
        prompt = family_lab.prompt(seed, 1 + 6 * seed)
        truth = family_lab.decode(None, prompt)
        run = family_lab.run(engine, family_lab.request(prompt, getattr(family_lab, drafter)(truth, seed)))
        assert run.sequence.token_ids == truth


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_with_many_random_trees(lab: Any, policy: Any) -> None:
    engine = lab.engine(policy)
    truths: dict[int, list[int]] = {}
    num_passes = num_tokens = 0
    for seed in range(48):
        prompt = lab.prompt(seed % 12)
        if seed % 12 not in truths:
            truths[seed % 12] = lab.decode(None, prompt)
        truth = truths[seed % 12]
        run = lab.run(engine, lab.request(prompt, lab.RandomTrees(truth, seed)))
        assert run.sequence.token_ids == truth, seed
        num_passes, num_tokens = num_passes + len(run.blocks), num_tokens + len(run.output_ids)
    assert num_tokens > 1.3 * num_passes  # or the trees were of no consequence


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_same_seed_same_tokens(lab: Any, name: str, policy: Any) -> None:
    engine = lab.engine(policy)
    for seed in range(5):
        prompt, params = lab.prompt(seed, 4), params_of(name, seed)
        truth = lab.decode(None, prompt, params, stop_ids=[2])
        for drafter in (lab.RandomTrees, lab.Sideways):
            run = lab.run(engine, lab.request(prompt, drafter(truth, seed), params, stop_ids=[2]))
            assert run.sequence.token_ids == truth, seed


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_tokens_in_every_family(family_lab: Any, policy: Any) -> None:
    engine = family_lab.engine(policy)
    for seed in range(3):
        prompt, params = family_lab.prompt(seed, 12), params_of("penalties", seed)
        truth = family_lab.decode(None, prompt, params)
        run = family_lab.run(engine, family_lab.request(prompt, family_lab.RandomTrees(truth, seed), params))
        assert run.sequence.token_ids == truth


def catalog_drafter(name: str) -> Drafter:
    return make_drafter(name, eos_ids=frozenset({2}), corpus=[[5, 6, 7, 8, 9] * 4])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_of_the_catalog(lab: Any, name: str, policy: Any) -> None:
    engine = lab.engine(policy, calibration=Calibration())
    accepted: Counter[str] = Counter()
    for seed in range(3):
        prompt = lab.prompt(seed, 7) * 3  # something to look up
        for kind in ("greedy", "top", "bans"):
            params = SamplingParams(max_new_tokens=40) if kind == "greedy" else params_of(kind, seed)
            truth = lab.decode(None, prompt, params, stop_ids=[2])
            run = lab.run(engine, lab.request(prompt, catalog_drafter(name), params, stop_ids=[2]))
            assert run.sequence.token_ids == truth, (seed, kind)
            accepted += run.sequence.stats.accepted
    assert (accepted.total() > 0) == (name != "none")


@pytest.mark.parametrize("policy", POLICIES)
def test_all_drafters_together_in_every_family(family_lab: Any, policy: Any) -> None:
    engine = family_lab.engine(policy, calibration=Calibration())
    for seed in range(3):
        prompt = family_lab.prompt(seed, 7) * 2
        params = SamplingParams(max_new_tokens=40)
        truth = family_lab.decode(None, prompt, params)
        run = family_lab.run(engine, family_lab.request(prompt, catalog_drafter("all"), params))
        assert run.sequence.token_ids == truth


def test_other_seed_or_sequence_key_other_tokens(lab: Any) -> None:
    prompt = lab.prompt(0)
    outputs = {
        tuple(lab.decode(None, prompt, params_of("hot", seed), sequence_key=key))
        for seed in range(3)
        for key in range(3)
    }
    assert len(outputs) == 9


def test_min_new_tokens(lab: Any) -> None:
    """Whatever ends the output early is banned at the nodes of a tree as it is in plain decoding."""
    prompt = lab.prompt(0)
    free = lab.decode(None, prompt)[len(prompt) :]
    eos_id = free[4]
    params = SamplingParams(max_new_tokens=24, min_new_tokens=9)
    truth = lab.decode(None, prompt, params, stop_ids=[eos_id])
    assert eos_id not in truth[len(prompt) : len(prompt) + 9]
    for seed in range(10):
        assert lab.decode(lab.RandomTrees(truth, seed), prompt, params, stop_ids=[eos_id]) == truth


class Recorder:
    """Prefers ids that depend on everything before them, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        assert input_ids.dtype == torch.int64
        ids = input_ids[0].tolist()
        self.seen.append(ids)
        favourite = sum((place + 1) * token_id for place, token_id in enumerate(ids)) % scores.shape[1]
        scores[0, favourite] += 6.0
        return scores


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_sees_prompt_output_and_path(lab: Any, policy: Any, temperature: float) -> None:
    prompt = lab.prompt(3, 7)

    def params(recorder: Recorder) -> SamplingParams:
        seed = 5 if temperature else None
        return SamplingParams(max_new_tokens=20, temperature=temperature, seed=seed, logits_processors=[recorder])

    plain = Recorder()
    truth = lab.decode(None, prompt, params(plain))
    prefixes = [truth[:size] for size in range(len(prompt), len(truth))]
    assert plain.seen == prefixes
    for seed in range(6):
        drafted = Recorder()
        run = lab.run(lab.engine(policy), lab.request(prompt, lab.RandomTrees(truth, seed), params(drafted)))
        assert run.sequence.token_ids == truth
        assert [ids for ids in drafted.seen if ids not in prefixes] == []
        assert [ids for ids in prefixes if ids not in drafted.seen] == []


def generate(lab: Any, dtype: torch.dtype, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return what transformers says, greedily."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(lab.folder, dtype=dtype)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, **options
            )
        outputs.append(out[0].tolist())
    return outputs


def test_plain_decoding_is_transformers_greedy_generate(family_lab: Any) -> None:
    prompts = [family_lab.prompt(seed, size) for seed, size in enumerate((1, 2, 9, 30))]
    expected = generate(family_lab, torch.float64, prompts, eos_token_id=VOCAB_END)
    assert [family_lab.decode(None, prompt) for prompt in prompts] == expected


def test_and_in_float32(make_lab: Callable[..., Any]) -> None:
    lab = make_lab(dtype=torch.float32)
    prompts = [lab.prompt(seed, size) for seed, size in enumerate((1, 2, 9, 30))]
    expected = generate(lab, torch.float32, prompts, eos_token_id=VOCAB_END)
    assert [lab.decode(None, prompt) for prompt in prompts] == expected
    for prompt, truth in zip(prompts, expected, strict=True):
        assert lab.decode(lab.RandomTrees(truth, 1), prompt) == truth


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": 8},
        {"bad_words_ids": [[41], [3, 7]]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ],
    ids=str,
)
def test_drafted_decoding_is_transformers_generate_with_its_processors(lab: Any, options: dict[str, Any]) -> None:
    prompts = [lab.prompt(seed, 6) for seed in range(3)]
    theirs = {"eos_token_id": VOCAB_END, **options}
    stop_ids = [options["eos_token_id"]] if "eos_token_id" in options else []
    ours = {name: value for name, value in options.items() if name != "eos_token_id"}
    expected = generate(lab, torch.float64, prompts, **theirs)
    for seed, (prompt, truth) in enumerate(zip(prompts, expected, strict=True)):
        params = SamplingParams(max_new_tokens=24, **ours)
        assert lab.decode(lab.RandomTrees(truth, seed), prompt, params, stop_ids=stop_ids) == truth


VOCAB_END = 64
"""An id past the vocabulary: transformers falls back on the model's own EOS where it is given None."""
