"""Llama, and SmolLM2, which is one; Mistral, Qwen 2, Qwen 3 and Gemma 3 build on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

from foretell.models.config import SLIDING, ModelConfig
from foretell.models.decoder import RowBatch, attend_layer, write_rows
from foretell.models.layers import ACTIVATIONS, LowRank, PackedLinear, RopeAngles, num_weight_bytes, rms_norm, rotate
from foretell.models.weights import WeightReader

LinearName = Literal["qkv", "output", "gate_up", "down"]
LINEARS: Final[tuple[LinearName, ...]] = ("qkv", "output", "gate_up", "down")
"""The linear layers of a layer."""


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Low-rank additions to one layer's linear layers, for the rows that a batch names."""

    qkv: LowRank
    output: LowRank
    gate_up: LowRank
    down: LowRank

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], prefix: str) -> LayerAdapters:
        """Return the adapters whose tensors are named `{prefix}{linear}.down` and `.up`."""
        return cls(*(LowRank(tensors[f"{prefix}{name}.down"], tensors[f"{prefix}{name}.up"]) for name in LINEARS))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        adapters = (self.qkv, self.output, self.gate_up, self.down)
        return sum(adapter.down.nbytes + adapter.up.nbytes for adapter in adapters)


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer; queries, keys and values are one matrix, and so are gate and up."""

    attention_norm: Tensor  # [E]
    qkv: PackedLinear  # [E] -> [(H + 2 * G) * D]
    query_norm: Tensor | None  # [D], Qwen 3 and Gemma 3
    key_norm: Tensor | None  # [D], Qwen 3 and Gemma 3
    output: PackedLinear  # [H * D] -> [E]
    mlp_norm: Tensor  # [E]
    gate_up: PackedLinear  # [E] -> [2 * F]
    down: PackedLinear  # [F] -> [E]
    is_sliding: bool
    adapters: LayerAdapters | None = None

    def map(self, name: LinearName, rows: Tensor, batch: RowBatch, residual: Tensor | None = None) -> Tensor:
        """Return what one of the linear layers makes of rows [M, in], its adapter included: [M, out]."""
        linear: PackedLinear = getattr(self, name)
        mapped = linear(rows, residual)  # [M, out]
        if self.adapters is None or batch.adapted is None:
            return mapped
        adapter: LowRank = getattr(self.adapters, name)
        return adapter.add(mapped, rows, batch.adapted)


class Llama:
    """A decoder of the Llama family; biases and window are where weights and configuration have them.

    Args:
        config: the model's dimensions.
        reader: where the weights come from; each layer is packed and released before the next is read.
        dtype: bfloat16 or float32 (float64 in tests).
        device: where the weights go.

    Raises:
        ModelError: a weight is missing or has another shape.
    """

    mlp_norm_name: ClassVar = "post_attention_layernorm"
    """What the weights call the norm before the feed-forward part."""

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        reader.expect(_shapes(config))
        self._activation = ACTIVATIONS[config.hidden_act]
        assert config.rope_theta is not None
        self._rope = RopeAngles(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_positions, dtype, device
        )
        self.layers = [self._read_layer(reader, index) for index in range(config.num_layers)]
        self.norm = self._read_norm(reader, "model.norm")  # [E]
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        self.head = PackedLinear(self._read(reader, head))  # [E] -> [V]
        self.embedding = reader.get_mapped("model.embed_tokens.weight").to(device)  # [V, E]
        reader.release()

    def forward(self, batch: RowBatch, keys_values: Sequence[Tensor]) -> Tensor:
        """Return final hidden states [B * N, E]; each layer's `keys_values` [B, 2 * G, S, D] takes the rows' own."""
        eps = self.config.norm_eps
        hidden = self.inputs(batch)  # [B * N, E]
        rope = self._rope(batch.positions, batch.last_position)  # [B * N, 2, D]
        for layer, layer_keys_values in zip(self.layers, keys_values, strict=True):
            normed = rms_norm(hidden, layer.attention_norm, eps)  # [B * N, E]
            mixed = self._attention(layer, normed, rope, batch, layer_keys_values)  # [B * N, H * D]
            hidden = layer.map("output", mixed, batch, hidden)  # [B * N, E]
            gated = self._gated(layer, rms_norm(hidden, layer.mlp_norm, eps), batch)  # [B * N, F]
            hidden = layer.map("down", gated, batch, hidden)  # [B * N, E]
        return rms_norm(hidden, self.norm, eps)

    def adapt(self, adapters: Mapping[int, LayerAdapters]) -> None:
        """Give layers, by their numbers, adapters for the rows that batches name."""
        self.layers = [replace(layer, adapters=adapters.get(index)) for index, layer in enumerate(self.layers)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [M, V] of final hidden states [M, E]."""
        return self.head(hidden)

    def reserve_positions(self, num_positions: int) -> None:
        """Compute the angles of so many positions now, so that no pass has to: compiled ones cannot."""
        self._rope.reserve(num_positions)

    @property
    def num_bytes(self) -> int:
        """Bytes of resident weights; of the mapped embedding only a few rows are."""
        return self.norm.nbytes + self.head.num_bytes + sum(num_weight_bytes(layer) for layer in self.layers)

    def embed(self, batch: RowBatch) -> Tensor:
        """Return the input embeddings of the rows, [B * N, E]."""
        if batch.embeddings is not None:
            return batch.embeddings.reshape(-1, self.config.hidden_size)  # [B * N, E]
        return self.embedding[batch.token_ids.view(-1)].to(self.dtype)  # [B * N, E]

    def inputs(self, batch: RowBatch) -> Tensor:
        """Return what the first layer reads, [B * N, E]."""
        return self.embed(batch)

    def _attention(
        self, layer: LlamaLayer, hidden: Tensor, rope: Tensor, batch: RowBatch, keys_values: Tensor
    ) -> Tensor:
        """Return the mixed values [B * N, H * D], before the output projection."""
        config = self.config
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        heads = layer.map("qkv", hidden, batch).view(hidden.shape[0], -1, config.head_dim)  # [B * N, H + 2 * G, D]
        rotated = heads[:, :num_rotated]  # [B * N, H + G, D]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = rms_norm(rotated[:, :num_heads], layer.query_norm, config.norm_eps)
            keys = rms_norm(rotated[:, num_heads:], layer.key_norm, config.norm_eps)
            rotated = torch.cat((queries, keys), 1)  # [B * N, H + G, D]
        rotated = rotate(rotated, rope)
        write_rows(keys_values, batch, torch.cat((rotated[:, num_heads:], heads[:, num_rotated:]), 1))
        queries = rotated[:, :num_heads]  # [B * N, H, D]
        return attend_layer(queries, keys_values, batch, is_sliding=layer.is_sliding, scale=config.attention_scale)

    def _gated(self, layer: LlamaLayer, hidden: Tensor, batch: RowBatch) -> Tensor:
        """Return the gated values [B * N, F], before the down projection."""
        gate, up = layer.map("gate_up", hidden, batch).chunk(2, -1)  # [B * N, F] each
        return self._activation(gate).mul_(up)

    def _read(self, reader: WeightReader, name: str) -> Tensor:
        return reader.get(name).to(self.device, self.dtype)

    def _read_norm(self, reader: WeightReader, name: str) -> Tensor:
        return self._read(reader, name + ".weight").clone()  # [E], not a view that keeps the file mapped

    def _read_fused(self, reader: WeightReader, *names: str) -> PackedLinear:
        """Return one layer that does what those of these names do, its outputs one after the other."""
        weight = torch.cat([self._read(reader, name + ".weight") for name in names])
        if not reader.has(names[0] + ".bias"):
            return PackedLinear(weight)
        return PackedLinear(weight, torch.cat([self._read(reader, name + ".bias") for name in names]))

    def _read_layer(self, reader: WeightReader, index: int) -> LlamaLayer:
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        has_norms = self.config.has_qk_norm
        layer = LlamaLayer(
            attention_norm=self._read_norm(reader, f"model.layers.{index}.input_layernorm"),
            qkv=self._read_fused(reader, attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            query_norm=self._read_norm(reader, attention + "q_norm") if has_norms else None,
            key_norm=self._read_norm(reader, attention + "k_norm") if has_norms else None,
            output=self._read_fused(reader, attention + "o_proj"),
            mlp_norm=self._read_norm(reader, f"model.layers.{index}.{self.mlp_norm_name}"),
            gate_up=self._read_fused(reader, mlp + "gate_proj", mlp + "up_proj"),
            down=self._read_fused(reader, mlp + "down_proj"),
            is_sliding=self.config.layer_types[index] == SLIDING,
        )
        reader.release()
        return layer


def linear_shapes(config: ModelConfig) -> dict[LinearName, tuple[int, int]]:
    """Return [out, in] of a layer's linear layers."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return {
        "qkv": (heads, config.hidden_size),
        "output": (config.hidden_size, config.num_heads * config.head_dim),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes that tell whether weights and configuration belong together."""
    width, head_dim = config.hidden_size, config.head_dim
    return {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.layers.0.self_attn.q_proj.weight": (config.num_heads * head_dim, width),
        "model.layers.0.self_attn.k_proj.weight": (config.num_kv_heads * head_dim, width),
        "model.layers.0.mlp.up_proj.weight": (config.intermediate_size, width),
    }
