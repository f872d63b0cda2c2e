"""Trained drafts on disk: int8 rows with scales, the ids that were kept, and for which target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.artefacts import CONFIG, read_tensors, write_artefact
from foretell.models.config import SLIDING, ModelConfig
from foretell.models.draft import DraftModel
from foretell.models.weights import WeightReader

FORMAT: Final = 1
WEIGHTS: Final = "draft.safetensors"
REMEDY: Final = "train it again with `foretell train draft`"

_SHARED: Final = ("vocab_size", "hidden_size")
"""Dimensions in which a draft and its target agree."""

_SIZES: Final = ("intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")


def write_draft(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    kept_ids: NDArray[np.int64],
    *,
    fingerprint: str,
    card: str,
    provenance: Mapping[str, Any],
) -> None:
    """Write a draft, each file whole or not at all; what else lies in the folder, such as a table, stays.

    Args:
        folder: gets `config.json`, `draft.safetensors`, `README.md` and `provenance.json`.
        config: of the body.
        tensors: float32, by Llama's names; matrices are stored as int8 rows, each with a scale.
        kept_ids: int64 [K], ascending.
        fingerprint: the target's, see `foretell.models.fingerprint`.
        card: the model card, Markdown.
        provenance: command, recipe, text, versions, scores.

    Raises:
        ConfigError: the folder cannot be written.
    """
    document = {"format_version": FORMAT, "fingerprint": fingerprint, "num_kept": len(kept_ids), "body": asdict(config)}
    stored = {"kept_ids": torch.from_numpy(kept_ids.astype(np.int32))}
    for name, tensor in tensors.items():
        stored |= _quantise(name, tensor)
    write_artefact(folder, WEIGHTS, stored, document, card=card, provenance=provenance)


def read_draft_facts(folder: Path) -> dict[str, Any]:
    """Return a draft's `config.json`.

    Raises:
        ModelError: it is missing, damaged or of another format.
    """
    path = folder / CONFIG
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = document["format_version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{path} is missing or damaged: {REMEDY}") from None
    if version != FORMAT:
        raise ModelError(f"{path} has format {version}, this version reads {FORMAT}: {REMEDY}")
    return document


def is_draft(folder: Path) -> bool:
    """Return whether a folder holds a trained draft, rather than a model of its own."""
    return (folder / WEIGHTS).is_file()


def draft_digest(folder: Path) -> str:
    """Return the SHA-256 of a draft's weights, by which a table says whose it is.

    Cost: 3 to 6 ms for 4 MB in the page cache.
    """
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def read_draft(
    folder: Path,
    target_folder: Path,
    target: ModelConfig,
    fingerprint: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftModel:
    """Load a draft beside its target, whose embedding and head rows it shares.

    Args:
        folder: by `write_draft`.
        target_folder: holds the target's safetensors.
        target: the target's dimensions.
        fingerprint: the target's.
        dtype: of the draft's weights in memory.
        device: where they go.

    Raises:
        ModelError: the draft is damaged, or of another target.
    """
    facts = read_draft_facts(folder)
    if facts.get("fingerprint") != fingerprint:
        raise ModelError(
            f"draft {folder} was trained for target {str(facts.get('fingerprint'))[:16]}, this one is "
            f"{fingerprint[:16]}, another model or fine-tuned since: {REMEDY}"
        )
    config = _body(folder, facts)
    if any(getattr(config, name) != getattr(target, name) for name in _SHARED):
        raise ModelError(f"draft {folder} has other dimensions than the target: {REMEDY}")
    stored = read_tensors(folder / WEIGHTS, REMEDY)
    try:
        kept_ids = stored.pop("kept_ids").long()  # [K]
        if kept_ids.shape != (facts["num_kept"],) or not _are_ascending(kept_ids, target.vocab_size):
            raise ValueError("kept ids")
        tensors = _dequantise(stored)
        _check_shapes(tensors, config)
        with WeightReader(target_folder) as reader:
            embedding_name, head_name = shared_names(reader, target)
            tensors["model.embed_tokens.weight"] = reader.get_mapped(embedding_name)  # [V, E]
            tensors["lm_head.weight"] = reader.get(head_name)[kept_ids]  # [K, E]
            return DraftModel(config, tensors, kept_ids.numpy(), dtype, device)
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / WEIGHTS} does not hold what {CONFIG} says ({error}): {REMEDY}") from None


def shared_names(reader: WeightReader, target: ModelConfig) -> tuple[str, str]:
    """Return the names of a target's embedding and of its head; they are equal where the head is tied to it."""
    embedding = "model.embed_tokens.weight" if reader.has("model.embed_tokens.weight") else "wte.weight"
    has_head = not target.tie_embeddings and reader.has("lm_head.weight")
    return embedding, "lm_head.weight" if has_head else embedding


def _body(folder: Path, facts: Mapping[str, Any]) -> ModelConfig:
    try:
        values = {field.name: facts["body"][field.name] for field in fields(ModelConfig)}
        values["layer_types"], values["eos_ids"] = tuple(values["layer_types"]), tuple(values["eos_ids"])
    except (KeyError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG} lacks {error}: {REMEDY}") from None
    config = ModelConfig(**values)
    wrong = _wrong_field(config)
    if wrong is not None:
        raise ModelError(f"{folder / CONFIG} has {wrong} {values[wrong]!r}, which no draft has: {REMEDY}")
    return config


def _wrong_field(config: ModelConfig) -> str | None:
    """Return the name of a field with a value that would fail later; None where there is none."""
    for name, hint in get_type_hints(ModelConfig).items():
        if not _is_a(getattr(config, name), hint):
            return name
    window = config.sliding_window
    if (SLIDING in config.layer_types and window is None) or (window is not None and window < 1):
        return "sliding_window"
    if len(config.layer_types) != config.num_layers:
        return "layer_types"
    return next((name for name in _SIZES if getattr(config, name) < 1), None)


def _is_a(value: object, hint: Any) -> bool:
    """Return whether a value is of a field's type; of containers the outermost counts."""
    hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = tuple(get_origin(each) or each for each in hints)
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def _are_ascending(kept_ids: Tensor, vocab_size: int) -> bool:
    """Return whether ids [K] are distinct, in order, and the target's."""
    return bool((kept_ids.diff() > 0).all()) and 0 <= int(kept_ids[0]) <= int(kept_ids[-1]) < vocab_size


def _check_shapes(tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raise where a weight has another shape than the body says.

    Raises:
        ValueError: it has.
    """
    width, inner = config.hidden_size, config.intermediate_size
    num_queries, num_keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (num_queries, width),
        "self_attn.k_proj": (num_keys, width),
        "self_attn.v_proj": (num_keys, width),
        "self_attn.o_proj": (width, num_queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    expected = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config.num_layers)
        for name, shape in shapes.items()
    } | {"model.norm.weight": (width,), "fuse.weight": (width, 2 * width), "no_feature": (width,)}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected.get(name, tuple(tensor.shape)):
            raise ValueError(f"{name} {tuple(tensor.shape)}")


def _quantise(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return int8 rows and their scales, [out, in] and [out]; vectors as bfloat16."""
    if tensor.ndim == 1:
        return {name: tensor.bfloat16().contiguous()}
    scale = tensor.float().abs().amax(-1).clamp(min=1e-12) / 127  # [out]
    return {name: (tensor / scale[:, None]).round().to(torch.int8).contiguous(), f"{name}.scale": scale}


def _dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            tensors[name] = tensor.float() * stored[f"{name}.scale"][:, None]  # [out, in]
        elif not name.endswith(".scale"):
            tensors[name] = tensor
    return tensors
