"""From a transformers model in memory to a decoder over its weights: what `load` is to files."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretell.errors import ModelError
from foretell.models.config import parse_config
from foretell.models.decoder import Model
from foretell.models.hf import HFModel
from foretell.models.load import DECODERS
from foretell.models.probe import tree_error
from foretell.models.refusals import refuse_unsupported

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SAMPLES: Final = 8
"""Values of each parameter that a fingerprint looks at."""


class LiveWeights:
    """A model's own tensors behind the interface of `WeightReader`; nothing is copied.

    Args:
        model: a causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__
        self._tensors = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}

    def has(self, name: str) -> bool:
        """Return whether there is a parameter of that name."""
        return name in self._tensors

    def get(self, name: str) -> Tensor:
        """Return a parameter, which shares memory with the model.

        Raises:
            ModelError: no parameter has that name.
        """
        if name not in self._tensors:
            raise ModelError(f"{self._name} has no parameter {name!r}: its modules were changed; load it again")
        tensor: Tensor = self._tensors[name]
        return tensor

    get_mapped = get

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare parameters' shapes with those that the configuration gives.

        Raises:
            ModelError: a parameter is missing or has another shape.
        """
        for name, expected in shapes.items():
            if (shape := tuple(self.get(name).shape)) != expected:
                raise ModelError(
                    f"{self._name}: {name} is {list(shape)} where its configuration makes it {list(expected)}: "
                    "its modules were changed; load it again"
                )

    def release(self) -> None:
        """Do nothing: the tensors are the model's."""


def read_live(model: Any) -> Model:
    """Return a decoder that computes what a transformers model does: a lean one over a packed copy of its weights, or
    the adapter over its own modules, which copies nothing. Neither refers to the object `model`.

    Args:
        model: a causal language model of transformers that `refuse_live` let pass.

    Raises:
        ModelError: the model is of a kind that foretell refuses, or does not compute what its weights say.
    """
    raw = model.config.to_dict()
    refuse_unsupported(raw, None)
    config = parse_config(raw)
    if type(model).__name__ != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) or not config.is_native:
        return HFModel(copy.copy(model), config)  # a shallow copy: the same modules, another object
    decoder: Any = getattr(importlib.import_module(f"foretell.models.{config.model_type}"), DECODERS[config.model_type])
    lean: Model = decoder(config, LiveWeights(model), model.dtype, model.device)
    _compare(lean, model)
    return lean


def num_copied_bytes(decoder: Model) -> int:
    """Return at most how many bytes a decoder from `read_live` holds beside the live model's own weights."""
    return 0 if isinstance(decoder, HFModel) else decoder.num_bytes


def refuse_live(model: Any) -> None:
    """Refuse a model that can be seen not to fit, before anything is made of it.

    Raises:
        ModelError: it is an encoder-decoder, in training mode, has an adapter, or is quantised, sharded or offloaded.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model, which is not supported: use a decoder-only model")
    if model.training:
        raise ModelError(f"{name} is in training mode: call its `eval()` first")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(f"{name} is quantised, which is not supported: load it in 16 or 32 bits")
    devices = set()
    for parameter_name, parameter in model.named_parameters():
        if ".base_layer." in parameter_name or "lora_" in parameter_name:
            raise ModelError(f"{name} has an adapter ({parameter_name}): merge it first (peft: `merge_and_unload`)")
        if type(parameter) is not nn.Parameter or parameter.dtype not in _DTYPES:
            raise ModelError(
                f"{name} has a parameter of kind {type(parameter).__name__}, {parameter.dtype} ({parameter_name}): "
                "quantised and sharded weights are not supported; load it in 16 or 32 bits on one device"
            )
        devices.add(str(parameter.device))
    if len(devices) != 1 or devices == {"meta"}:
        raise ModelError(f"{name} lies on {', '.join(sorted(devices)) or 'no device'}: put all of it on one device")


def fingerprint(model: Any) -> tuple[object, ...]:
    """Return something that differs once a model's weights, or the hooks on its modules, have changed.

    Version counters show what autograd sees, addresses show replaced and moved tensors, and some values of each tensor
    show what neither does: changes through `.data`, as peft merges adapters.

    Cost: 3 ms for SmolLM2-135M (one core).
    """
    parameters = [parameter.detach() for parameter in model.parameters()]
    samples = [each.reshape(-1)[:: max(1, each.numel() // _SAMPLES)].double() for each in parameters]  # [K] each
    num_hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return (
        num_hooks,
        hash(torch.cat(samples).cpu().numpy().tobytes()),
        *((each.data_ptr(), _version(each), each.dtype, each.device) for each in parameters),
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@torch.no_grad()
def _compare(lean: Model, model: Any) -> None:
    """Refuse a model that computes something else than its weights say: hooks, replaced modules, hidden adapters.

    Raises:
        ModelError: logits of a small tree differ by more than 1e-3 of the largest one (0.1 in 16 bits).
    """

    def path_logits(token_ids: list[int]) -> Tensor:
        inputs = torch.tensor([token_ids], device=model.device)  # [1, T]
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits[0, -1]  # [V]
        return logits

    try:
        error = tree_error(lean, lean.config.sliding_window, path_logits)
    except RuntimeError as failure:  # shapes that do not fit
        raise ModelError(f"{type(model).__name__}: its modules were changed ({failure}); load it again") from None
    limit = 1e-3 if lean.dtype.itemsize >= 4 else 0.1
    if not error <= limit:  # NaN is a failure too
        raise ModelError(
            f"{type(model).__name__} does not compute what its weights say (logits are off by {error:.2g} of the "
            f"largest, at most {limit:g} is allowed): remove hooks, patches and adapters from its modules"
        )
