"""Any causal language model that transformers runs, behind foretell's cache: the one module that knows its internals.

transformers' own modules compute a pass. They get a 4-D mask of floats, explicit positions, and a cache whose layers
write into foretell's slots. Whether a model honours all three is not taken on trust: see `_probe`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from foretell.errors import ModelError
from foretell.models.config import FULL, SLIDING, ModelConfig
from foretell.models.decoder import RowBatch, write_rows
from foretell.models.probe import WINDOW, tree_error
from foretell.models.refusals import refuse_unsupported

_ATTENTION: Final = ("sdpa", "eager")
"""Attention implementations that add a mask of floats to the scores."""

_EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STRETCHING_ROPES: Final = ("dynamic", "longrope")


class HFModel:
    """A causal language model run by transformers' modules.

    In a mixture of experts each row reads experts of its own, so that rows cost more than in a dense model of the
    same speed; the measured T(N) accounts for it.

    Args:
        model: the model, in evaluation mode, all of it on one device. It is used, not copied, and stays as it is,
            but for a window that is shortened for two passes while the model is probed.
        config: its dimensions; where the model's own keys and values show others, those hold.

    Raises:
        ModelError: the model is of a kind that foretell refuses, or does not honour masks, positions or slots.
    """

    def __init__(self, model: Any, config: ModelConfig) -> None:
        _refuse(model)
        self.module, self.dtype, self.device = model, model.dtype, model.device
        self._base, self._head = model.base_model, _split_head(model)
        self._cache_name = _cache_name(model)
        self.config = _with_rules(config, model)
        with _explained(model):
            self.config = _with_dimensions(self.config, self)
            _probe(self)

    needs_grid = True
    """The model's own attention takes equally many rows of all sequences."""

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> HFModel:
        """Load the model in `folder`.

        Raises:
            ModelError: transformers cannot load it, or as above.
        """
        model = _load(folder, dtype, "sdpa" if config.attention_softcap is None else "eager")
        return cls(model.to(device).eval(), config)

    def forward(self, batch: RowBatch, keys_values: Sequence[Tensor]) -> Tensor:
        """Return final hidden states [B * N, E]; each layer's `keys_values` [B, 2 * G, S, D] takes the rows' own."""
        cache = _SlotCache(keys_values, batch, self.config.layer_types)
        hidden: Tensor = self._base(
            inputs_embeds=self.embed(batch).view(*batch.token_ids.shape, -1),  # [B, N, E]
            attention_mask=_masks(batch, self.config.layer_types),
            position_ids=batch.positions,
            use_cache=True,
            **{self._cache_name: cache},
        ).last_hidden_state  # [B, N, E]
        return hidden.flatten(0, 1)  # [B * N, E]

    def embed(self, batch: RowBatch) -> Tensor:
        """Return the input embeddings of the rows, [B * N, E]."""
        if batch.embeddings is not None:
            return batch.embeddings.view(batch.token_ids.numel(), -1)  # [B * N, E]
        embeddings: Tensor = self.module.get_input_embeddings()(batch.token_ids)  # [B, N, E]
        return embeddings.flatten(0, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [M, V] of final hidden states [M, E], scaled and capped as the model does."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits  # [1, M, V]
        return logits[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.module.parameters(), *self.module.buffers()))

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts, in which a further row costs more."""
        text = self.module.config.get_text_config()
        return any((getattr(text, name, None) or 0) > 1 for name in _EXPERT_COUNTS)


def _load(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    """Return the model in `folder`; eager where it has no other attention."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # of many kinds: an unknown family, files that do not fit, a missing package
        if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
            return _load(folder, dtype, "eager")
        raise ModelError(f"transformers cannot load {folder} ({_reason(error)}): use another model") from None
    model, report = loaded
    if missing := report["missing_keys"]:
        raise ModelError(f"{folder} has no tensor {min(missing)!r}: the model is incomplete or of another family")
    return model


class _PassCache(Cache):
    """What one pass of transformers sees as its cache; it keeps nothing itself."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions and masks are given, so nothing has to be derived from a length."""
        return 0


class _SlotCache(_PassCache):
    """Writes a pass's keys and values into foretell's slots.

    Args:
        keys_values: [B, 2 * G, S, D] for each layer.
        batch: the pass.
        layer_types: for each layer "full_attention" or "sliding_attention".
    """

    def __init__(self, keys_values: Sequence[Tensor], batch: RowBatch, layer_types: tuple[str, ...]) -> None:
        super().__init__()
        self._keys_values, self._batch, self._layer_types = keys_values, batch, layer_types

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values [B, G, N, D]; return those of all slots [B, G, S, D] that it reads."""
        slots = self._keys_values[layer_idx]  # [B, 2 * G, S, D]
        rows = torch.cat((key_states, value_states), 1)  # [B, 2 * G, N, D]
        write_rows(slots, self._batch, rows.transpose(1, 2).flatten(0, 1))
        if self._layer_types[layer_idx] == SLIDING:
            slots = slots[:, :, self._batch.first_local_slot :]
        keys, values = slots.chunk(2, 1)  # [B, G, S, D] each
        return keys, values


class _ShapeCache(_PassCache):
    """Records the shapes of a pass's keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, list[tuple[int, ...]]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Note the shapes of a layer's keys and values."""
        self.shapes.setdefault(layer_idx, []).extend((tuple(key_states.shape), tuple(value_states.shape)))
        return key_states, value_states


class _Output:
    """A decoder's output that holds the last hidden states [B, N, E] alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Return None for what some decoders add: their cache, router logits, cross attentions."""


class _Given(nn.Module):
    """Stands in for a decoder: its output is the hidden states that it is given as embeddings."""

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _Output:
        """Return `inputs_embeds` [B, N, E] as the last hidden states."""
        return _Output(inputs_embeds)

    @property
    def decoder(self) -> _Given:
        """Itself, for models that call the decoder within their decoder (OPT)."""
        return self


def _split_head(model: Any) -> Any:
    """Return a module that turns final hidden states into logits by the model's own code: scaling, softcap, bias."""
    head = copy.copy(model)
    # A shallow copy shares the dictionary of submodules, and the live model must stay whole.
    head.__dict__["_modules"] = dict(model._modules)
    head._modules[model.base_model_prefix] = _Given()
    return head


def _masks(batch: RowBatch, layer_types: tuple[str, ...]) -> Tensor | dict[str, Tensor]:
    """Return the pass's mask [B, 1, N, S] for one kind of layers, or those of both kinds by name."""
    # Biases are repeated for the query heads of one key/value head, rows within heads.
    assert batch.bias is not None
    full = batch.bias[:, :, : batch.num_rows]  # [B, 1, N, S]
    if SLIDING not in layer_types:
        return full
    assert batch.local_bias is not None
    local = batch.local_bias[:, :, : batch.num_rows]  # [B, 1, N, S - first_local_slot]
    return {FULL: full, SLIDING: local} if FULL in layer_types else local


def _cache_name(model: Any) -> str:
    """Return what the decoder calls its cache: transformers 5.24 renames it."""
    parameters = inspect.signature(type(model.base_model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


# Refusals


def _refuse(model: Any) -> None:
    """Refuse by what can be seen without running the model."""
    config = model.config
    refuse_unsupported(config.to_dict(), None)
    name, attention = type(model).__name__, config._attn_implementation
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{name} is recurrent or hybrid: use a model whose layers are all attention")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(f"{name} is quantised, which is not supported: load it in 16 or 32 bits")
    if model.get_output_embeddings() is None or model.base_model is model:
        raise ModelError(f"{name} is not a causal language model: load it with AutoModelForCausalLM")
    if attention not in _ATTENTION:
        raise ModelError(f"{name} runs {attention!r} attention, which takes no mask: load it with 'sdpa' or 'eager'")
    if model.training:
        raise ModelError(f"{name} is in training mode: call its `eval()` first")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise ModelError(f"{name} is spread over {', '.join(sorted(devices))}: put it on one device")


def _with_rules(config: ModelConfig, model: Any) -> ModelConfig:
    """Return the configuration with the layers' windows and the context that the model really runs with."""
    text = model.config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if not window:
        kinds = [FULL] * config.num_layers
    elif kinds is None:
        kinds = [SLIDING] * config.num_layers
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown or len(kinds) != config.num_layers:
        raise ModelError(
            f"{type(model).__name__} has layers of type {(unknown or kinds)[0]!r}, or not {config.num_layers} of them: "
            f"only {FULL} and {SLIDING} are supported; use another model"
        )
    return replace(
        config,
        layer_types=tuple(kinds),
        sliding_window=window if SLIDING in kinds else None,
        max_positions=_num_positions(text, config.max_positions),
    )


def _num_positions(text: Any, max_positions: int) -> int:
    """Return the positions up to which a token's rotation does not depend on how long its sequence is.

    Beyond its first length a stretched rotation changes for all tokens at once, those in the cache included.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    limits = [max_positions]
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in _STRETCHING_ROPES:
            trained = getattr(text, "original_max_position_embeddings", None)
            limits.append(parameters.get("original_max_position_embeddings") or trained or max_positions)
    return min(limits)


def _with_dimensions(config: ModelConfig, model: HFModel) -> ModelConfig:
    """Return the configuration with the key/value heads and their width that the model's own keys and values show."""
    cache, size = _ShapeCache(), 3
    with torch.inference_mode():
        model._base(
            input_ids=torch.arange(size, device=model.device)[None],
            position_ids=torch.arange(size, device=model.device)[None],
            use_cache=True,
            **{model._cache_name: cache},
        )
    name = type(model.module).__name__
    if sorted(cache.shapes) != list(range(config.num_layers)) or any(
        len(shapes) != 2 for shapes in cache.shapes.values()
    ):
        raise ModelError(f"{name} has layers without keys and values of their own: use a model whose layers all do")
    shapes = {shape for pair in cache.shapes.values() for shape in pair}
    shape = min(shapes)
    if len(shapes) > 1 or len(shape) != 4 or shape[2] != size:
        raise ModelError(f"{name} has keys and values of different shapes ({sorted(shapes)}): use another model")
    if config.num_heads % shape[1]:
        raise ModelError(f"{name} has {config.num_heads} heads for {shape[1]} key/value heads: use another model")
    return replace(config, num_kv_heads=shape[1], head_dim=shape[3])


@contextmanager
def _explained(model: Any) -> Iterator[None]:
    """Turn whatever a model raises when it is run in foretell's way into a refusal."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # any model's own code
        raise ModelError(
            f"{type(model).__name__} does not run on foretell's cache and masks ({_reason(error)}): use another model"
        ) from None


def _reason(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


@torch.inference_mode()
def _probe(model: HFModel) -> None:
    """Compare a small tree, verified after a prefill in two chunks, with transformers' own passes over its paths.

    A window is shortened meanwhile: masks of sliding layers that are not honoured would otherwise show after
    thousands of tokens only.

    Raises:
        ModelError: logits differ by more than 1e-3 of their range (0.1 in 16 bits), or are not finite.
    """
    module, has_window = model.module, model.config.sliding_window is not None
    with _short_window(module.config.get_text_config()) if has_window else nullcontext():
        error = tree_error(model, WINDOW if has_window else None, partial(_path_logits, module))
    limit = 1e-3 if model.dtype.itemsize >= 4 else 0.1
    if not error <= limit:  # NaN is a failure too
        raise ModelError(
            f"{type(module).__name__} does not honour an explicit mask with explicit positions (logits of a tree are "
            f"off by {error:.2g} of their range, at most {limit:g} is allowed): use another model"
        )


@contextmanager
def _short_window(text: Any) -> Iterator[None]:
    window = text.sliding_window
    text.sliding_window = WINDOW
    try:
        yield
    finally:
        text.sliding_window = window


def _path_logits(module: Any, token_ids: list[int]) -> Tensor:
    """Return the logits [V] that transformers itself gives after these tokens."""
    inputs = torch.tensor([token_ids], device=module.device)  # [1, T]
    logits: Tensor = module(input_ids=inputs, use_cache=False).logits  # [1, T, V]
    return logits[0, -1]
