"""Models that foretell cannot run, recognised before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.errors import ModelError

_RECURRENT_TYPES = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm2_vl",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "plamo2",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "retnet",
        "rwkv",
        "rwkv7",
        "xlstm",
        "zamba",
        "zamba2",
    }
)

_RECURRENT_KEYS = (
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "mamba_n_heads",
    "mamba_num_heads",
    "lru_width",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "linear_num_value_heads",
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_period",
)

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

_ENCODER_DECODER_TYPES = frozenset(
    {"bart", "blenderbot", "led", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"}
)

_WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")


def refuse_unsupported(raw: Mapping[str, Any], folder: Path | None) -> None:
    """Refuse a model by its `config.json` object and, where given, the files beside it.

    Raises:
        ModelError: the model is recurrent or hybrid, uses ALiBi, is an encoder-decoder, brings its own code, is
            quantised, or the folder holds an adapter; the message says which, and what to use instead.
    """
    if folder is not None:
        _refuse_adapter(folder)
    text = raw.get("text_config")
    for config in (raw, text) if isinstance(text, Mapping) else (raw,):
        name = str(config.get("model_type"))
        _refuse_recurrent(config, name)
        _refuse_alibi(config, name)
        _refuse_encoder_decoder(config, name)
        _refuse_remote_code(config, name)
        _refuse_quantised(config, name, folder)


def _refuse_recurrent(config: Mapping[str, Any], name: str) -> None:
    evidence = name if name in _RECURRENT_TYPES else next((key for key in _RECURRENT_KEYS if config.get(key)), None)
    kinds = config.get("layer_types") or config.get("block_types")
    if evidence is None and isinstance(kinds, list):
        evidence = next((str(kind) for kind in kinds if _is_recurrent_layer(kind)), None)
    if evidence is not None:
        raise ModelError(
            f"{name!r} models are recurrent or hybrid ({evidence}): a state that runs through every token cannot "
            "verify a tree of drafts; use a model whose layers are all attention"
        )


def _is_recurrent_layer(kind: object) -> bool:
    return not (isinstance(kind, str) and (kind in _ATTENTION_LAYERS or kind == "attention"))


def _refuse_alibi(config: Mapping[str, Any], name: str) -> None:
    # MPT's own default is ALiBi, so its files need not say so.
    attention = config.get("attn_config") if name == "mpt" else {"alibi": False}
    has_alibi = attention.get("alibi", True) if isinstance(attention, Mapping) else True
    if name == "bloom" or has_alibi or config.get("alibi") or config.get("position_embedding_type") == "alibi":
        raise ModelError(
            f"{name!r} model with ALiBi positions is not supported: use one with rotary or learned positions"
        )


def _refuse_encoder_decoder(config: Mapping[str, Any], name: str) -> None:
    if config.get("is_encoder_decoder") or name in _ENCODER_DECODER_TYPES:
        raise ModelError(f"{name!r} is an encoder-decoder model, which is not supported: use a decoder-only model")


def _refuse_remote_code(config: Mapping[str, Any], name: str) -> None:
    if config.get("auto_map"):
        raise ModelError(
            f"the model's config.json asks to run code of its own (`auto_map`), which foretell never does: "
            f"use another model, or remove `auto_map` if transformers' own {name!r} runs it"
        )


def _refuse_quantised(config: Mapping[str, Any], name: str, folder: Path | None) -> None:
    found = config.get("quantization_config") or config.get("compression_config")
    method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else found
    if not found and folder is not None:
        files = (folder / file for file in ("quantize_config.json", "quant_config.json"))
        method = next((path.name for path in files if path.is_file()), None)
    if method:
        raise ModelError(
            f"this {name!r} model is quantised ({method}), and quantised safetensors are not supported: "
            "use the original 16-bit model, or a .gguf file"
        )


def _refuse_adapter(folder: Path) -> None:
    if not (folder / "adapter_config.json").is_file():
        return
    has_weights = any(True for pattern in _WEIGHT_PATTERNS for _ in folder.glob(pattern))
    if not has_weights or (folder / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"{folder} holds an adapter (LoRA), which is not supported: merge it into its base model "
            "(peft: `merge_and_unload`, then `save_pretrained`) and use the merged folder"
        )
