"""From a model's files to a decoder: one file per `model_type`, anything else through transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

import torch

from foretell.errors import ConfigError
from foretell.models.config import read_config
from foretell.models.decoder import Model
from foretell.models.weights import WeightReader

DECODERS: Final = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3_text": "Gemma3",
    "gpt2": "GPT2",
}
"""The class that decodes a `model_type`, in the module of that name."""

DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Model:
    """Read a model into its lean decoder, or into the adapter over transformers.

    Args:
        folder: holds `config.json` and safetensors.
        dtype: what the weights are converted to.
        device: where they go.

    Raises:
        ModelError: files are missing or corrupt, or the kind of model is refused.
    """
    config = read_config(folder)
    if config.model_type not in DECODERS:
        from foretell.models.hf import HFModel

        return HFModel.from_folder(folder, config, dtype=dtype, device=device)
    module = importlib.import_module(f"foretell.models.{config.model_type}")
    decoder: type[Model] = getattr(module, DECODERS[config.model_type])
    with WeightReader(folder) as reader:
        return decoder(config, reader, dtype, device)  # type: ignore[call-arg]


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the GPU where there is one.

    Raises:
        ConfigError: the device is unknown or absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"`device` is {name!r} but PyTorch sees no GPU: use cpu, or install a CUDA build of PyTorch")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; "auto" is bfloat16 where the machine computes in it, else float32.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"`dtype` must be auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def set_threads(threads: int | None) -> None:
    """Let torch use so many threads; None leaves its choice.

    Raises:
        ConfigError: the number is out of range.
    """
    if threads is None:
        return
    if not 1 <= threads <= 1024:
        raise ConfigError(f"`threads` must be at least 1, got {threads}; 1,024 at most")
    torch.set_num_threads(threads)


def choose_context(asked: int | None, limit: int) -> int:
    """Return the longest sequence, in tokens: `asked`, or the model's limit where that is None.

    Raises:
        ConfigError: it is above the limit.
    """
    if asked is None:
        return limit
    if not 2 <= asked <= limit:
        raise ConfigError(f"`context_tokens` must be in [2, {limit}], the model's own limit, got {asked}")
    return asked


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether bfloat16 is computed natively (on CPUs: AVX-512 BF16 or AMX)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.backends.cpu.get_cpu_capability()
    flags = _cpu_flags()
    return capabilities.startswith("AVX512") and ("avx512_bf16" in flags or "amx_bf16" in flags)


def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.split())
    except OSError:
        pass
    return frozenset()
