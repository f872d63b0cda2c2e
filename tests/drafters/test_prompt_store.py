"""Prompt tokens on disk: which serve a target, and what is told where they cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.bench.run import run_bench
from foretell.bench.settings import BenchSettings, EngineSettings
from foretell.drafters.prompt_store import WEIGHTS, prompts_home, write_prompts
from foretell.errors import ConfigError, ModelError
from foretell.hardware.prompt_policy import GuessRanks
from foretell.llm import LLM
from foretell.models.config import read_config
from foretell.train.produce import check_draft
from foretell.train.prompt_module import PromptModule, PromptRecipe
from tiny import save_model

WIDTH, KEPT = 32, np.array([2, 5, 9, 200])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that foretell keeps goes here; threads are those of before."""
    before = torch.get_num_threads()
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fingerprint(target: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(target / "home"))
        return LLM(target, dtype="float32", threads=1, draft="none").fingerprint


def save_prompts(folder: Path, fingerprint: str, **changed: Tensor | None) -> Path:
    """Save two chains of three prompt tokens with a sampler; `changed` by name, None leaves one out.

    Dots are double underscores.
    """
    tensors = {
        "embeddings": torch.randn(2, 3, WIDTH),
        "sampler.mix.weight": torch.randn(WIDTH, 2 * WIDTH),
        "sampler.mix.bias": torch.randn(WIDTH),
        "sampler.out.weight": torch.randn(WIDTH, WIDTH),
    }
    ranks = GuessRanks(np.ones((11, 11, 11), dtype=np.int64))
    write_prompts(folder, tensors, KEPT, ranks, fingerprint=fingerprint, card="# Card\n", provenance={})
    if changed:
        stored = load_file(folder / WEIGHTS) | {name.replace("__", "."): each for name, each in changed.items()}
        save_file({name: each for name, each in stored.items() if each is not None}, folder / WEIGHTS)
    return folder


def load(target: Path, **options: Any) -> LLM:
    return LLM(target, dtype="float32", threads=1, draft="none", **options)


def test_what_was_trained_here_is_found_unless_none_is_wanted(target: Path, fingerprint: str) -> None:
    assert load(target).settings["prompts"] == "none"
    folder = save_prompts(prompts_home(fingerprint), fingerprint)
    assert load(target).settings["prompts"] == str(folder)
    assert load(target, prompts="none").settings["prompts"] == "none"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ("README.md", "config.json", "prompts.safetensors", "provenance.json")
    )


def test_those_of_another_target_are_refused_or_passed_over(target: Path, fingerprint: str, tmp_path: Path) -> None:
    folder = save_prompts(tmp_path / "prompts", "f" * 64)
    with pytest.raises(ModelError, match=rf"were trained for target f{{16}}, this one is {fingerprint[:16]}"):
        load(target, prompts=folder)
    save_prompts(prompts_home(fingerprint), "f" * 64)
    assert load(target).settings["prompts"] == "none"


WRONG: dict[str, dict[str, Tensor | None]] = {
    "width": {"embeddings": torch.zeros(2, 3, WIDTH + 1)},
    "slots": {"embeddings": torch.zeros(2, 2, WIDTH)},
    "dimensions": {"embeddings": torch.zeros(3, WIDTH)},
    "chains": {"embeddings": torch.zeros(0, 3, WIDTH)},
    "many slots": {"embeddings": torch.zeros(1, 6, WIDTH), "ranks": torch.ones((2,) * 6, dtype=torch.int32)},
    "ranks": {"ranks": torch.zeros(11, 4, 11, dtype=torch.int32)},
    "mix": {"sampler__mix__weight": torch.zeros(WIDTH, WIDTH)},
    "bias": {"sampler__mix__bias": torch.zeros(WIDTH + 1)},
    "scalar": {"sampler__mix__bias": torch.zeros(())},
    "out": {"sampler__out__weight": torch.zeros(WIDTH, WIDTH + 1)},
    "order": {"kept_ids": torch.tensor([2, 9, 5])},
    "beyond": {"kept_ids": torch.tensor([2, 259])},
    "matrix": {"kept_ids": torch.tensor([[2], [5]])},
    "fractions": {"kept_ids": torch.tensor([2.5, 5.0])},
    "no out": {"sampler__out__weight": None},
    "not finite": {"embeddings": torch.full((2, 3, WIDTH), torch.nan)},
    "infinite": {"sampler__out__weight": torch.full((WIDTH, WIDTH), torch.inf)},
    "whole": {"embeddings": torch.zeros(2, 3, WIDTH, dtype=torch.int64)},
    "flat ranks": {"ranks": torch.tensor(7)},
    "negative ranks": {"ranks": torch.full((11, 11, 11), -1)},
    "huge ranks": {"ranks": torch.full((11, 11, 11), 2**62)},
    "ranks in halves": {"ranks": torch.full((11, 11, 11), 0.5, dtype=torch.bfloat16)},
    "prefix layers": {"prefix": torch.zeros(3, 4, 2, 8)},
    "flat prefix": {"prefix": torch.zeros(2, 4)},
    "long prefix": {"prefix": torch.zeros(2, 4, 33, 8)},
    "empty prefix": {"prefix": torch.zeros(2, 4, 0, 8)},
    "prefix not finite": {"prefix": torch.full((2, 4, 2, 8), torch.nan)},
    "adapter alone": {"lora__0__qkv__down": torch.zeros(4, WIDTH)},
    "empty": {"kept_ids": torch.zeros(0, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_told(target: Path, fingerprint: str, tmp_path: Path, name: str) -> None:
    folder = save_prompts(tmp_path / "prompts", fingerprint, **WRONG[name])
    with pytest.raises(ModelError, match=r"does not hold what prompt tokens need .*: train them again with `f") as told:
        load(target, prompts=folder)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", r"prompts\.safetensors is truncated, corrupt or missing"),
        ("no weights", r"prompts\.safetensors is truncated, corrupt or missing"),
        ("no config", r"config\.json is missing or damaged"),
        ("no folder", "there is no folder"),
        ("other format", r"config\.json has format 99, this version reads 1"),
    ],
)
def test_damage_is_told(target: Path, fingerprint: str, tmp_path: Path, damage: str, message: str) -> None:
    folder = save_prompts(tmp_path / "prompts", fingerprint)
    weights, config = folder / WEIGHTS, folder / "config.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:200])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no config":
        config.unlink()
    elif damage == "no folder":
        folder = tmp_path / "missing"
    else:
        config.write_text(json.dumps({"format_version": 99, "fingerprint": fingerprint}))
    with pytest.raises(ModelError, match=message) as told:
        load(target, prompts=folder)
    assert "\n" not in str(told.value)


def test_what_is_no_prompt_tokens_is_told_with_its_option(target: Path, fingerprint: str, tmp_path: Path) -> None:
    folder, draft = save_prompts(tmp_path / "prompts", fingerprint), tmp_path / "draft"
    draft.mkdir()
    (draft / "draft.safetensors").touch()
    for given, message in (
        (draft, r"holds a draft model, no prompt tokens: give it as `draft` \(`--draft`\)"),
        (folder / WEIGHTS, r"prompts\.safetensors is a file, `prompts` \(`--prompts`\) takes a folder"),
        ("", r"`prompts` \(`--prompts`\) is empty: give a folder"),
    ):
        with pytest.raises(ModelError, match=message):
            load(target, prompts=given)
    for given, message in (
        (str(folder), r"holds prompt tokens, no draft model: give it as `prompts` \(`--prompts`\)"),
        ("", r"`draft` \(`--draft`\) is empty"),
    ):
        with pytest.raises(ModelError, match=message):
            LLM(target, dtype="float32", threads=1, draft=given)
    with pytest.raises(ModelError, match="holds prompt tokens, no draft model: name that by"):
        check_draft(folder)


def lora_of(config: Any) -> dict[str, Tensor | None]:
    """Return low-rank additions by the names that files have, dots as double underscores."""
    module = PromptModule(PromptRecipe(capacity="lora"), config, torch.zeros(config.hidden_size), 1.0)
    return {name.replace(".", "__"): each.bfloat16() for name, each in module.tensors().items() if "lora" in name}


def test_adapters_and_compiled_passes_are_refused_before_compiling(
    target: Path, fingerprint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(*_: object, **__: object) -> None:
        raise AssertionError("passes were compiled")

    folder = save_prompts(prompts_home(fingerprint), fingerprint, **lora_of(read_config(target)))
    assert load(target).settings["prompts"] == str(folder)
    monkeypatch.setattr("foretell.passes.compiled.load_compiled", compile_)
    with pytest.raises(ConfigError, match=r"eager passes only, not with `compile`: .* \(`--prompts none`\)"):
        load(target, compile=True)
    with pytest.raises(AssertionError, match="passes were compiled"):
        load(target, compile=True, prompts="none")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("lora.1.output.up", lambda up: up[:-1]),
        ("lora.1.output.up", lambda up: up[:, :-1]),
        ("lora.0.qkv.down", lambda down: down[:, :-1]),
        ("lora.0.down.down", lambda down: down[:0]),
        ("lora.0.gate_up.down", lambda down: torch.tensor(1.0)),
        ("lora.1.gate_up.up", lambda up: up / 0),
        ("lora.1.down.up", lambda up: None),
        ("lora.2.qkv.down", lambda _: torch.zeros(16, WIDTH)),
        ("lora.first.qkv.down", lambda _: torch.zeros(16, WIDTH)),
    ],
)
def test_damaged_adapters_are_told(target: Path, fingerprint: str, tmp_path: Path, name: str, damage: Any) -> None:
    adapters = lora_of(read_config(target))
    key = name.replace(".", "__")
    damaged = damage(adapters.get(key))
    adapters[key] = damaged if damaged is None else damaged.contiguous()
    folder = save_prompts(tmp_path / "prompts", fingerprint, **adapters)
    with pytest.raises(ModelError, match=r"does not hold what prompt tokens need .*: train them again with `f") as told:
        load(target, prompts=folder)
    assert "\n" not in str(told.value)


def test_the_drafter_needs_prompt_tokens(target: Path) -> None:
    with pytest.raises(ConfigError, match="drafter 'prompts' needs prompt tokens, this model has none: train some"):
        load(target).generate("Hello", drafter="prompts")


def test_a_bench_without_them_is_refused_before_loading(target: Path, fingerprint: str, tmp_path: Path) -> None:
    def bench(**engine: Any) -> None:
        settings = BenchSettings(drafters=["prompts"], engine=EngineSettings(model=str(target), **engine))
        run_bench(settings, open_llm=refuse)

    class Loading(Exception): ...

    def refuse(*_: object) -> Any:
        raise Loading

    for options in ({}, {"prompts": "none"}):
        with pytest.raises(ConfigError, match="drafter 'prompts' needs prompt tokens, "):
            bench(**options)
    save_prompts(prompts_home(fingerprint), fingerprint)
    with pytest.raises(Loading):
        bench()
    with pytest.raises(Loading):
        bench(prompts=str(tmp_path))
