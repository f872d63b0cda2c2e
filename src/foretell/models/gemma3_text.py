"""Gemma 3, text only: four norms a layer, scaled embeddings, most layers sliding with a rotation of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.config import ModelConfig
from foretell.models.decoder import RowBatch
from foretell.models.layers import RopeAngles, num_weight_bytes, rms_norm
from foretell.models.llama import Llama
from foretell.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class OutputNorms:
    """Norms of what a layer's two parts add to the hidden states."""

    attention: Tensor  # [E]
    mlp: Tensor  # [E]


class Gemma3(Llama):
    """A Gemma 3 decoder.

    Raises:
        ModelError: a weight is missing, or the configuration caps attention scores.
    """

    mlp_norm_name: ClassVar = "pre_feedforward_layernorm"

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        if config.attention_softcap is not None:
            raise ModelError("`attn_logit_softcapping` in config.json is not supported in Gemma 3: use another model")
        super().__init__(config, reader, dtype, device)
        assert config.local_rope_theta is not None
        self._local_rope = RopeAngles(
            config.head_dim, config.local_rope_theta, None, config.max_positions, dtype, device
        )
        self.output_norms = [self._read_output_norms(reader, index) for index in range(config.num_layers)]
        # transformers multiplies by the scale as the weights' dtype has it.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        reader.release()

    def forward(self, batch: RowBatch, keys_values: Sequence[Tensor]) -> Tensor:
        """Return final hidden states [B * N, E]; each layer's `keys_values` [B, 2 * G, S, D] takes the rows' own."""
        eps = self.config.norm_eps
        hidden = self.embed(batch)  # [B * N, E]
        full = self._rope(batch.positions, batch.last_position)  # [B * N, 2, D]
        local = self._local_rope(batch.positions, batch.last_position)  # [B * N, 2, D]
        for layer, norms, layer_keys_values in zip(self.layers, self.output_norms, keys_values, strict=True):
            rope = local if layer.is_sliding else full
            normed = rms_norm(hidden, layer.attention_norm, eps)  # [B * N, E]
            attended = self._attention(layer, normed, rope, batch, layer_keys_values)  # [B * N, H * D]
            mixed = layer.map("output", attended, batch)  # [B * N, E]
            hidden = hidden + rms_norm(mixed, norms.attention, eps)
            gated = self._gated(layer, rms_norm(hidden, layer.mlp_norm, eps), batch)  # [B * N, F]
            mapped = layer.map("down", gated, batch)  # [B * N, E]
            hidden = hidden + rms_norm(mapped, norms.mlp, eps)
        return rms_norm(hidden, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [M, V] of final hidden states [M, E]."""
        logits, cap = super().logits(hidden), self.config.final_logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def reserve_positions(self, num_positions: int) -> None:
        """Compute the angles of so many positions now, full and local."""
        super().reserve_positions(num_positions)
        self._local_rope.reserve(num_positions)

    @property
    def num_bytes(self) -> int:
        """Bytes of resident weights; of the mapped embedding only a few rows are."""
        return super().num_bytes + sum(num_weight_bytes(norms) for norms in self.output_norms)

    def embed(self, batch: RowBatch) -> Tensor:
        """Return the scaled input embeddings of the rows, [B * N, E]."""
        hidden = super().embed(batch)  # [B * N, E]
        return hidden if batch.embeddings is not None else hidden * self._embedding_scale

    def _read_norm(self, reader: WeightReader, name: str) -> Tensor:
        # Weights are saved minus 1, and bfloat16 would round the sum.
        return 1 + self._read(reader, name + ".weight").to(torch.promote_types(self.dtype, torch.float32))  # [E]

    def _read_output_norms(self, reader: WeightReader, index: int) -> OutputNorms:
        prefix = f"model.layers.{index}."
        return OutputNorms(
            attention=self._read_norm(reader, prefix + "post_attention_layernorm"),
            mlp=self._read_norm(reader, prefix + "post_feedforward_layernorm"),
        )
