"""The draft model as it is trained: every depth of a draft at once, in one pass over a text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.models.config import ModelConfig
from foretell.models.draft import DraftKind
from foretell.models.layers import ACTIVATIONS, rope_table, rotate


class DraftModule(nn.Module):
    """A draft's body with gradients; the same function as `foretell.models.draft.DraftModel`, proven by a test.

    Rows come in streams of T. Stream 0 holds the tokens that the target has emitted: kind `feature` knows the target's
    state before each of them. Stream d > 0 holds the tokens d levels below the last emitted one, whose state is not
    known: its row t sees stream 0 up to t - d, and of each stream e in 1 … d the row t - d + e, its own path. Kind `lm`
    has no states to miss, so it has stream 0 alone.

    Args:
        config: of the body.
        kind: what the draft reads.

    Source: training on the draft's own depths as in EAGLE-3, arXiv:2503.01840 §3.2, but without its recurrence.
    """

    def __init__(self, config: ModelConfig, kind: DraftKind) -> None:
        super().__init__()
        self.config, self.kind = config, kind
        width = config.hidden_size
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.num_layers)])
        self.norm = nn.Parameter(torch.ones(width))  # [E]
        if kind == "feature":
            self.fuse = nn.Linear(2 * width, width, bias=False)
            self.no_feature = nn.Parameter(torch.zeros(width))  # [E]

    def forward(self, embeddings: Tensor, features: Tensor | None, num_streams: int) -> Tensor:
        """Return the final hidden states of every stream, [B, D, T, E].

        Args:
            embeddings: the target's embeddings of the tokens, [B, T, E].
            features: the target's final hidden states before each token, [B, T, E], zeros where not known; None for
                kind `lm`.
            num_streams: D, at least 1; 1 for kind `lm`.
        """
        batch_size, num_tokens, width = embeddings.shape
        hidden = self._inputs(embeddings, features, num_streams)  # [B, D * T, E]
        mask = stream_mask(num_tokens, num_streams, self.config.sliding_window)  # [D * T, D * T]
        table = rope_table(num_tokens, self.config.head_dim, self.config.rope_theta or 10_000.0, None)  # [T, 2, D]
        rope = table.repeat(num_streams, 1, 1)  # [D * T, 2, D]
        for layer in self.layers:
            hidden = layer(hidden, rope, mask)
        hidden = F.rms_norm(hidden, (width,), self.norm.to(hidden.dtype), self.config.norm_eps)
        return hidden.view(batch_size, num_streams, num_tokens, width)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by Llama's names, float32."""
        named: dict[str, Tensor] = {"model.norm.weight": self.norm}
        if self.kind == "feature":
            named |= {"fuse.weight": self.fuse.weight, "no_feature": self.no_feature}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            named |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return {name: tensor.detach() for name, tensor in named.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights by Llama's names."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])  # a view of the parameter

    def _inputs(self, embeddings: Tensor, features: Tensor | None, num_streams: int) -> Tensor:
        if self.kind == "lm":
            assert num_streams == 1
            return embeddings
        assert features is not None
        width = embeddings.shape[-1]
        normed = F.rms_norm(embeddings, (width,), None, self.config.norm_eps)  # [B, T, E]
        is_known = features.any(-1, keepdim=True)  # [B, T, 1]
        known = torch.where(is_known, features, self.no_feature.to(features.dtype))  # [B, T, E]
        fused = [self.fuse(torch.cat((normed, known), -1))]  # [B, T, E]
        if num_streams > 1:
            without = self.no_feature.to(features.dtype).expand_as(features)  # [B, T, E]
            fused += [self.fuse(torch.cat((normed, without), -1))] * (num_streams - 1)
        return torch.cat(fused, 1)  # [B, D * T, E]


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.head_dim
        self.attention_norm = nn.Parameter(torch.ones(width))  # [E]
        self.mlp_norm = nn.Parameter(torch.ones(width))  # [E]
        self.queries = nn.Linear(width, config.num_heads * heads, bias=False)
        self.keys = nn.Linear(width, config.num_kv_heads * heads, bias=False)
        self.values = nn.Linear(width, config.num_kv_heads * heads, bias=False)
        self.output = nn.Linear(config.num_heads * heads, width, bias=False)
        self.gate = nn.Linear(width, config.intermediate_size, bias=False)
        self.up = nn.Linear(width, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        """Map [B, M, E] to [B, M, E]; `rope` [M, 2, D], `mask` [M, M]."""
        eps, width = self.config.norm_eps, hidden.shape[-1]
        normed = F.rms_norm(hidden, (width,), self.attention_norm.to(hidden.dtype), eps)  # [B, M, E]
        hidden = hidden + self.output(self._attend(normed, rope, mask))
        normed = F.rms_norm(hidden, (width,), self.mlp_norm.to(hidden.dtype), eps)  # [B, M, E]
        mixed: Tensor = hidden + self.down(self.activation(self.gate(normed)) * self.up(normed))  # [B, M, E]
        return mixed

    def _attend(self, normed: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        config, (batch_size, num_rows, _) = self.config, normed.shape
        shape = (batch_size, num_rows, -1, config.head_dim)
        rope = rope.to(normed.dtype)
        queries = _rotate(self.queries(normed).view(shape), rope)  # [B, H, M, D]
        keys = _rotate(self.keys(normed).view(shape), rope)  # [B, G, M, D]
        values = self.values(normed).view(shape).transpose(1, 2)  # [B, G, M, D]
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)  # [B, H, M, D]
        return mixed.transpose(1, 2).reshape(batch_size, num_rows, -1)  # [B, M, H * D]

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by Llama's names within a layer."""
        linears: dict[str, nn.Linear] = {
            "self_attn.q_proj": self.queries,
            "self_attn.k_proj": self.keys,
            "self_attn.v_proj": self.values,
            "self_attn.o_proj": self.output,
            "mlp.gate_proj": self.gate,
            "mlp.up_proj": self.up,
            "mlp.down_proj": self.down,
        }
        norms: dict[str, Tensor] = {
            "input_layernorm.weight": self.attention_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
        }
        return {**{f"{name}.weight": linear.weight for name, linear in linears.items()}, **norms}


def stream_mask(num_tokens: int, num_streams: int, window: int | None) -> Tensor:
    """Return who sees whom, bool [D * T, D * T], see `DraftModule`."""
    stream = torch.arange(num_streams).repeat_interleave(num_tokens)  # [D * T]
    place = torch.arange(num_tokens).repeat(num_streams)  # [D * T]
    row_stream, column_stream = stream[:, None], stream[None]
    distance = place[:, None] - place[None]  # [D * T, D * T]
    is_emitted = (column_stream == 0) & (distance >= row_stream)
    if window is not None:
        is_emitted &= distance < window
    is_path = (column_stream > 0) & (column_stream <= row_stream) & (distance == row_stream - column_stream)
    # A row that would lie above the text's start sees itself, so that no softmax is empty; nothing is learned there.
    return is_emitted | is_path | torch.eye(len(stream), dtype=torch.bool)


def _rotate(heads: Tensor, rope: Tensor) -> Tensor:
    """Rotate heads [B, M, H, D] and return them as [B, H, M, D]."""
    rotated = [rotate(each, rope) for each in heads.unbind(0)]  # [M, H, D] each
    return torch.stack(rotated).transpose(1, 2)
