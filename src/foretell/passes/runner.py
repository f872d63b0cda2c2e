"""Run the target over rows: which padding, which slots, eager or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foretell.cache.kv_cache import CacheShape, KVCache
from foretell.models.config import SLIDING
from foretell.models.decoder import Model, RowBatch
from foretell.models.layers import MIN_ROWS, padded_rows
from foretell.passes.rows import RowPacker, Rows

MAX_ROWS = 64
"""Most rows of one sequence in a decode pass; the cache keeps room for them beyond the context."""


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass computed for the rows of each of its sequences; padding may follow."""

    hidden: Sequence[Tensor]
    """[N, E] each: final hidden states."""
    logits: Sequence[Tensor]
    """[N, V] each."""


class CompiledPass(Protocol):
    """A pass compiled for fixed numbers of rows."""

    num_bytes: int
    """Bytes kept on disk, about what they add to memory."""

    @property
    def buckets(self) -> Sequence[int]:
        """Compiled row counts, ascending."""

    def num_rows(self, num_rows: int) -> int | None:
        """Return the smallest compiled bucket that holds `num_rows`, None where there is none."""

    def __call__(self, batch: RowBatch, region: Tensor) -> PassOutput:
        """Run a batch of one sequence whose rows fill a bucket; `region` is all of its slots, [L, 1, 2 * G, C, D]."""


class Runner:
    """The target, its cache, and how a pass is run.

    Args:
        model: the target.
        context_tokens: positions that a sequence may have.
        compiled: passes compiled for a few row counts; without them every pass is eager.
        slot_grain: see `RowPacker`; for passes whose bits need not equal another pass's. What exceeds the compiled row
            counts then runs eagerly.
    """

    def __init__(
        self,
        model: Model,
        context_tokens: int,
        compiled: CompiledPass | None = None,
        *,
        slot_grain: int | None = None,
    ) -> None:
        self.model, self.context_tokens, self.compiled = model, context_tokens, compiled
        config = model.config
        self.cache = KVCache(
            CacheShape(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_slots=context_tokens + MAX_ROWS,
                dtype=model.dtype,
                device=model.device,
            )
        )
        self.prompt_embeddings: Tensor | None = None
        """[P, E]: what stands in rows whose ids lie beyond the vocabulary, in the order of those ids."""
        self.prompt_prefix: Tensor | None = None
        """[L, 2 * G, P, D]: keys and values that such rows see and no others."""
        self.adapts_prompts = False
        """Whether such rows go through the model's adapters."""
        self._packer = RowPacker(
            config, model.dtype, model.device, skips_blocks=compiled is None, slot_grain=slot_grain
        )
        self._may_mix = slot_grain is not None  # eager and compiled passes have different bits
        self._queries_per_kv = config.num_heads // config.num_kv_heads
        self.weight_bytes = model.num_bytes  # added up once: that takes 0.1 ms

    def visible_bytes(self, num_slots: int) -> int:
        """Return the bytes of so many committed slots that a pass sees; in sliding layers they are the window's."""
        shape, config = self.cache.shape, self.model.config
        num_local = config.layer_types.count(SLIDING)
        num_local_slots = num_slots if config.sliding_window is None else min(num_slots, config.sliding_window - 1)
        layer_bytes = shape.slot_bytes // shape.num_layers
        return layer_bytes * ((shape.num_layers - num_local) * num_slots + num_local * num_local_slots)

    def padded(self, num_rows: int, num_sequences: int = 1, *, is_eager: bool = False) -> int:
        """Return how many rows per sequence a decode pass of `num_rows` really computes."""
        if self.compiled is not None and not is_eager:
            bucket = self.compiled.num_rows(num_rows)
            if bucket is not None:
                return bucket
            assert self._may_mix, "the budget stays within the compiled buckets"
        model = self.model
        return padded_rows(num_rows, num_sequences, self._queries_per_kv, model.dtype, model.device)

    @torch.inference_mode()
    def decode(self, sequences: Sequence[Rows]) -> PassOutput:
        """Run one pass over the rows of sequences whose regions lie side by side in one pool.

        A compiled pass takes one sequence. Slots for the padded rows must be reserved.
        """
        is_eager = any(rows.is_eager for rows in sequences)
        num_rows = self.padded(max(len(rows.token_ids) for rows in sequences), len(sequences), is_eager=is_eager)
        regions = _regions(sequences)  # [L, B, 2 * G, C, D]
        num_prefix = self._put_prefix(sequences, num_rows, regions)
        if self._is_ragged(sequences, num_rows):
            return self._decode_ragged(sequences, num_prefix, regions)
        batch = self._embed_prompts(self._packer.pack(sequences, num_rows, num_prefix))
        if self.compiled is not None and not is_eager and self.compiled.num_rows(num_rows) == num_rows:
            return self.compiled(batch, regions)
        return self._output(batch, regions, [num_rows] * len(sequences))

    @torch.inference_mode()
    def prefill(self, rows: Rows) -> Tensor:
        """Write a chunk's keys and values and commit them; returns its hidden states [N, E], no logits are computed."""
        size = len(rows.token_ids)
        hidden = self._forward(self._packer.pack([rows], size), _regions([rows]))  # [N, E]
        self.cache.commit(rows.region, size)
        return hidden

    def _is_ragged(self, sequences: Sequence[Rows], num_rows: int) -> bool:
        """Return whether padding all sequences to `num_rows` would compute rows in vain."""
        sizes = [len(rows.token_ids) for rows in sequences]
        may_be = len(sizes) > 1 and sum(sizes) >= MIN_ROWS and not getattr(self.model, "needs_grid", False)
        return may_be and min(sizes) < num_rows

    def _decode_ragged(self, sequences: Sequence[Rows], num_prefix: int, regions: Tensor) -> PassOutput:
        model, sizes = self.model, [len(rows.token_ids) for rows in sequences]
        attended = [padded_rows(size, MIN_ROWS, self._queries_per_kv, model.dtype, model.device) for size in sizes]
        return self._output(
            self._embed_prompts(self._packer.pack_ragged(sequences, attended, num_prefix)), regions, sizes
        )

    def _output(self, batch: RowBatch, regions: Tensor, sizes: list[int]) -> PassOutput:
        hidden = self._forward(batch, regions)  # [B * N, E]
        logits = self.model.logits(hidden)  # [B * N, V]
        return PassOutput(hidden.split_with_sizes(sizes), logits.split_with_sizes(sizes))

    def _put_prefix(self, sequences: Sequence[Rows], num_rows: int, regions: Tensor) -> int:
        """Put the prefix of prompt tokens into the slots right after the rows; returns how many slots it takes."""
        vocab_size, prefix = self.model.config.vocab_size, self.prompt_prefix
        if prefix is None or all(max(rows.token_ids) < vocab_size for rows in sequences):
            return 0
        size = prefix.shape[2]
        for index, rows in enumerate(sequences):
            start = rows.region.length + num_rows
            regions[:, index, :, start : start + size] = prefix
        return size

    def _embed_prompts(self, batch: RowBatch) -> RowBatch:
        """Return the batch with embeddings in place of ids where prompt tokens are among them."""
        vocab_size = self.model.config.vocab_size
        is_prompt = batch.token_ids >= vocab_size  # [B, N]
        if self.prompt_embeddings is None or not is_prompt.any():
            return batch
        known = replace(batch, token_ids=batch.token_ids.masked_fill(is_prompt, 0))
        embeddings = self.model.embed(known).view(*batch.token_ids.shape, -1)  # [B, N, E]
        embeddings[is_prompt] = self.prompt_embeddings[batch.token_ids[is_prompt] - vocab_size]
        adapted = is_prompt.view(-1).nonzero()[:, 0] if self.adapts_prompts else None  # [A]
        return replace(known, embeddings=embeddings, adapted=adapted)

    def _forward(self, batch: RowBatch, regions: Tensor) -> Tensor:
        num_slots = None if batch.bias is None else batch.bias.shape[-1]
        return self.model.forward(batch, regions[:, :, :, :num_slots].unbind(0))  # [B, 2 * G, S, D] each


def describe_compiled(compiled: CompiledPass) -> str:
    """Return what compiled passes are there, in words."""
    rows = ", ".join(str(bucket) for bucket in compiled.buckets)
    return f"passes of {rows} rows, {compiled.num_bytes / 1e6:.0f} MB on disk and about as much memory"


def _regions(sequences: Sequence[Rows]) -> Tensor:
    """Return the keys and values of sequences that lie side by side, [L, B, 2 * G, C, D]."""
    pool = sequences[0].region.pool
    first = sequences[0].region.index
    assert all(rows.region.pool is pool for rows in sequences)
    assert [rows.region.index for rows in sequences] == list(range(first, first + len(sequences)))
    return pool.tensor[:, first : first + len(sequences)]
