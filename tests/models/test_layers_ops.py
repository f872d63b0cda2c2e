"""The operations of the lean decoders against plain ones: F.linear, transformers' rotation, attention by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models import layers
from foretell.models.decoder import RowBatch, attend_layer, write_rows
from foretell.models.layers import PackedLinear, RopeAngles, attend, padded_rows, rms_norm, rope_table, rotate

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [(1, 48, 80), (4, 1536, 33), (17, 3, 5), (64, 128, 256)])
def test_a_packed_linear_is_a_linear(
    dtype: torch.dtype, has_bias: bool, num_rows: int, num_in: int, num_out: int
) -> None:
    rows, weight = randn(num_rows, num_in, dtype=dtype), randn(num_out, num_in, dtype=dtype, seed=1)
    bias = randn(num_out, dtype=dtype, seed=2) if has_bias else None
    layer = PackedLinear(weight, bias)
    expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    error = (layer(rows).double() - expected).abs().max()
    assert layer(rows).dtype == layer.dtype == dtype
    assert error <= (1 if dtype == torch.bfloat16 else 8) * spacing(dtype) * expected.abs().max()
    assert layer.num_bytes == weight.nbytes + (0 if bias is None else bias.nbytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_that_cannot_be_packed_stays_plain(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_pack", lambda weight: None)
    rows, weight, bias = randn(5, 16, dtype=dtype), randn(7, 16, dtype=dtype), randn(7, dtype=dtype)
    layer = PackedLinear(weight, bias)
    assert torch.equal(layer(rows), F.linear(rows, weight, bias))
    assert layer.num_bytes == weight.nbytes + bias.nbytes


def test_float64_is_never_packed() -> None:
    assert PackedLinear(randn(7, 16, dtype=torch.float64)).packed is None


def transformers_rope(scaling: dict[str, Any] | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 500_000.0} | (scaling or {})
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=131_072, rope_parameters=parameters
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotation_is_that_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.tensor([0, 1, 7, 511, 2047, 2048, 8191, 30_000])
    cos, sin = transformers_rope(scaling, positions)  # [M, D]
    angles = RopeAngles(64, 500_000.0, scaling, 131_072, torch.float32, CPU)
    rope = angles(positions[None], 30_000)  # [M, 2, D]
    torch.testing.assert_close(rope[:, 0], cos, atol=2e-6, rtol=0)
    queries, keys = randn(8, 3, 64), randn(8, 3, 64, seed=1)  # [M, H, D]
    expected, _ = apply_rotary_pos_emb(queries, keys, cos, sin, unsqueeze_dim=1)
    torch.testing.assert_close(rotate(queries, rope), expected, atol=2e-5, rtol=0)


def test_angles_grow_with_the_positions_and_end_with_the_context() -> None:
    table = rope_table(5000, 16, 10_000.0, None)
    angles = RopeAngles(16, 10_000.0, None, 5000, torch.float64, CPU)
    for position in (3, 2047, 2048, 4999):
        assert torch.equal(angles(torch.tensor([[position]]), position)[0], table[position].double())
    with pytest.raises(IndexError):
        angles(torch.tensor([[5000]]), 5000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_keeps_the_rows_dtype_and_the_weights_precision(dtype: torch.dtype) -> None:
    rows = randn(6, 40, dtype=dtype)
    weight = 1 + randn(40, dtype=torch.promote_types(dtype, torch.float32), seed=1) / 10
    wide = rows.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    for weights, slack in ((weight, 1), (weight.to(dtype), 2)):
        normed = rms_norm(rows, weights, 1e-6)
        assert normed.dtype == dtype
        assert ((normed.double() - expected).abs() / expected.abs().clamp_min(1e-3)).max() <= slack * 2 * spacing(dtype)


def naive_attention(queries: Tensor, keys_values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attend row by row and head by head; queries [B, N, H, D], visible [B, N, S]."""
    num_kv_heads = keys_values.shape[1] // 2
    mixed = torch.empty_like(queries)
    for b, n, h in torch.cartesian_prod(*(torch.arange(size) for size in queries.shape[:3])).tolist():
        head = h // (queries.shape[2] // num_kv_heads)
        slots = visible[b, n]
        keys, values = keys_values[b, head, slots], keys_values[b, num_kv_heads + head, slots]
        mixed[b, n, h] = ((keys @ queries[b, n, h]) * scale).softmax(0) @ values
    return mixed


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_attention_is_that_of_every_head_alone(num_heads: int, num_kv_heads: int, num_sequences: int) -> None:
    num_rows, num_slots, dim = 5, 32, 8
    queries = randn(num_sequences, num_rows, num_heads, dim, dtype=torch.float64)
    keys_values = randn(num_sequences, 2 * num_kv_heads, num_slots, dim, dtype=torch.float64, seed=1)
    visible = randn(num_sequences, num_rows, num_slots, seed=2) > 0
    bias = torch.zeros(num_sequences, 1, num_rows, num_slots, dtype=torch.float64)
    bias.masked_fill_(~visible[:, None], -torch.inf)
    folded = bias.repeat(1, 1, num_heads // num_kv_heads, 1)  # [B, 1, H / G * N, S]
    mixed = attend(queries.flatten(0, 1), keys_values, folded, 0.3)
    expected = naive_attention(queries, keys_values, visible, 0.3)
    torch.testing.assert_close(mixed, expected.flatten(0, 1).flatten(1), atol=1e-12, rtol=0)


def test_a_sliding_layer_reads_from_its_first_block_on() -> None:
    queries, keys_values = randn(2, 4, 8), randn(1, 4, 64, 8, seed=1)
    bias = torch.zeros(1, 1, 4, 64)
    bias[..., :40] = -torch.inf
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    batch = RowBatch(zeros, zeros, 0, zeros, bias, bias[..., 32:], 32)
    full, sliding = (attend_layer(queries, keys_values, batch, is_sliding=kind, scale=1.0) for kind in (False, True))
    torch.testing.assert_close(sliding, full)


@pytest.mark.parametrize("num_sequences", [1, 2, 3])
def test_rows_go_to_their_slots_and_nowhere_else(num_sequences: int) -> None:
    keys_values = torch.zeros(num_sequences, 4, 16, 8)
    rows = randn(num_sequences * 3, 4, 8)
    slots = torch.stack([torch.tensor([2, 3, 4]) + 4 * index for index in range(num_sequences)])  # [B, N]
    expected = keys_values.clone()
    for index in range(num_sequences):
        for row in range(3):
            expected[index, :, slots[index, row]] = rows[3 * index + row]
    write_rows(keys_values, RowBatch(slots, slots, 0, slots, None), rows)
    assert torch.equal(keys_values, expected)


@pytest.mark.parametrize("queries_per_kv", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5])
def test_padding_leaves_no_short_attention_block(num_sequences: int, queries_per_kv: int) -> None:
    for num_rows in range(1, 80):
        padded = padded_rows(num_rows, num_sequences, queries_per_kv, torch.bfloat16, CPU)
        assert padded >= num_rows
        assert padded * num_sequences >= 4
        assert (padded * queries_per_kv) % 32 not in (1, 2, 3)
        assert padded_rows(padded, num_sequences, queries_per_kv, torch.bfloat16, CPU) == padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_bfloat16_is_padded(dtype: torch.dtype) -> None:
    assert padded_rows(1, 1, 3, dtype, CPU) == 1
    assert padded_rows(1, 1, 3, torch.bfloat16, torch.device("cuda")) == 1
