"""GPT-2: learned positions, LayerNorm, biases everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models.config import ModelConfig
from foretell.models.decoder import RowBatch, attend_layer, write_rows
from foretell.models.layers import ACTIVATIONS, PackedLinear, num_weight_bytes
from foretell.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Weights of a LayerNorm."""

    weight: Tensor  # [E]
    bias: Tensor  # [E]
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """Normalise rows [M, E]."""
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class GPT2Layer:
    """Weights of one layer."""

    attention_norm: LayerNorm
    qkv: PackedLinear  # [E] -> [3 * H * D]
    output: PackedLinear  # [H * D] -> [E]
    mlp_norm: LayerNorm
    up: PackedLinear  # [E] -> [F]
    down: PackedLinear  # [F] -> [E]


class GPT2:
    """A GPT-2 decoder.

    Args:
        config: the model's dimensions.
        reader: where the weights come from; each layer is packed and released before the next is read.
        dtype: bfloat16 or float32 (float64 in tests).
        device: where the weights go.

    Raises:
        ModelError: a weight is missing or has another shape.
    """

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        reader.expect(_shapes(config))
        self._activation = ACTIVATIONS[config.hidden_act]
        self.layers = [self._read_layer(reader, f"transformer.h.{index}.") for index in range(config.num_layers)]
        self.norm = self._read_norm(reader, "transformer.ln_f")
        head = "transformer.wte.weight" if config.tie_embeddings else "lm_head.weight"
        self.head = PackedLinear(self._read(reader, head))  # [E] -> [V]
        self.embedding = reader.get_mapped("transformer.wte.weight").to(device)  # [V, E]
        self.positions = self._read(reader, "transformer.wpe.weight").clone()  # [P, E]
        reader.release()

    def forward(self, batch: RowBatch, keys_values: Sequence[Tensor]) -> Tensor:
        """Return final hidden states [B * N, E]; each layer's `keys_values` [B, 2 * G, S, D] takes the rows' own."""
        hidden = self.embed(batch) + self.positions[batch.positions.view(-1)]  # [B * N, E]
        for layer, layer_keys_values in zip(self.layers, keys_values, strict=True):
            mixed = self._attention(layer, layer.attention_norm(hidden), batch, layer_keys_values)  # [B * N, H * D]
            hidden = layer.output(mixed, hidden)  # [B * N, E]
            hidden = layer.down(self._activation(layer.up(layer.mlp_norm(hidden))), hidden)  # [B * N, E]
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [M, V] of final hidden states [M, E]."""
        return self.head(hidden)

    def reserve_positions(self, num_positions: int) -> None:
        """Do nothing: learned positions are all there."""

    @property
    def num_bytes(self) -> int:
        """Bytes of resident weights; of the mapped embedding only a few rows are."""
        layers = sum(
            num_weight_bytes(part) for layer in self.layers for part in (layer, layer.attention_norm, layer.mlp_norm)
        )
        return layers + num_weight_bytes(self.norm) + self.head.num_bytes + self.positions.nbytes

    def embed(self, batch: RowBatch) -> Tensor:
        """Return the input embeddings of the rows, [B * N, E], without those of their positions."""
        if batch.embeddings is not None:
            return batch.embeddings.reshape(-1, self.config.hidden_size)  # [B * N, E]
        return self.embedding[batch.token_ids.view(-1)].to(self.dtype)  # [B * N, E]

    def _attention(self, layer: GPT2Layer, hidden: Tensor, batch: RowBatch, keys_values: Tensor) -> Tensor:
        config = self.config
        heads = layer.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)  # [B * N, 3 * H, D]
        write_rows(keys_values, batch, heads[:, config.num_heads :])
        queries = heads[:, : config.num_heads]  # [B * N, H, D]
        return attend_layer(queries, keys_values, batch, is_sliding=False, scale=config.attention_scale)

    def _read(self, reader: WeightReader, name: str) -> Tensor:
        return reader.get(name).to(self.device, self.dtype)

    def _read_norm(self, reader: WeightReader, name: str) -> LayerNorm:
        weight, bias = self._read(reader, name + ".weight").clone(), self._read(reader, name + ".bias").clone()
        return LayerNorm(weight, bias, self.config.norm_eps)

    def _read_linear(self, reader: WeightReader, name: str) -> PackedLinear:
        weight = self._read(reader, name + ".weight").t().contiguous()  # [out, in] from [in, out]
        return PackedLinear(weight, self._read(reader, name + ".bias").clone())

    def _read_layer(self, reader: WeightReader, prefix: str) -> GPT2Layer:
        layer = GPT2Layer(
            attention_norm=self._read_norm(reader, prefix + "ln_1"),
            qkv=self._read_linear(reader, prefix + "attn.c_attn"),
            output=self._read_linear(reader, prefix + "attn.c_proj"),
            mlp_norm=self._read_norm(reader, prefix + "ln_2"),
            up=self._read_linear(reader, prefix + "mlp.c_fc"),
            down=self._read_linear(reader, prefix + "mlp.c_proj"),
        )
        reader.release()
        return layer


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes that tell whether weights and configuration belong together."""
    width = config.hidden_size
    return {
        "transformer.wte.weight": (config.vocab_size, width),
        "transformer.wpe.weight": (config.max_positions, width),
        "transformer.h.0.attn.c_attn.weight": (width, 3 * width),
        "transformer.h.0.mlp.c_fc.weight": (width, config.intermediate_size),
    }
