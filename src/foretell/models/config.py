"""A model's shape and rules, read from `config.json`: what the lean decoders need and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import ModelError
from foretell.models.refusals import refuse_unsupported

NATIVE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2"})
"""Families with a decoder of their own; anything else runs through transformers."""

FULL = "full_attention"
SLIDING = "sliding_attention"

_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"})

# transformers omits from a file what equals the family's defaults (Gemma 3's nested `text_config` above all).
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768},
    "qwen3": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
}

_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape and rules; families differ in these fields only."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    hidden_act: str
    tie_embeddings: bool = False
    attention_bias: bool = False
    """The q, k and v projections have biases."""
    output_bias: bool = False
    """The attention's output projection has one."""
    mlp_bias: bool = False
    has_qk_norm: bool = False
    """Queries and keys are normalised per head, before rotation."""
    rope_theta: float | None = 10_000.0
    """None: no rotation (learned positions)."""
    rope_scaling: Mapping[str, Any] | None = None
    """None, or `{"rope_type": "linear" | "llama3", "factor": …}` with numbers checked; full-attention layers only."""
    local_rope_theta: float | None = None
    """Base of the sliding layers where it differs (Gemma 3), which are never scaled; None: `rope_theta`."""
    sliding_window: int | None = None
    """A row sees itself and the `sliding_window - 1` positions before it, in sliding layers; None: no such layers."""
    layer_types: tuple[str, ...] = ()
    """For each layer "full_attention" or "sliding_attention"."""
    attention_scale: float = 1.0
    """What query-key products are multiplied by."""
    embedding_scale: float = 1.0
    """What input embeddings are multiplied by; transformers rounds it to the weights' dtype first."""
    query_pre_attn_scalar: float | None = None
    final_logit_softcap: float | None = None
    attention_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def is_native(self) -> bool:
        """Whether foretell has a decoder of its own for the family."""
        return self.model_type in NATIVE_FAMILIES


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of the model in `folder`, with the EOS ids of `generation_config.json` where it has any.

    Raises:
        ModelError: a file is missing or not JSON, a field is missing or of the wrong type, or the kind is refused.
    """
    raw = read_json(folder / "config.json")
    refuse_unsupported(raw, folder)
    return parse_config(raw, read_generation_config(folder))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return `generation_config.json` (sampling defaults, EOS ids) as it is; empty where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file.

    Raises:
        ModelError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model folder needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({_first_line(error)}): download the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object: download the model again")
    return value


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Turn a `config.json` object, in transformers' 4.x or 5.x layout, into a `ModelConfig`.

    A family without a native decoder is read by its most usual field names, and its rotation and masks are left to
    transformers; `generation` is the object of `generation_config.json`.

    Raises:
        ModelError: a field is missing, has the wrong type, or asks for something that foretell refuses.
    """
    fields = _Fields(_flatten(raw))
    _refuse_variants(fields)
    shape = _shape(fields)
    rotation = _rotation(fields) if fields.is_native else {}
    return ModelConfig(**shape, **_attention(fields, shape), **rotation, **_ids(fields, generation or {}))


class _Fields:
    """Typed look-ups by the names that families use for one thing; the family's defaults fill the gaps."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.model_type = raw.get("model_type")
        if not isinstance(self.model_type, str):
            raise ModelError(f"config.json: `model_type` must be a string, got {self.model_type!r}: complete the file")
        self.is_native = self.model_type in NATIVE_FAMILIES
        merged = {**_DEFAULTS.get(self.model_type, {}), **raw}
        self.raw = {name: value for name, value in merged.items() if value is not None}

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer."""
        name, value = self._find(names, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _ill_typed(name, "a positive integer", value)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a positive finite number."""
        name, value = self._find(names, default)
        if not is_positive_number(value):
            raise _ill_typed(name, "a positive number", value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise _ill_typed(name, "true or false", value)
        return value

    def text(self, *names: str) -> str:
        name, value = self._find(names, None)
        if not isinstance(value, str):
            raise _ill_typed(name, "a string", value)
        return value

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self.raw else None

    def _find(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        name = next((name for name in names if name in self.raw), None)
        if name is not None:
            return name, self.raw[name]
        if default is None:
            raise ModelError(f"config.json of a {self.model_type!r} model lacks `{names[0]}`: complete the file")
        return names[0], default


def is_positive_number(value: object) -> bool:
    """Return whether `value` is an int or float, finite and above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _flatten(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lift Gemma 3's nested `text_config` to the top, which keeps ids and tying in the outer object."""
    text = raw.get("text_config")
    if raw.get("model_type") != "gemma3" or not isinstance(text, Mapping):
        return raw
    outer = {key: raw[key] for key in ("eos_token_id", "bos_token_id", "tie_word_embeddings") if key in raw}
    return {**outer, **text, "model_type": "gemma3_text"}


def _shape(fields: _Fields) -> dict[str, Any]:
    hidden_size = fields.whole("hidden_size", "n_embd", "d_model")
    num_heads = fields.whole("num_attention_heads", "n_head", "num_heads", "n_heads")
    num_kv_heads = fields.whole("num_key_value_heads", "num_kv_heads", "n_head_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: {num_heads} heads cannot share {num_kv_heads} key/value heads: correct the file"
        )
    if "head_dim" not in fields.raw and hidden_size % num_heads:
        raise ModelError(
            f"config.json: `hidden_size` {hidden_size} is no multiple of {num_heads} heads: set `head_dim`"
        )
    is_gpt2 = fields.model_type == "gpt2"
    optional = 4 * hidden_size if is_gpt2 or not fields.is_native else None
    return {
        "model_type": fields.model_type,
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.whole("intermediate_size", "n_inner", "ffn_dim", default=optional),
        "num_layers": fields.whole("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": fields.whole("head_dim", default=hidden_size // num_heads),
        "norm_eps": fields.number("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", default=1e-5),
        "max_positions": fields.whole("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        "hidden_act": _activation(fields),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "mlp_bias": fields.flag("mlp_bias"),
    }


def _activation(fields: _Fields) -> str:
    if not fields.is_native:
        return str(fields.raw.get("hidden_act", fields.raw.get("activation_function", "")))
    # Gemma's files carry `hidden_act` beside the field that its code reads, `hidden_activation`.
    name = fields.text("hidden_activation", "activation_function", "hidden_act")
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported (only {', '.join(sorted(_ACTIVATIONS))}): use another")
    return name


def _attention(fields: _Fields, shape: Mapping[str, Any]) -> dict[str, Any]:
    family = fields.model_type
    has_bias = family == "qwen2" or fields.flag("attention_bias")
    layer_types, sliding_window = _layer_types(fields, shape["num_layers"])
    scalar = fields.number("query_pre_attn_scalar") if family == "gemma3_text" else None
    scale = (scalar or shape["head_dim"]) ** -0.5
    return {
        "attention_bias": has_bias,
        "output_bias": has_bias and family != "qwen2",
        "has_qk_norm": family in ("qwen3", "gemma3_text"),
        "layer_types": layer_types,
        "sliding_window": sliding_window,
        "attention_scale": scale if fields.flag("scale_attn_weights", default=True) else 1.0,
        "query_pre_attn_scalar": scalar,
        "embedding_scale": shape["hidden_size"] ** 0.5 if family == "gemma3_text" else 1.0,
        "final_logit_softcap": fields.optional_number("final_logit_softcapping"),
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
    }


def _layer_types(fields: _Fields, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    is_windowed = fields.model_type in ("mistral", "qwen2", "qwen3", "gemma3_text") and "sliding_window" in fields.raw
    if fields.model_type in ("qwen2", "qwen3"):
        is_windowed = is_windowed and fields.flag("use_sliding_window")
    kinds = fields.raw.get("layer_types") if fields.model_type not in ("llama", "gpt2") else None
    if kinds is None:
        kinds = _usual_layer_types(fields, num_layers) if is_windowed else [FULL] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise _ill_typed("layer_types", f"a list of {num_layers} names", kinds)
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise ModelError(
            f"layers of type {unknown[0]!r} are not supported (only {FULL} and {SLIDING}): use another model"
        )
    if SLIDING not in kinds:
        return tuple(kinds), None
    if not is_windowed and fields.is_native:
        raise ModelError("config.json: `layer_types` has sliding layers but no `sliding_window` is in use: set it")
    return tuple(kinds), fields.whole("sliding_window")


def _usual_layer_types(fields: _Fields, num_layers: int) -> list[str]:
    """Return the layers' types of a windowed model whose file does not list them."""
    if fields.model_type == "mistral":
        return [SLIDING] * num_layers
    if fields.model_type == "gemma3_text":
        period = fields.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
        return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]
    first = fields.raw.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool):
        raise _ill_typed("max_window_layers", "an integer", first)
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def _rotation(fields: _Fields) -> dict[str, Any]:
    """Read the rotary embedding from `rope_parameters` (5.x) or `rope_theta` and `rope_scaling` (4.x)."""
    if fields.model_type == "gpt2":
        return {"rope_theta": None}
    is_gemma = fields.model_type == "gemma3_text"
    parameters = fields.raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise _ill_typed("rope_parameters", "an object", parameters)
    local = (parameters.get(SLIDING) or {}) if is_gemma else {}
    rope = parameters.get(FULL, {}) if is_gemma and (FULL in parameters or SLIDING in parameters) else parameters
    rope = {**(fields.raw.get("rope_scaling") or {}), **(rope or {})}
    theta = rope.pop("rope_theta", fields.raw.get("rope_theta", 1_000_000.0 if is_gemma else 10_000.0))
    if not is_positive_number(theta):
        raise _ill_typed("rope_theta", "a positive number", theta)
    rotation = {"rope_theta": float(theta), "rope_scaling": _rope_scaling(rope)}
    if is_gemma:
        if _rope_scaling(local) is not None:
            raise ModelError("rope scaling of sliding layers is not supported: use another model")
        local_theta = local.get("rope_theta", fields.raw.get("rope_local_base_freq", 10_000.0))
        if not is_positive_number(local_theta):
            raise _ill_typed("rope_local_base_freq", "a positive number", local_theta)
        rotation["local_rope_theta"] = float(local_theta)
    return rotation


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("a `partial_rotary_factor` other than 1 is not supported in this family: use another model")
    if kind == "default":
        return None
    names = _ROPE_NUMBERS.get(kind) if isinstance(kind, str) else None
    if names is None:
        raise ModelError(f"rope scaling {kind!r} is not supported (only default, linear, llama3): use another model")
    for name in names:
        if not is_positive_number(rope.get(name)):
            raise _ill_typed(f"rope_scaling.{name}", "a positive number", rope.get(name))
    return {"rope_type": kind, **{name: rope[name] for name in names}}


def _ids(fields: _Fields, generation: Mapping[str, Any]) -> dict[str, Any]:
    eos = generation.get("eos_token_id")
    eos = fields.raw.get("eos_token_id") if eos is None else eos
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    bos = fields.raw.get("bos_token_id")
    for token_id in [*eos_ids, *([] if bos is None else [bos])]:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise _ill_typed("eos_token_id/bos_token_id", "token ids", token_id)
    # Configurations of models without such a token say -1.
    kept = dict.fromkeys(token_id for token_id in eos_ids if token_id >= 0)
    return {"eos_ids": tuple(kept), "bos_id": bos if bos is not None and bos >= 0 else None}


def _refuse_variants(fields: _Fields) -> None:
    """Refuse what a family's own configuration can ask for and its decoder does not do."""
    if not fields.is_native:
        return
    for name in ("use_bidirectional_attention", "add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        if fields.raw.get(name):
            raise ModelError(
                f"`{name}` in config.json is not supported in a {fields.model_type} decoder: use another model"
            )


def _ill_typed(name: str, wanted: str, got: object) -> ModelError:
    return ModelError(f"config.json: `{name}` must be {wanted}, got {got!r}: correct the file")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
