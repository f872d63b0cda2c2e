"""What every lean decoder is: rows in, final hidden states out, keys and values written to their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foretell.models.config import ModelConfig
from foretell.models.layers import attend


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Sequences side by side that attend in one call: B of a batch's, N rows each, padding included."""

    sequences: slice
    """Which of the batch's."""
    bias: Tensor
    """[B, 1, H / G * N, S]."""
    local_bias: Tensor | None
    first_local_slot: int
    rows: Tensor
    """int64 [B * N]: for each row its place among all of the batch; padding has any."""
    kept: Tensor
    """int64 [K]: which of the B * N rows are no padding."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of one pass: N of each of B sequences, padding included.

    Where sequences have unequal numbers of rows, the batch holds the real rows alone, one sequence's after another's,
    as if they were those of one (B = 1), and `runs` and `owners` say whose they are: nothing but attention is padded.
    """

    token_ids: Tensor
    """int64 [B, N]."""
    positions: Tensor
    """int64 [B, N]; a row's distance from the start of its sequence, not its slot."""
    last_position: int
    """None of `positions` is above this; known on the host, so that no device is asked."""
    slots: Tensor
    """int64 [B, N]; where each row's keys and values are written."""
    bias: Tensor | None
    """[B, 1, H / G * N, S] in the model's dtype: 0 where a row sees a slot, -inf elsewhere. None where runs have it."""
    local_bias: Tensor | None = None
    """[B, 1, H / G * N, S - first_local_slot]: the same for sliding layers, None where the model has none."""
    first_local_slot: int = 0
    """First slot that sliding layers read, a multiple of the attention block."""
    embeddings: Tensor | None = None
    """[B, N, E]: input embeddings in place of those of `token_ids`."""
    features: Tensor | None = None
    """[B, N, E]: what a draft model reads beside `token_ids`, see `foretell.models.draft`."""
    adapted: Tensor | None = None
    """int64 [A]: rows, of the B * N, that go through the layers' adapters as well."""
    runs: Sequence[AttentionRun] = ()
    owners: Tensor | None = None
    """int64 [N]: the sequence that each row belongs to, where there are runs."""

    @property
    def num_rows(self) -> int:
        """Rows per sequence, N."""
        return self.token_ids.shape[1]


class Model(Protocol):
    """What the engine needs of a target or a draft model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: RowBatch, keys_values: Sequence[Tensor]) -> Tensor:
        """Return final hidden states [B * N, E]; each layer's `keys_values` [B, 2 * G, S, D] takes the rows' own."""

    def embed(self, batch: RowBatch) -> Tensor:
        """Return the input embeddings of the rows, [B * N, E]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [M, V] of hidden states [M, E]."""

    @property
    def num_bytes(self) -> int:
        """Bytes of resident weights."""


def write_rows(keys_values: Tensor, batch: RowBatch, rows: Tensor) -> None:
    """Write rows [B * N, 2 * G, D] into their slots of one layer's keys and values [B, 2 * G, S, D]."""
    num_sequences, num_rows = batch.slots.shape
    if batch.owners is not None:
        keys_values.transpose(1, 2).index_put_((batch.owners, batch.slots[0]), rows)
        return
    if num_sequences == 1:
        keys_values[0].index_copy_(1, batch.slots[0], rows.transpose(0, 1))
        return
    sequences = torch.arange(num_sequences, device=rows.device)[:, None]  # [B, 1]
    rows = rows.view(num_sequences, num_rows, *rows.shape[1:])  # [B, N, 2 * G, D]
    keys_values.transpose(1, 2).index_put_((sequences, batch.slots), rows)


def attend_layer(queries: Tensor, keys_values: Tensor, batch: RowBatch, *, is_sliding: bool, scale: float) -> Tensor:
    """Attend [B * N, H, D] over one layer's slots [B, 2 * G, S, D]; a sliding layer skips blocks outside its window."""
    if not batch.runs:
        return _attend(queries, keys_values, batch, is_sliding=is_sliding, scale=scale)
    mixed = []
    for run in batch.runs:
        visible = keys_values[run.sequences, :, : run.bias.shape[-1]]  # [B, 2 * G, S, D]
        mixed.append(_attend(queries[run.rows], visible, run, is_sliding=is_sliding, scale=scale)[run.kept])
    return torch.cat(mixed)


def _attend(
    queries: Tensor, keys_values: Tensor, batch: RowBatch | AttentionRun, *, is_sliding: bool, scale: float
) -> Tensor:
    if not is_sliding:
        assert batch.bias is not None
        return attend(queries, keys_values, batch.bias, scale)
    assert batch.local_bias is not None
    return attend(queries, keys_values[:, :, batch.first_local_slot :], batch.local_bias, scale)
