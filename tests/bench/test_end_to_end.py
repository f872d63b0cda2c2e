"""The real engine and transformers on a tiny random model: what a report says when nothing is faked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.memory import measure_memory
from foretell.bench.run import run_bench
from foretell.bench.runner import NoProgress
from foretell.bench.settings import BenchSettings, EngineSettings
from foretell.params import SamplingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    """A two-layer llama with random weights and a tokenizer whose tokens are bytes, on one thread."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    symbols = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        yield EngineSettings(model=str(folder), dtype="float32", threads=1)
    torch.set_num_threads(num_threads)


def run(engine: EngineSettings, **options: Any) -> Any:
    settings: dict[str, Any] = {"limit": 2, "repeats": 1, "has_memory": False, "engine": engine}
    return run_bench(BenchSettings(**settings | options))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_arm_says_what_plain_decoding_says(engine: EngineSettings, temperature: float) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    report = run(engine, sampling=sampling)
    assert report.names == ["none", "lookup", "suffix", "ngram", "all"]
    for result in report.results:
        assert result.identical == 1.0
        assert result.first_divergence_gap is None
        assert result.tokens_per_s > 0
        assert result.speedup_vs_plain > 0
        assert result.end_to_end_tokens_per_s > 0
        assert result.tokens_per_pass >= 1.0
    plain, drafted = report.result("none"), report.result("all")
    assert plain.tokens_per_pass == 1.0
    assert (plain.acceptance_rate, plain.drafter_memory_bytes) == (None, 0)
    assert drafted.drafter_memory_bytes > 0
    assert report.profile["pass_s"]


def test_a_draft_model_is_counted(engine: EngineSettings) -> None:
    with_draft = replace(engine, draft=engine.model)
    sampling = SamplingParams(max_new_tokens=24)
    report = run(with_draft, drafters=["lookup", "draft", "staged"], limit=1, sampling=sampling)
    lookup, draft, staged = map(report.result, ("lookup", "draft", "staged"))
    assert lookup.draft_passes_per_token == 0
    assert lookup.relative_bytes <= 1
    for result in (draft, staged):
        assert result.identical == 1.0
        assert result.draft_passes_per_token > 0
        assert 0 < result.draft_share < 1
        assert result.relative_bytes > 1 / result.tokens_per_pass
    assert draft.e2 == 1.0
    assert staged.second_stage_gain > 0
    assert staged.second_stage_bound == pytest.approx(1 / (1 - draft.draft_share * (1 - 1 / staged.e2)))
    assert report.provenance["bench"]["draft"] == engine.model


def test_transformers_says_the_same_in_float32(engine: EngineSettings, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sampling = SamplingParams(max_new_tokens=12)
    report = run(
        engine, drafters=["none"], baselines=["hf", "hf-lookup"], sampling=sampling, report=tmp_path / "report"
    )
    assert report.names == ["none", "hf", "hf-lookup"]
    assert {result.identical for result in report.results} == {1.0}
    assert (tmp_path / "report" / "report.md").is_file()


def test_the_command_prints_one_document_last(engine: EngineSettings, capsys: pytest.CaptureFixture[str]) -> None:
    from foretell.cli.main import run as run_command

    options = "--limit 1 --repeats 1 --max-new-tokens 4 --drafters all --no-memory --threads 1 --dtype float32 --json"
    model = str(engine.model)
    assert run_command(["bench", "--model", model, "--draft", model, *options.split()]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(document) == ["results", "profile", "provenance"]
    assert document["provenance"]["bench"]["draft"] == model
    assert [(row["name"], row["category"]) for row in document["results"]] == [
        ("none", "all"),
        ("none", "writing"),
        ("all", "all"),
        ("all", "writing"),
    ]


def test_memory_of_a_real_arm(engine: EngineSettings) -> None:
    (peak_bytes,) = measure_memory(["all"], engine, NoProgress()).values()
    assert peak_bytes is not None
    assert 50e6 < peak_bytes < 4e9
