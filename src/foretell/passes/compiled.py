"""Passes compiled ahead of time for a few row counts, kept on disk between runs.

A package holds a packed copy of the weights, so buckets are few. The prompt is still read by the eager model: plain
and accelerated decoding share that part, and never mix the two within their decode passes.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from foretell.cache.kv_cache import BLOCK
from foretell.errors import CompileError
from foretell.models.decoder import Model, RowBatch
from foretell.models.gpt2 import GPT2
from foretell.models.layers import PackedLinear
from foretell.models.llama import Llama
from foretell.passes.cuda_graphs import CudaGraphPasses
from foretell.passes.runner import PassOutput

BUCKETS: Final = (4, 6, 12)
"""Row counts that are compiled; a pass is padded to the next one."""

Notify = Callable[[str], None]


class CompiledPasses:
    """Compiled passes by row count; each takes one sequence.

    Args:
        packages: loaded AOTInductor packages by row count.
        model: looks up embeddings, so that packages hold no copy of them.
        num_bytes: of the packages on disk, about what they add to memory.
    """

    def __init__(self, packages: dict[int, Any], model: Model, num_bytes: int) -> None:
        self._packages, self._model, self.num_bytes = packages, model, num_bytes

    @property
    def buckets(self) -> Sequence[int]:
        """Compiled row counts, ascending."""
        return sorted(self._packages)

    def num_rows(self, num_rows: int) -> int | None:
        """Return the smallest bucket that holds `num_rows`, None where there is none."""
        return next((bucket for bucket in self.buckets if bucket >= num_rows), None)

    def __call__(self, batch: RowBatch, region: Tensor) -> PassOutput:
        """Run a batch of one sequence whose rows fill a bucket; `region` is all of its slots, [L, 1, 2 * G, C, D]."""
        assert batch.first_local_slot == 0
        hidden, logits = self._packages[batch.num_rows](
            self._model.embed(batch),  # [N, E]
            batch.positions,
            batch.slots,
            batch.bias,
            batch.local_bias,
            batch.features,  # [1, N, E], a draft model's
            *region.unbind(0),  # [1, 2 * G, C, D] each
        )
        return PassOutput((hidden,), (logits,))


def load_compiled(
    model: Model,
    folder: Path,
    cache: Path,
    *,
    context_tokens: int,
    buckets: Sequence[int] = BUCKETS,
    notify: Notify | None = None,
) -> CompiledPasses | CudaGraphPasses:
    """Load the compiled passes of a model, compiling what is missing; on a GPU, record passes as they come.

    Args:
        model: the eager model, whose embedding the passes share.
        folder: the model's files.
        cache: where packages are kept.
        context_tokens: positions that the passes must handle.
        buckets: row counts to compile.
        notify: called with one line before each compilation.

    Raises:
        CompileError: there is no C++ compiler, compilation fails, or the packages cannot be stored.

    Cost: 40 to 70 s and about the weights' size on disk for each bucket, once.
    """
    if not isinstance(model, Llama | GPT2):
        raise CompileError(f"`compile` needs a decoder of foretell's own, {model.config.model_type} has none: drop it")
    if model.device.type == "cuda":
        return CudaGraphPasses(model, context_tokens)
    home = cache / f"{folder.name}-{_key(model, folder, context_tokens)}"
    packages, num_bytes = {}, 0
    for bucket in buckets:
        path = home / f"rows-{bucket}.pt2"
        if not path.is_file():
            if notify is not None:
                notify(f"compiling passes of {bucket} rows for {folder.name}, a minute at most, once")
            _build(model, bucket, context_tokens, path)
        packages[bucket] = torch._inductor.aoti_load_package(str(path))
        num_bytes += path.stat().st_size
    return CompiledPasses(packages, model, num_bytes)


class _PassModule(torch.nn.Module):
    """A decoder's pass as a function of tensors, for export."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        slots: Tensor,
        bias: Tensor,
        local_bias: Tensor | None,
        features: Tensor | None,
        *keys_values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        num_slots = bias.shape[-1]
        batch = RowBatch(
            token_ids=positions,
            positions=positions,
            last_position=0,
            slots=slots,
            bias=bias,
            local_bias=local_bias,
            embeddings=embeddings,
            features=features,
        )
        hidden = self.decoder.forward(batch, [layer[:, :, :num_slots] for layer in keys_values])
        return hidden, self.decoder.logits(hidden)


def _key(model: Model, folder: Path, context_tokens: int) -> str:
    """Return a digest of all that a package depends on: weights, code, machine and versions."""
    from foretell.provenance import cpu_model

    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.safetensors"))]
    code = [Path(__file__), *sorted((Path(__file__).parents[1] / "models").glob("*.py"))]
    facts = {
        "weights": [str(folder.resolve()), *files],
        "dtype": str(model.dtype),
        "context": context_tokens,
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in code],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _build(model: Llama | GPT2, num_rows: int, context_tokens: int, path: Path) -> None:
    """Compile a pass of `num_rows` and move it into place whole."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("c++") is None:
        raise CompileError("`compile` needs a C++ compiler and found none: install g++, or drop `compile`")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch) / path.name
            _compile(model, num_rows, context_tokens, built)
            built.replace(path)
    except OSError as error:
        raise CompileError(f"compiled passes cannot be stored in {path.parent}: {error.strerror}") from None
    except CompileError:
        raise
    except Exception as error:  # inductor raises many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CompileError(f"compiling {path.name} failed ({reason[:200]}): drop `compile`") from error


@torch.no_grad()
def _compile(model: Llama | GPT2, num_rows: int, context_tokens: int, path: Path) -> None:
    """Export the pass with plain weights, which inductor freezes and packs itself, and compile it."""
    config = model.config
    num_slots, num_folded = 2 * BLOCK, config.num_heads // config.num_kv_heads * num_rows
    positions = torch.arange(num_rows)[None]  # [1, N]
    bias = torch.zeros(1, 1, num_folded, num_slots, dtype=model.dtype)  # [1, 1, H/G * N, S]
    local_bias = bias.clone() if config.sliding_window is not None else None
    shape = (1, 2 * config.num_kv_heads, 2 * num_slots, config.head_dim)
    keys_values = [torch.zeros(shape, dtype=model.dtype) for _ in range(config.num_layers)]  # [1, 2 * G, C, D]
    embeddings = torch.zeros(num_rows, config.hidden_size, dtype=model.dtype)  # [N, E]
    features = embeddings.clone()[None] if getattr(model, "no_feature", None) is not None else None  # [1, N, E]
    seen = {3: 128 * torch.export.Dim("grains", min=1, max=16384)}  # see `visible_slots`
    held = {2: BLOCK * torch.export.Dim("capacity", min=1, max=4096)}
    exported = torch.export.export(
        _PassModule(plain_copy(model, context_tokens)).eval(),
        (embeddings, positions, positions.clone(), bias, local_bias, features, *keys_values),
        dynamic_shapes=(
            None,
            None,
            None,
            seen,
            None if local_bias is None else seen,
            None,
            tuple(held for _ in keys_values),
        ),
        strict=False,
    )
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs={"freezing": True})


def plain_copy(model: Llama | GPT2, context_tokens: int) -> Llama | GPT2:
    """Return a copy of a decoder whose linear layers hold plain weights and whose angles reach the whole context."""
    model.reserve_positions(context_tokens)
    plain = copy.copy(model)
    for name, value in vars(model).items():
        if isinstance(value, PackedLinear):
            setattr(plain, name, value.unpacked())
        elif isinstance(value, list):
            setattr(plain, name, [_plain_layer(layer) for layer in value])
    return plain


def _plain_layer(layer: Any) -> Any:
    linears = {
        field.name: getattr(layer, field.name).unpacked()
        for field in dataclasses.fields(layer)
        if isinstance(getattr(layer, field.name), PackedLinear)
    }
    return dataclasses.replace(layer, **linears)
