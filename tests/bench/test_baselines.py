from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.bench import baselines
from foretell.bench.baselines import (
    LlamaCppArm,
    TransformersArm,
    TransformersModel,
    check_baselines,
    open_baselines,
)
from foretell.bench.settings import EngineSettings
from foretell.errors import ConfigError
from foretell.params import SamplingParams

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


class CountingClock:
    """Advances by one second per reading."""

    def __init__(self) -> None:
        self.readings = count()

    def __call__(self) -> float:
        return float(next(self.readings))


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A two-layer llama with random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=2,
            pad_token_id=2,
        )
        yield transformers.LlamaForCausalLM(config).eval()
    torch.set_num_threads(num_threads)


def arm(model: Any, **options: Any) -> TransformersArm:
    tokenizer = SimpleNamespace(decode=lambda ids: "")
    return TransformersArm(key="hf", loaded=TransformersModel(model=model, tokenizer=tokenizer), **options)


def test_transformers_arm_times_tokens_and_passes(model: Any) -> None:
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    measured = arm(model, clock=CountingClock()).measure(PROMPT, sampling)
    assert len(measured.token_ids) == 6
    assert measured.num_passes == 5
    assert measured.tokens_per_pass_counts == {1: 5}
    assert measured.prefill_s == 1.0
    assert measured.forward_s == 5.0
    # Between two tokens the clock is read three times: before a pass, after it, when the token arrives.
    assert measured.decode_s == 15.0
    assert measured.ttft_s == 4.0  # the prompt's arrival, the pass's two, the token's
    assert measured.wall_s == 20.0
    assert (measured.drafted, measured.accepted, measured.num_rows) == (None, None, None)


def test_lookup_arm_says_the_same_in_fewer_passes(model: Any) -> None:
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    plain = arm(model).measure(PROMPT, sampling)
    lookup = arm(model, lookup_tokens=10).measure(PROMPT, sampling)
    assert lookup.token_ids == plain.token_ids
    assert lookup.num_passes is not None
    assert plain.num_passes is not None
    assert lookup.num_passes <= plain.num_passes
    in_blocks = sum(tokens * times for tokens, times in lookup.tokens_per_pass_counts.items())
    assert in_blocks <= 39


def test_hooks_are_removed_and_the_seed_does_not_leak(model: Any) -> None:
    torch = pytest.importorskip("torch")
    before = torch.random.get_rng_state()
    sampling = SamplingParams(max_new_tokens=12, temperature=1.5, top_p=0.9, seed=3)
    first, second = (arm(model).measure(PROMPT, sampling).token_ids for _ in range(2))
    other = arm(model).measure(PROMPT, SamplingParams(max_new_tokens=12, temperature=1.5, top_p=0.9, seed=4))
    assert first == second != other.token_ids
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_eos_ends_the_output_unless_ignored(model: Any) -> None:
    always_eos = {2: 1000.0}
    assert arm(model).measure(PROMPT, SamplingParams(max_new_tokens=5, logit_bias=always_eos)).token_ids == (2,)
    ignoring = SamplingParams(max_new_tokens=5, logit_bias=always_eos, ignore_eos=True)
    assert arm(model).measure(PROMPT, ignoring).token_ids == (2,) * 5
    stopping = SamplingParams(max_new_tokens=5, logit_bias={9: 1000.0}, stop_token_ids=(9,))
    assert arm(model).measure(PROMPT, stopping).token_ids == (9,)


class FakeLlama:
    """llama_cpp.Llama as far as the arm needs it."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[str] = []

    def reset(self) -> None:
        self.calls.append("reset")

    def set_seed(self, seed: int) -> None:
        self.calls.append(f"seed {seed}")

    def token_eos(self) -> int:
        return 12

    def tokenize(self, text: bytes, *, add_bos: bool, special: bool) -> list[int]:
        return list(text)

    def detokenize(self, token_ids: list[int]) -> bytes:
        return b""

    def generate(self, token_ids: list[int], **options: Any) -> Iterator[int]:
        self.calls.append(f"generate {options['temp']}")
        return iter(range(token_ids[-1] + 1, 1000))


def test_llamacpp_arm_forgets_the_prompt_and_stops_at_eos_or_length() -> None:
    llama = FakeLlama()
    measured = LlamaCppArm(key="llamacpp", llama=llama, clock=CountingClock()).measure(
        [3, 9], SamplingParams(max_new_tokens=8)
    )
    assert llama.calls == ["seed 0", "reset", "generate 0.0"]
    assert measured.token_ids == (10, 11, 12)
    assert (measured.ttft_s, measured.decode_s, measured.wall_s) == (1.0, 2.0, 4.0)
    assert measured.tokens_per_pass_counts == {1: 2}
    endless = SamplingParams(max_new_tokens=8, ignore_eos=True)
    assert len(LlamaCppArm(key="llamacpp", llama=llama).measure([3, 9], endless).token_ids) == 8


def test_llamacpp_loads_the_file_that_the_weights_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pytest.importorskip("foretell.models.files")
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama))
    monkeypatch.setattr(files, "resolve", lambda model: SimpleNamespace(folder=tmp_path))
    engine = EngineSettings(threads=2, context_tokens=99)
    with pytest.raises(ConfigError, match=r"'llamacpp' needs a model from a \.gguf file"):
        open_baselines(["llamacpp"], engine)
    source = tmp_path / "model.gguf"
    (tmp_path / "conversion.json").write_text(json.dumps({"source": str(source)}))
    with pytest.raises(ConfigError, match=r"'llamacpp' needs .*model\.gguf, which is gone"):
        open_baselines(["llamacpp"], engine)
    source.touch()
    (opened,) = open_baselines(["llamacpp"], engine)
    assert opened.key == "llamacpp"
    assert opened.encode("ab") == [97, 98]
    options = opened.llama.options  # type: ignore[attr-defined]
    assert (options["model_path"], options["n_ctx"], options["n_threads"]) == (str(source), 99, 2)


def test_transformers_baselines_share_one_copy_of_the_weights(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pytest.importorskip("foretell.models.files")
    monkeypatch.setattr(files, "resolve", lambda model: SimpleNamespace(folder=tmp_path))
    loaded = TransformersModel(model=model, tokenizer=None)
    monkeypatch.setattr(TransformersModel, "load", lambda *_, **__: loaded)
    opened: list[Any] = list(open_baselines(["hf-lookup", "hf", "hf"], EngineSettings(dtype="float32", device="cpu")))
    assert [each.key for each in opened] == ["hf-lookup", "hf"]
    assert opened[0].loaded is opened[1].loaded
    assert (opened[0].lookup_tokens, opened[1].lookup_tokens) == (10, None)
    assert open_baselines([], EngineSettings()) == []


def test_what_cannot_run_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="baseline 'vllm' does not exist: choose from hf, hf-lookup, llamacpp"):
        check_baselines(["vllm"], SamplingParams())
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'llamacpp' needs llama_cpp, which is not installed"):
        check_baselines(["llamacpp"], SamplingParams())
    with pytest.raises(ConfigError, match="baseline 'hf' has no `presence_penalty`"):
        check_baselines(["hf"], SamplingParams(presence_penalty=0.5))
    check_baselines(["hf", "hf-lookup"], SamplingParams(temperature=0.7, min_p=0.1, logit_bias={1: 2.0}))
