"""Lay sequences' trees out as the rows of one pass: ids, positions, slots and who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretell.cache.kv_cache import BLOCK, Region
from foretell.models.config import ModelConfig
from foretell.models.decoder import AttentionRun, RowBatch

_LAST_BLOCK = (128, 384, 512)
"""Slots that are read of the last block. Masked slots at its end add exact zeros, so that a row has the same bits for
all of these in bfloat16 (0 of 9 million attention outputs differ; 7 in 100,000 do for 256 or 320 slots), and the fewer
are read the better."""

_WORTH_A_RUN = 2
"""Attention runs apart where one call for all would take more than so many times as many rows, each run counting two:
6 sequences of 640 slots take 13 ms at 2 rows each and 37 at 12, one alone 4 ms at 4 rows and 7 at 12."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that one sequence puts into a pass; they are written right after its committed length."""

    region: Region
    token_ids: Sequence[int]
    depths: Sequence[int]
    """A row's position is the region's length plus this; negative where slots before hold a tree, not a text."""
    mask: NDArray[np.bool_]
    """[N, M + N]: row i sees the slot of column j. The last N columns are the rows' own, the first M the slots just
    before; slots before those are seen by every row. M is 0 but for a draft's levels."""
    features: Tensor | None = None
    """[N, E]: what a draft model reads beside the tokens, see `foretell.models.draft`."""
    is_eager: bool = False
    """Take no compiled pass, which holds one sequence."""

    @classmethod
    def chain(cls, region: Region, token_ids: Sequence[int], features: Tensor | None = None) -> Rows:
        """Return rows that follow each other: a prefill chunk."""
        size = len(token_ids)
        return cls(region, token_ids, range(size), np.tril(np.ones((size, size), dtype=np.bool_)), features)


class RowPacker:
    """Builds row batches, reusing one mask buffer per shape.

    Args:
        config: the model's.
        dtype: of the masks, the model's.
        device: where batches go.
        skips_blocks: sliding layers read no block before their window; compiled passes take the whole context.
        slot_grain: read a multiple of so many slots; None takes those that leave a row's bits as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        skips_blocks: bool = True,
        slot_grain: int | None = None,
    ) -> None:
        self._skips_blocks, self._slot_grain = skips_blocks, slot_grain
        self._config, self._dtype, self._device = config, dtype, device
        self._buffers: dict[tuple[int, ...], Tensor] = {}
        self._queries_per_kv = config.num_heads // config.num_kv_heads

    def pack(self, sequences: Sequence[Rows], num_rows: int, num_prefix: int = 0) -> RowBatch:
        """Return the batch of these sequences' rows, each padded to `num_rows`.

        A padding row sees itself alone and is written beyond the real rows, where nothing is committed.

        Args:
            sequences: all of one pool, in the order of their regions.
            num_rows: rows per sequence, N; at least the longest sequence's.
            num_prefix: slots right after each sequence's rows that prompt tokens see, and nobody else.
        """
        token_ids, positions, slots = _grid(sequences, num_rows)  # [B, N] each
        bias, local_bias, first_local_slot = self._biases(sequences, num_rows, num_rows, num_prefix)
        return RowBatch(
            token_ids=torch.from_numpy(token_ids).to(self._device),
            positions=torch.from_numpy(positions).to(self._device),
            last_position=int(positions.max()),
            slots=torch.from_numpy(slots).to(self._device),
            bias=bias,
            local_bias=local_bias,
            first_local_slot=first_local_slot,
            features=_pad_features(sequences, num_rows),
        )

    def pack_ragged(self, sequences: Sequence[Rows], attended: Sequence[int], num_prefix: int = 0) -> RowBatch:
        """Return the batch of these sequences' rows without padding, but for attention.

        Args:
            sequences: as for `pack`.
            attended: rows that each is padded to there.
            num_prefix: as for `pack`; right after as many rows as the most attended have.
        """
        num_rows, sizes = max(attended), [len(rows.token_ids) for rows in sequences]
        is_real = np.arange(num_rows) < np.array(sizes)[:, None]  # [B, N]
        owners, _ = np.nonzero(is_real)
        token_ids, positions, slots = (torch.from_numpy(grid[is_real]) for grid in _grid(sequences, num_rows))
        features = _pad_features(sequences, num_rows)
        return RowBatch(
            token_ids=token_ids[None].to(self._device),
            positions=positions[None].to(self._device),
            last_position=int(positions.max()),
            slots=slots[None].to(self._device),
            bias=None,
            features=None if features is None else features[torch.from_numpy(is_real)][None],
            runs=self._runs(sequences, sizes, attended, num_prefix),
            owners=torch.from_numpy(owners).to(self._device),
        )

    def _runs(
        self, sequences: Sequence[Rows], sizes: Sequence[int], attended: Sequence[int], num_prefix: int
    ) -> list[AttentionRun]:
        """Return runs of sequences side by side that attention pads alike, or a single one."""
        num_rows_of = [(size, len(list(group))) for size, group in groupby(attended)]
        num_padded = sum(size * num_sequences for size, num_sequences in num_rows_of)
        if max(attended) * len(attended) <= _WORTH_A_RUN * (num_padded + 2 * len(num_rows_of)):
            num_rows_of = [(max(attended), len(attended))]
        starts = np.cumsum([0, *sizes])  # place of each sequence's first row
        runs: list[AttentionRun] = []
        first = 0
        for num_rows, num_sequences in num_rows_of:
            last = first + num_sequences
            bias, local_bias, first_local_slot = self._biases(
                sequences[first:last], num_rows, max(attended), num_prefix, number=len(runs)
            )
            is_kept = np.arange(num_rows) < np.array(sizes[first:last])[:, None]  # [B, N]
            places = np.where(is_kept, starts[first:last, None] + np.arange(num_rows), 0)  # [B, N]
            runs.append(
                AttentionRun(
                    slice(first, last),
                    bias,
                    local_bias,
                    first_local_slot,
                    rows=torch.from_numpy(places.ravel()).to(self._device),
                    kept=torch.from_numpy(np.flatnonzero(is_kept)).to(self._device),
                )
            )
            first = last
        return runs

    def _biases(
        self, sequences: Sequence[Rows], num_rows: int, prefix_offset: int, num_prefix: int, number: int = 0
    ) -> tuple[Tensor, Tensor | None, int]:
        """Return who sees what, [B, 1, H/G * N, S], in full and sliding layers, and the latter's first slot."""
        starts = np.array([rows.region.length for rows in sequences], dtype=np.int64)  # [B]
        num_behind = prefix_offset + num_prefix if num_prefix else num_rows
        num_slots = visible_slots(int(starts.max()) + num_behind, self._slot_grain)
        bias = self._bias(sequences, num_rows, num_slots, prefix_offset, num_prefix, number)  # [B, 1, N, S]
        folded = self._fold(bias)  # [B, 1, H/G * N, S]
        window = self._config.sliding_window
        if window is None:
            return folded, None, 0
        _, positions, slots = _grid(sequences, num_rows)  # [B, N] each
        if int(positions.max()) < window:
            return folded, folded, 0  # nothing lies outside the window yet
        first = max(0, int(positions.min()) - window + 1) // BLOCK * BLOCK if self._skips_blocks else 0
        return folded, self._fold(self._local(bias, positions, slots, starts, window)[..., first:]), first

    def _bias(
        self,
        sequences: Sequence[Rows],
        num_rows: int,
        num_slots: int,
        prefix_offset: int,
        num_prefix: int,
        number: int,
    ) -> Tensor:
        key = (len(sequences), num_rows, num_slots, number)  # runs of one pass share no buffer
        if key not in self._buffers:
            if len(self._buffers) > 16:
                self._buffers.clear()
            self._buffers[key] = torch.empty((len(sequences), 1, num_rows, num_slots), dtype=self._dtype)
        bias = self._buffers[key].fill_(-torch.inf)  # [B, 1, N, S]
        for index, rows in enumerate(sequences):
            start, size = rows.region.length, len(rows.token_ids)
            first = start + size - rows.mask.shape[1]  # slot of the mask's first column
            seen = bias[index, 0]  # [N, S]
            seen[:size, :first] = 0
            seen[:size, first : start + size].masked_fill_(torch.from_numpy(rows.mask), 0)
            seen[size:, start + size : start + num_rows].fill_diagonal_(0)
            if num_prefix:
                is_prompt = [token_id >= self._config.vocab_size for token_id in rows.token_ids]
                seen[:size, start + prefix_offset : start + prefix_offset + num_prefix][torch.tensor(is_prompt)] = 0
        return bias

    def _local(
        self,
        bias: Tensor,
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        window: int,
    ) -> Tensor:
        """Return the bias with everything hidden that lies `window` or more positions back."""
        num_sequences, num_slots = len(starts), bias.shape[-1]
        slot_positions = np.broadcast_to(np.arange(num_slots), (num_sequences, num_slots)).copy()  # [B, S]
        np.put_along_axis(slot_positions, slots, positions, axis=1)
        is_outside = positions[:, :, None] - slot_positions[:, None, :] >= window  # [B, N, S]
        return bias.masked_fill(torch.from_numpy(is_outside)[:, None], -torch.inf)

    def _fold(self, bias: Tensor) -> Tensor:
        """Repeat [B, 1, N, S] for the query heads of one key/value head: [B, 1, H / G * N, S]."""
        num_sequences, _, num_rows, num_slots = bias.shape
        folded = bias.expand(num_sequences, self._queries_per_kv, num_rows, num_slots)  # [B, H/G, N, S]
        return folded.reshape(num_sequences, 1, -1, num_slots).to(self._device)


def _grid(sequences: Sequence[Rows], num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return ids, positions and slots of the sequences' rows, int64 [B, N] each; padding has id 0."""
    token_ids = np.zeros((len(sequences), num_rows), dtype=np.int64)
    positions = np.zeros((len(sequences), num_rows), dtype=np.int64)
    starts = np.array([rows.region.length for rows in sequences], dtype=np.int64)[:, None]  # [B, 1]
    for index, rows in enumerate(sequences):
        size = len(rows.token_ids)
        token_ids[index, :size] = rows.token_ids
        positions[index, :size] = rows.depths
    return token_ids, positions + starts, starts + np.arange(num_rows)


def _pad_features(sequences: Sequence[Rows], num_rows: int) -> Tensor | None:
    """Return the rows' features padded with zeros, [B, N, E]; None where the model reads none."""
    features = [rows.features for rows in sequences if rows.features is not None]
    if not features:
        return None
    assert len(features) == len(sequences)
    if len(features) == 1:
        return F.pad(features[0], (0, 0, 0, num_rows - len(features[0])))[None]  # [1, N, E]
    return torch.stack([F.pad(each, (0, 0, 0, num_rows - len(each))) for each in features])  # [B, N, E]


def visible_slots(num_slots: int, grain: int | None = None) -> int:
    """Return how many slots a pass reads when the last of its rows lies in slot `num_slots - 1`.

    A multiple of 128, and few enough of the last block; with `grain` the next multiple of that.
    """
    if grain is not None:
        return -(-num_slots // grain) * grain
    before = (num_slots - 1) // BLOCK * BLOCK
    return before + next(size for size in _LAST_BLOCK if before + size >= num_slots)
