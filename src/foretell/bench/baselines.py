"""Other people's decoding on the same weights: transformers, its prompt lookup, llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from foretell.bench.arms import Arm, Clock
from foretell.bench.measurement import Measurement
from foretell.bench.settings import EngineSettings
from foretell.errors import ConfigError
from foretell.params import SamplingParams

BASELINES: Final = ("hf", "hf-lookup", "llamacpp")
LOOKUP_TOKENS: Final = 10
"""`prompt_lookup_num_tokens` of `hf-lookup`."""

_UNSUPPORTED: Final = {
    "hf": ("presence_penalty", "frequency_penalty"),
    "hf-lookup": ("presence_penalty", "frequency_penalty"),
    "llamacpp": (
        "min_new_tokens", "no_repeat_ngram_size", "bad_words_ids", "logit_bias", "logits_processors", "stop",
    ),
}  # fmt: skip


def check_baselines(names: Sequence[str], sampling: SamplingParams) -> None:
    """Refuse what cannot run, before anything is loaded.

    Raises:
        ConfigError: a baseline does not exist, is not installed, or does not know a sampling parameter in use.
    """
    off = SamplingParams()
    for name in names:
        if name not in BASELINES:
            raise ConfigError(f"baseline {name!r} does not exist: choose from {', '.join(BASELINES)}")
        if name == "llamacpp" and importlib.util.find_spec("llama_cpp") is None:
            raise ConfigError(
                "baseline 'llamacpp' needs llama_cpp, which is not installed: pip install llama-cpp-python"
            )
        for parameter in _UNSUPPORTED[name]:
            if getattr(sampling, parameter) != getattr(off, parameter):
                raise ConfigError(f"baseline {name!r} has no `{parameter}`: drop the parameter or the baseline")


class Baseline(Arm, Protocol):
    """An arm that brings its own tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt."""


def open_baselines(names: Sequence[str], engine: EngineSettings) -> list[Baseline]:
    """Load the baselines; those of transformers share one copy of the weights.

    Args:
        names: as `check_baselines` accepts them.
        engine: with dtype, device and threads resolved; llama.cpp makes room for `context_tokens` tokens.

    Raises:
        ConfigError: llama.cpp is asked for, and the weights do not come from a GGUF file.
        ModelError: the model cannot be found.
    """
    if not names:
        return []
    from foretell.models.files import resolve

    folder = resolve(engine.model).folder
    arms: dict[str, Baseline] = {}
    if "hf" in names or "hf-lookup" in names:
        loaded = TransformersModel.load(folder, dtype=engine.dtype, device=engine.device, threads=engine.threads)
        arms["hf"] = TransformersArm(key="hf", loaded=loaded)
        arms["hf-lookup"] = TransformersArm(key="hf-lookup", loaded=loaded, lookup_tokens=LOOKUP_TOKENS)
    if "llamacpp" in names:
        arms["llamacpp"] = LlamaCppArm.load(
            _gguf_file(folder), threads=engine.threads, context_tokens=engine.context_tokens or 2048
        )
    return [arms[name] for name in dict.fromkeys(names)]


def _gguf_file(folder: Path) -> Path:
    """Return the file that a folder of converted weights was made from."""
    try:
        source = Path(json.loads((folder / "conversion.json").read_text(encoding="utf-8"))["source"])
    except (OSError, ValueError, KeyError):
        raise ConfigError(
            "baseline 'llamacpp' needs a model from a .gguf file: give one, or drop the baseline"
        ) from None
    if not source.is_file():
        raise ConfigError(f"baseline 'llamacpp' needs {source}, which is gone: put it back, or drop the baseline")
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel:
    """A model and its tokenizer as transformers loads them."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, *, dtype: str, device: str, threads: int | None) -> TransformersModel:
        """Load a folder of `config.json`, safetensors and tokenizer with default settings, in the given precision."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if threads is not None:
            torch.set_num_threads(threads)

        loader: Any = AutoModelForCausalLM  # its stated types differ from what it takes
        with _no_progress_bar():
            model = loader.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(model=model.to(device).eval(), tokenizer=tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersArm:
    """`model.generate`, plain or with prompt lookup."""

    key: str
    loaded: TransformersModel
    lookup_tokens: int | None = None
    clock: Clock = time.perf_counter

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt."""
        return list(self.loaded.tokenizer.encode(text))

    def measure(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Measurement:
        """Complete the prompt; blocks of tokens are timed by a streamer, passes by hooks on the model."""
        import torch

        model = self.loaded.model
        input_ids = torch.tensor([list(prompt_ids)], device=model.device)  # [1, T]
        arguments = self._arguments(sampling)
        streamer = _BlockClock(clock=self.clock)
        passes = _PassClock(clock=self.clock)
        hooks = (model.register_forward_pre_hook(passes.start), model.register_forward_hook(passes.stop))
        try:
            with torch.random.fork_rng(), torch.inference_mode():  # a seed of ours must not outlive the run
                torch.manual_seed(sampling.seed or 0)
                started_s = self.clock()
                output = model.generate(
                    input_ids, attention_mask=torch.ones_like(input_ids), streamer=streamer, **arguments
                )
                token_ids = output[0, len(prompt_ids) :].tolist()
                self.loaded.tokenizer.decode(token_ids)
                wall_s = self.clock() - started_s
        finally:
            for hook in hooks:
                hook.remove()
        return streamer.measurement(token_ids, started_s, wall_s, passes)

    def _arguments(self, sampling: SamplingParams) -> dict[str, Any]:
        from transformers import GenerationConfig, LogitsProcessorList

        make_config: Any = GenerationConfig
        eos_ids = _as_list(self.loaded.model.generation_config.eos_token_id)
        # transformers fills in the model's EOS for None: an id past the vocabulary is how to have none.
        end_ids = [self.loaded.model.config.vocab_size] if sampling.ignore_eos else eos_ids
        options: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "do_sample": not sampling.is_greedy,
            "repetition_penalty": sampling.repetition_penalty,
            "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
            "bad_words_ids": [list(word) for word in sampling.bad_words_ids] or None,
            "sequence_bias": {(token_id,): bias for token_id, bias in sampling.logit_bias.items()} or None,
            "stop_strings": list(sampling.stop) or None,
            "eos_token_id": [*end_ids, *sampling.stop_token_ids] or None,
            "pad_token_id": (eos_ids or [0])[0],
            "prompt_lookup_num_tokens": self.lookup_tokens,
        }
        if not sampling.is_greedy:
            for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
                options[name] = getattr(sampling, name)
        return {
            "generation_config": make_config(**options),
            "logits_processor": LogitsProcessorList(list(sampling.logits_processors)),
            "tokenizer": self.loaded.tokenizer,
        }


@dataclass(slots=True, kw_only=True)
class _PassClock:
    """Forward hooks that time each pass; the first is the prefill."""

    clock: Clock
    durations_s: list[float] = field(default_factory=list)
    started_s: float = 0.0

    def start(self, *_: Any) -> None:
        self.started_s = self.clock()

    def stop(self, *_: Any) -> None:
        self.durations_s.append(self.clock() - self.started_s)


@dataclass(slots=True, kw_only=True)
class _BlockClock:
    """A streamer that notes when each block of tokens arrives, and how long it is; the first block is the prompt."""

    clock: Clock
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def put(self, value: Any) -> None:
        self.arrivals_s.append(self.clock())
        self.num_tokens.append(value.numel())

    def end(self) -> None: ...

    def measurement(self, token_ids: Sequence[int], started_s: float, wall_s: float, passes: _PassClock) -> Measurement:
        return Measurement(
            token_ids=tuple(token_ids),
            wall_s=wall_s,
            ttft_s=self.arrivals_s[1] - started_s,
            decode_s=self.arrivals_s[-1] - self.arrivals_s[1],
            num_first_tokens=self.num_tokens[1],
            prefill_s=passes.durations_s[0],
            num_passes=len(passes.durations_s) - 1,
            forward_s=sum(passes.durations_s[1:]),
            tokens_per_pass_counts=dict(Counter(self.num_tokens[2:])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppArm:
    """llama.cpp on the GGUF file that the weights come from."""

    key: str
    llama: Any
    clock: Clock = time.perf_counter

    @classmethod
    def load(cls, gguf: Path, *, threads: int | None, context_tokens: int) -> LlamaCppArm:
        """Load the file with room for `context_tokens` tokens."""
        from llama_cpp import Llama

        llama = Llama(
            model_path=str(gguf), n_ctx=context_tokens, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        return cls(key="llamacpp", llama=llama)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt."""
        return list(self.llama.tokenize(text.encode(), add_bos=False, special=True))

    def measure(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Measurement:
        """Complete the prompt token by token."""
        ends = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [self.llama.token_eos()])}
        self.llama.set_seed(sampling.seed or 0)
        self.llama.reset()  # else a repeated prompt finds its own keys and values, and skips the prefill
        token_ids: list[int] = []
        arrivals_s: list[float] = []
        started_s = self.clock()
        for token_id in self.llama.generate(list(prompt_ids), **_llama_cpp_options(sampling)):
            arrivals_s.append(self.clock())
            token_ids.append(int(token_id))
            if token_ids[-1] in ends or len(token_ids) == sampling.max_new_tokens:
                break
        self.llama.detokenize(token_ids)
        return Measurement(
            token_ids=tuple(token_ids),
            wall_s=self.clock() - started_s,
            ttft_s=arrivals_s[0] - started_s,
            decode_s=arrivals_s[-1] - arrivals_s[0],
            num_passes=len(token_ids) - 1,
            tokens_per_pass_counts={1: len(token_ids) - 1},
        )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' bar off the terminal while ours is on it."""
    from transformers.utils import logging as their_logging

    logging: Any = their_logging  # it states no types

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _llama_cpp_options(sampling: SamplingParams) -> dict[str, float]:
    return {
        "temp": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def _as_list(token_ids: int | list[int] | None) -> list[int]:
    if token_ids is None:
        return []
    return [token_ids] if isinstance(token_ids, int) else list(token_ids)
