"""The operations that the lean decoders share.

Each fast path here has a plain twin: `PackedLinear` falls back to `F.linear`, and tests compare the two.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""By the names that configurations use."""

_QUERY_BLOCK = 32
"""Query rows that the CPU attention kernel handles at once; a block of fewer than 4 gives other bits in bfloat16."""


MIN_ROWS: Final = 4
"""Fewer rows of a pass have other bits in bfloat16 on CPU."""


class PackedLinear:
    """A linear layer whose weight is reordered once for oneDNN's matrix kernels.

    Packing takes a pass of one row over SmolLM2-135M from 17 to 12.5 ms on an AVX-512 CPU. The operators are
    private to torch, so a weight that they refuse stays as it is.

    Args:
        weight: [out, in], float32 or bfloat16.
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = _pack(weight)
        self.weight = weight if self.packed is None else None

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map rows [M, in] to [M, out], and add `residual` [M, out] where given: one operator does both."""
        if self.packed is None:
            assert self.weight is not None
            mapped = F.linear(rows, self.weight, self.bias)  # [M, out]
            return mapped if residual is None else residual + mapped
        out: Tensor
        if residual is None:
            out = torch.ops.mkldnn._linear_pointwise.default(rows, self.packed, self.bias, "none", [], "")  # [M, out]
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self.packed, self.bias, "add")  # [M, out]
        return out

    def unpacked(self) -> PackedLinear:
        """Return the same layer with a plain weight, for compilers that pack it themselves."""
        plain = copy.copy(self)
        if self.packed is not None:
            plain.weight, plain.packed = self.packed.to_dense(), None
        return plain

    @property
    def num_bytes(self) -> int:
        """Bytes of the resident weight and bias."""
        num_values = self.out_features * (self.in_features + (0 if self.bias is None else 1))
        return num_values * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The weight's dtype."""
        weight = self.packed if self.weight is None else self.weight
        assert weight is not None
        return weight.dtype


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank addition to a linear layer (LoRA, arXiv:2106.09685), for some rows only."""

    down: Tensor  # [R, in]
    up: Tensor  # [out, R]

    def add(self, mapped: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
        """Add to chosen rows of what the layer mapped, [M, out], from its inputs [M, in]; others keep their bits."""
        return mapped.index_add_(0, chosen, F.linear(F.linear(rows[chosen], self.down), self.up))


def num_weight_bytes(layer: DataclassInstance) -> int:
    """Return the bytes of the tensors and packed linears that a layer's dataclass holds."""
    weights = [getattr(layer, field.name) for field in fields(layer)]
    sizes = [weight.num_bytes for weight in weights if isinstance(weight, PackedLinear)]
    return sum(sizes) + sum(weight.nbytes for weight in weights if isinstance(weight, Tensor))


def _pack(weight: Tensor) -> Tensor | None:
    """Return the weight in oneDNN's layout, or None where that is not possible."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    except (RuntimeError, AttributeError):
        return None
    return packed


def padded_rows(
    num_rows: int, num_sequences: int, queries_per_kv: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many rows per sequence a pass of `num_rows` for each of `num_sequences` really computes.

    In bfloat16 on CPU a row's bits must not depend on how many rows ride along, and these do not: at least 4 rows
    (packed linears differ at 1, attention below 4), and no attention block of 1 to 3 query rows at the end. The
    padding also makes a pass faster: 4 rows through packed linears take 10.3 ms where one takes 12.3.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return num_rows
    padded = max(num_rows, -(-MIN_ROWS // num_sequences))
    while 1 <= (padded * queries_per_kv) % _QUERY_BLOCK <= 3:
        padded += 1
    return padded


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows [..., E] to unit root mean square, times `weight` [E], in the wider dtype of the two."""
    if weight.dtype != rows.dtype:
        return F.rms_norm(rows.to(weight.dtype), (rows.shape[-1],), weight, eps).to(rows.dtype)
    return F.rms_norm(rows, (rows.shape[-1],), weight, eps)


def rope_table(num_positions: int, dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Tensor:
    """Return cosines and signed sines of every position, float32 [P, 2, D].

    The sine's first half is negated, so that rotating a head is `x * cos + roll(x, D/2) * sin`.

    Source: RoFormer, arXiv:2104.09864; `llama3` scaling as published with Llama 3.1.
    """
    # All in float32, as transformers does: frequencies from float64 turn angles by 0.0005 at position 30,000.
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [D/2]
    if scaling is not None:
        inverse = _scale_frequencies(inverse, scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)  # [P, D/2]
    cos, sin = angles.cos(), angles.sin()  # [P, D/2]
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)  # [P, 2, D]


def _scale_frequencies(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inverse
    factor = float(scaling["factor"])
    if kind == "linear":
        return inverse / factor
    assert kind == "llama3", kind  # config.py refuses the others
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse  # [D/2]
    smooth = ((trained / wavelength - low) / (high - low)).clamp(0, 1)  # [D/2]
    return (1 - smooth) * inverse / factor + smooth * inverse


def rotate(heads: Tensor, rope: Tensor) -> Tensor:
    """Rotate heads [M, H, D] by their rows' angles, rope [M, 2, D] in the heads' dtype."""
    cos, sin = rope[:, :1], rope[:, 1:]  # [M, 1, D]
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)  # [M, H, D]


def attend(queries: Tensor, keys_values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attend from every row to the visible slots of its own sequence.

    The query heads of one key/value head are folded into rows, so one key block serves them all: 94 µs a layer
    where unfolded heads take 152 (4 rows, 512 slots, SmolLM2).

    Args:
        queries: [B * N, H, D].
        keys_values: [B, 2 * G, S, D], keys first.
        bias: [B, 1, H / G * N, S], 0 where visible and -inf elsewhere.

    Returns:
        [B * N, H * D].
    """
    num_sequences, num_heads2, _, dim = keys_values.shape
    num_kv_heads = num_heads2 // 2
    num_rows, num_heads = queries.shape[0] // num_sequences, queries.shape[1]
    folded = queries.view(num_sequences, num_rows, num_kv_heads, -1, dim).permute(0, 2, 3, 1, 4)  # [B, G, H/G, N, D]
    folded = folded.reshape(num_sequences, num_kv_heads, -1, dim)  # [B, G, H/G * N, D]
    keys, values = keys_values[:, :num_kv_heads], keys_values[:, num_kv_heads:]  # [B, G, S, D]
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scale)  # [B, G, H/G * N, D]
    mixed = mixed.view(num_sequences, num_kv_heads, -1, num_rows, dim).permute(0, 3, 1, 2, 4)  # [B, N, G, H/G, D]
    return mixed.reshape(num_sequences * num_rows, num_heads * dim)


class RopeAngles:
    """Cosines and signed sines by position, grown as sequences do.

    Args:
        dim: width of a head.
        theta: base of the frequencies.
        scaling: `rope_scaling` of the model's config, or None.
        max_positions: the model's context.
        dtype: that of the heads.
        device: that of the heads.
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dim, self._theta, self._scaling = dim, theta, scaling
        self._max_positions, self._dtype, self._device = max_positions, dtype, device
        self._table = self._build(2048)

    def __call__(self, positions: Tensor, last_position: int) -> Tensor:
        """Return [B * N, 2, D] for `positions` [B, N], none of them above `last_position`."""
        if last_position >= self._table.shape[0]:
            self._table = self._build(2 * last_position)
        return self._table[positions.view(-1)]

    def reserve(self, num_positions: int) -> None:
        """Compute the angles of so many positions now."""
        if num_positions > self._table.shape[0]:
            self._table = self._build(num_positions)

    def _build(self, num_positions: int) -> Tensor:
        num_positions = min(num_positions, self._max_positions)
        return rope_table(num_positions, self._dim, self._theta, self._scaling).to(self._device, self._dtype)
