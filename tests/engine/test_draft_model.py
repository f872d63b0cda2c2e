"""Draft models behind the engine: whatever they propose, the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foretell.drafters.calibration import Calibration
from foretell.drafters.catalog import MODEL_DRAFTERS, make_drafter
from foretell.drafters.draft_engine import DraftEngine
from foretell.drafters.drafter import Drafter
from foretell.models.draft import DraftModel
from foretell.params import SamplingParams
from foretell.verify.rule import make_rule

NAMES = [*MODEL_DRAFTERS, "all"]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, seed=5)


def draft_of(
    lab: Any, kind: str = "lm", noise: float = 0.0, num_kept: int | None = None, **options: Any
) -> DraftEngine:
    """Return the lab's target as a draft of itself, with noise on its weights, and for some of its ids only."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(lab.folder / "model.safetensors").items():
        wide = tensor.double()
        tensors[name] = wide + noise * wide.std() * torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    config = lab.model.config
    kept = np.sort(np.random.default_rng(0).permutation(config.vocab_size)[:num_kept])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]  # [K, E]
    if kind == "feature":
        width = config.hidden_size
        tensors["fuse.weight"] = torch.eye(width, 2 * width, dtype=torch.float64)
        tensors["fuse.weight"][:, width:] = 0.1 * torch.eye(width, dtype=torch.float64)
        tensors["no_feature"] = torch.zeros(width, dtype=torch.float64)
    model = DraftModel(config, tensors, kept, torch.float64, torch.device("cpu"))
    return DraftEngine(model, 2048, Calibration(), clock=lambda: 0.0, **options)


def make(name: str, draft: DraftEngine, eos_ids: Sequence[int] = (2,)) -> Drafter:
    return make_drafter(name, eos_ids=frozenset(eos_ids), draft=draft)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=6), replace(SAMPLED, top_p=0.8)])
def test_a_draft_that_is_the_target_is_always_right(lab: Any, params: SamplingParams) -> None:
    """Greedy, and through the noise that it shares with the target when sampling: no token of a chain is refused."""
    prompt = lab.prompt(1)
    plain = lab.decode(None, prompt, params)
    draft = draft_of(lab)
    drafter = make("draft-chain", draft)
    request = lab.request(prompt, drafter, params)
    if request.draft_sampling is not None:
        sampling = replace(request.draft_sampling, top_k=params.top_k, top_p=params.top_p)
        request = replace(request, draft_sampling=sampling)
    run = lab.run(lab.engine(), request)
    assert run.sequence.token_ids == plain
    stats = run.sequence.stats
    assert stats.accepted["draft"] == stats.drafted["draft"] == 40 - stats.num_passes
    assert stats.num_passes < 16
    assert drafter.work.num_passes >= stats.drafted["draft"], "a pass for each token of a chain"
    assert draft.runner.cache.num_bytes == 0, "the engine closes the drafter"


@pytest.mark.parametrize("policy", ["canonical", "copy"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["lm", "feature"])
def test_the_text_is_that_of_plain_decoding(lab: Any, name: str, kind: str, policy: Any) -> None:
    draft = draft_of(lab, kind, noise=0.2, num_kept=50)
    sources = set()
    for seed, params in enumerate((GREEDY, SAMPLED)):
        prompt = lab.prompt(seed)
        plain = lab.decode(None, prompt, params, stop_ids=[2])
        run = lab.run(lab.engine(policy), lab.request(prompt, make(name, draft), params, stop_ids=[2]))
        assert run.sequence.token_ids == plain
        sources |= set(run.sequence.stats.accepted)
    assert "draft" in {source.split("<")[0] for source in sources}
    assert draft.runner.cache.num_bytes == 0


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_draws_from_the_targets_own_law_are_all_accepted(lab: Any, rule: Any) -> None:
    params = replace(SAMPLED, verification=rule, temperature=0.8)
    outputs = []
    for _ in range(2):
        request = lab.request(lab.prompt(1), make("draft", draft_of(lab), eos_ids=()), params)
        sampling = replace(request.draft_sampling, temperature=0.8)
        request = replace(request, draft_sampling=sampling, rule=make_rule(params, request.chooser, 5, 0))
        stats = (run := lab.run(lab.engine("copy"), request)).sequence.stats
        assert stats.accepted["draft"] == 40 - stats.num_passes
        assert stats.num_passes < 20
        outputs.append(run.output_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_drawing_at_the_least_temperature_is_greedy(lab: Any, rule: Any) -> None:
    params = replace(SAMPLED, verification=rule, temperature=1e-38)
    request = lab.request(lab.prompt(1), make("draft", draft_of(lab, noise=0.2), eos_ids=()), params)
    sampling = replace(request.draft_sampling, temperature=1e-38)
    request = replace(request, draft_sampling=sampling, rule=make_rule(params, request.chooser, 5, 0))
    assert lab.run(lab.engine("copy"), request).sequence.token_ids == lab.decode(None, lab.prompt(1), GREEDY)


def test_a_draft_whose_prompt_is_interrupted_keeps_no_slots(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, engine = draft_of(lab), lab.engine("copy")

    def interrupt(rows: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(draft.runner, "prefill", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.start(lab.request(lab.prompt(1), make("staged", draft), GREEDY))
    assert draft.runner.cache.num_bytes == engine.runner.cache.num_bytes == 0


def test_a_fork_that_fails_closes_its_drafter(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, engine = draft_of(lab), lab.engine("copy")
    sequence = engine.start(lab.request(lab.prompt(1), make("draft", draft), SAMPLED))
    fork = lab.request(lab.prompt(1), sequence.request.drafter.fork(), SAMPLED, sequence_key=1)
    monkeypatch.setattr(engine.runner.cache, "fork", lambda region: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.fork(sequence, fork)
    engine.finish(sequence)
    assert draft.runner.cache.num_bytes == engine.runner.cache.num_bytes == 0


def test_several_sequences_and_samples_share_a_draft(lab: Any) -> None:
    draft, engine = draft_of(lab, "feature", noise=0.2), lab.engine("copy")
    prompts = [lab.prompt(seed, size) for seed, size in ((1, 3), (2, 9))]
    params = replace(SAMPLED, max_new_tokens=20)
    requests = [lab.request(prompt, make("staged", draft), params) for prompt in prompts]
    sequences = [engine.start(request) for request in requests]
    fork = lab.request(prompts[0], requests[0].drafter.fork(), params, sequence_key=1)
    sequences.append(engine.fork(sequences[0], fork))
    expected = [lab.decode(None, prompt, params) for prompt in prompts]
    expected.append(lab.decode(None, prompts[0], params, sequence_key=1))
    while active := [sequence for sequence in sequences if not sequence.is_finished]:
        engine.step(active)
        for sequence in active:
            if sequence.is_finished:
                engine.finish(sequence)
    assert [sequence.token_ids for sequence in sequences] == expected
    assert len(set(map(tuple, expected))) == 3
    assert all(sequence.stats.num_passes < 20 for sequence in sequences)
    assert draft.runner.cache.num_bytes == 0
