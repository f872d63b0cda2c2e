"""What each GGUF architecture's metadata and tensors are called, and how they differ, in transformers' terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError
from foretell.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from torch import Tensor

_LLAMA_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES: Mapping[str, str] = {
    **_LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_NAMES: Mapping[str, str] = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One GGUF architecture."""

    model_type: str
    class_name: str
    names: Mapping[str, str]
    layer_prefix: str = "model.layers"
    has_interleaved_heads: bool = False
    """Rows of q and k are stored in the order of pairwise rotation."""
    norm_offset: float = 0.0
    """What is added to stored norm weights: Gemma's are stored plus one."""
    is_transposed: bool = False
    """Projections are stored [out, in] and wanted [in, out]."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(model_type="llama", class_name="LlamaForCausalLM", names=_LLAMA_NAMES, has_interleaved_heads=True),
    "qwen2": Family(model_type="qwen2", class_name="Qwen2ForCausalLM", names=_LLAMA_NAMES),
    "qwen3": Family(model_type="qwen3", class_name="Qwen3ForCausalLM", names=_LLAMA_NAMES),
    "gemma3": Family(model_type="gemma3_text", class_name="Gemma3ForCausalLM", names=_GEMMA_NAMES, norm_offset=-1.0),
    "gpt2": Family(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        names=_GPT2_NAMES,
        layer_prefix="transformer.h",
        is_transposed=True,
    ),
}

_DERIVED = frozenset({"rope_freqs.weight"})
"""Tensors that hold constants of the architecture, not weights."""


def find_family(file: GgufFile) -> Family:
    """Return the family of a GGUF file.

    Raises:
        ModelError: the file is one shard of several, or its architecture has no decoder here.
    """
    architecture = file.metadata.get("general.architecture")
    if file.metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{file.path} is one of {file.metadata['split.count']} shards: join them (llama-gguf-split --merge)"
        )
    family = FAMILIES.get(str(architecture))
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"GGUF architecture {architecture!r} is not supported (only {known}): use its safetensors")
    if file.metadata.get(f"{architecture}.expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported: use a dense model")
    return family


def map_names(file: GgufFile, family: Family) -> dict[str, str]:
    """Return `{transformers' name: GGUF's name}` for every weight of the file.

    Raises:
        ModelError: the file has a tensor that the family does not know.
    """
    names = {}
    for name in file.tensors:
        if name in _DERIVED:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in family.names:
            raise ModelError(f"{file.path}: a {family.model_type} model has no tensor {name!r}: use its safetensors")
        prefix = f"{family.layer_prefix}.{match[1]}." if match[1] is not None else ""
        names[f"{prefix}{family.names[match[2]]}.{match[3]}"] = name
    _check_complete(file)
    return names


def weight_shape(file: GgufFile, family: Family, name: str) -> tuple[int, ...]:
    """Return the shape that `read_weight` gives."""
    shape = file.tensors[name].shape
    return shape[::-1] if _is_transposed(family, name, len(shape)) else shape


def read_weight(file: GgufFile, family: Family, name: str, config: Mapping[str, Any]) -> Tensor:
    """Return a weight as transformers lays it out, in bfloat16.

    Raises:
        ModelError: the values cannot be decoded.
    """
    stem = name.split(".")[-2]
    weight = file.read_bfloat16(name, offset=family.norm_offset if stem.endswith("norm") else 0.0)
    if family.has_interleaved_heads and stem in ("attn_q", "attn_k"):
        num_heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])  # [H, D / 2, 2, E]
        return pairs.transpose(1, 2).reshape(weight.shape)  # [H * D, E]
    return weight.T.contiguous() if _is_transposed(family, name, weight.ndim) else weight


def build_config(file: GgufFile, family: Family, end_ids: list[int]) -> dict[str, Any]:
    """Return the object of `config.json`.

    Raises:
        ModelError: the metadata lack a field, or ask for something that is not supported.
    """
    read = _Metadata(file)
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "vocab_size": read.vocab_size(),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids[0] if end_ids else None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config | (_gpt2_shape(read) if family.model_type == "gpt2" else _llama_shape(read, family))


def _is_transposed(family: Family, name: str, num_dims: int) -> bool:
    stem = name.split(".")[-2]
    return family.is_transposed and num_dims == 2 and stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


def _check_complete(file: GgufFile) -> None:
    """Check that every layer has the tensors that the first has."""
    num_layers = _Metadata(file).require("block_count")
    layers: dict[int, set[str]] = {layer: set() for layer in range(num_layers)}
    for name in file.tensors:
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            layers.setdefault(int(layer), set()).add(rest)
    wrong = next((layer for layer, found in layers.items() if not found or found != layers[0]), None)
    if wrong is not None or len(layers) != num_layers or "output_norm.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks tensors (of layer {wrong}, {num_layers} layers): download it again")


class _Metadata:
    """Fields of one architecture, with the prefix that their keys have."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.metadata["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.file.path} lacks a number `{self.architecture}.{key}`: download it again")
        return value

    def vocab_size(self) -> int:
        if "token_embd.weight" not in self.file.tensors:
            raise ModelError(f"{self.file.path} has no tensor 'token_embd.weight': download it again")
        return self.file.tensors["token_embd.weight"].shape[0]


def _llama_shape(read: _Metadata, family: Family) -> dict[str, Any]:
    num_heads = read.require("attention.head_count")
    head_dim = read.get("attention.key_length", read.require("embedding_length") // num_heads)
    if read.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{read.file.path} rotates part of each head only, which is not supported: use another model")
    shape = {
        "hidden_size": read.require("embedding_length"),
        "intermediate_size": read.require("feed_forward_length"),
        "num_hidden_layers": read.require("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.require("context_length"),
        "rms_norm_eps": _shortest(read.require("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(read.get("rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(read),
    }
    if family.model_type == "gemma3_text":
        is_27b = shape["num_hidden_layers"] == 62  # the one size whose scale is not the head's width
        scalar = shape["hidden_size"] // num_heads if is_27b else head_dim
        window = read.require("attention.sliding_window")
        return shape | {"sliding_window": window, "query_pre_attn_scalar": scalar, "rope_local_base_freq": 10_000.0}
    if family.model_type == "llama":
        tensors = read.file.tensors
        return shape | {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return shape


def _gpt2_shape(read: _Metadata) -> dict[str, Any]:
    return {
        "n_embd": read.require("embedding_length"),
        "n_layer": read.require("block_count"),
        "n_head": read.require("attention.head_count"),
        "n_inner": read.require("feed_forward_length"),
        "n_positions": read.require("context_length"),
        "layer_norm_epsilon": _shortest(read.require("attention.layer_norm_epsilon")),
    }


def _rope_scaling(read: _Metadata) -> dict[str, Any] | None:
    """Return transformers' `rope_scaling`; Llama 3's is recovered from the factors that the file lists instead."""
    if "rope_freqs.weight" in read.file.tensors:
        return _llama3_scaling(read)
    kind = read.get("rope.scaling.type", "none")
    factor = read.get("rope.scaling.factor", read.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ModelError(f"{read.file.path} uses rope scaling {kind!r}, which is not supported: use another model")
    return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None


def _llama3_scaling(read: _Metadata) -> dict[str, Any]:
    factors = read.file.read_float32("rope_freqs.weight")
    scaling = {
        "rope_type": "llama3",
        "factor": round(max(factors), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(len(factors), read.get("rope.freq_base", 10_000.0), scaling)
    if any(abs(got - want) > 1e-3 * want for got, want in zip(factors, expected)):
        raise ModelError(f"{read.file.path} lists rope factors that are not Llama 3's: use the model's safetensors")
    return scaling


def _llama3_factors(num_pairs: int, theta: float, scaling: Mapping[str, Any]) -> list[float]:
    """Return what Llama 3 divides each frequency by. Source: transformers, `_compute_llama3_parameters`."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for pair in range(num_pairs):
        wavelength = 2 * 3.141592653589793 * theta ** (pair / num_pairs)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))
