"""Keys and values by sequence: contiguous regions of slots, slot = position.

A pass writes its rows after a region's committed length. Rows of the first chain commit by raising the length;
`commit_rows` copies scattered ones into place. Rows beyond the length are garbage that no mask shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.errors import CapacityError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 512
"""Slots that attention handles at once. Capacities are multiples of it, and so is the first slot that a sliding layer
reads: a row's bits depend on which of its own keys share a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Dimensions of one slot, and how many slots a sequence may have."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_slots: int
    """Most slots of a region: the context, and room for one pass's draft rows."""
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Region:
    """The slots of one sequence."""

    pool: Pool
    index: int
    """Place within the pool; changes when another region is freed."""
    length: int = 0
    """Committed slots: those below it hold the keys and values of the sequence's tokens, in order."""

    @property
    def capacity(self) -> int:
        """Slots of the region."""
        return self.pool.capacity


class Pool:
    """Regions of one capacity, side by side in one tensor [L, R, 2 * G, S, D], keys before values.

    One layer's regions are one batch for attention. Heads are contiguous over slots: attention over interleaved
    heads ([L, R, S, 2 * G, D]) takes 143 µs a layer where this takes 93 (4 rows, 512 slots, SmolLM2).
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.shape, self.capacity = shape, capacity
        self.regions: list[Region] = []
        self.tensor = self._new(1)

    def add(self) -> Region:
        """Return a new region, its slots zeroed or stale but never NaN."""
        if len(self.regions) == self.tensor.shape[1]:
            wider = self._new(2 * len(self.regions))
            wider[:, : len(self.regions)] = self.tensor
            self.tensor = wider
        self.regions.append(Region(self, len(self.regions)))
        return self.regions[-1]

    def remove(self, region: Region) -> None:
        """Free a region; the last one moves into its place, so that regions stay side by side."""
        assert self.regions[region.index : region.index + 1] == [region], "freed twice"
        last = self.regions.pop()
        if last is region:
            return
        self.tensor[:, region.index, :, : last.length] = self.tensor[:, last.index, :, : last.length]
        last.index = region.index
        self.regions[last.index] = last

    def gather(self, regions: list[Region]) -> None:
        """Move these regions side by side, in the order of their indices; others take the places that they leave."""
        ordered = sorted(regions, key=lambda region: region.index)
        if ordered[-1].index - ordered[0].index == len(ordered) - 1:
            return
        places = set(range(len(ordered)))
        free = sorted(places - {region.index for region in ordered})
        for region, place in zip([each for each in ordered if each.index not in places], free, strict=True):
            self._swap(region, self.regions[place])

    def _swap(self, first: Region, second: Region) -> None:
        size = max(first.length, second.length)
        kept = self.tensor[:, first.index, :, :size].clone()  # [L, 2 * G, T, D]
        self.tensor[:, first.index, :, :size] = self.tensor[:, second.index, :, :size]
        self.tensor[:, second.index, :, :size] = kept
        first.index, second.index = second.index, first.index
        self.regions[first.index], self.regions[second.index] = first, second

    def _new(self, num_regions: int) -> Tensor:
        import torch

        shape = self.shape
        # Zeros, because a masked slot still multiplies its value by a probability of 0, and NaN * 0 is NaN.
        return torch.zeros(
            (shape.num_layers, num_regions, 2 * shape.num_kv_heads, self.capacity, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )


class KVCache:
    """Every region of one model, in pools by capacity: 512 slots, then twice as many up to the limit."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._pools: dict[int, Pool] = {}

    def allocate(self, num_slots: int) -> Region:
        """Return an empty region of at least `num_slots`.

        Raises:
            CapacityError: `num_slots` is above the limit.
        """
        return self._pool(num_slots).add()

    def reserve(self, region: Region, num_slots: int) -> None:
        """Make sure that a region has `num_slots`; moves its committed slots to a larger pool where it must.

        Raises:
            CapacityError: `num_slots` is above the limit; the region stays as it was.
        """
        if num_slots > region.capacity:
            self._move(region, self._pool(num_slots))

    def commit(self, region: Region, num_rows: int) -> None:
        """Keep the first `num_rows` rows of the last pass, which are the first chain's: nothing is copied."""
        assert 0 <= num_rows <= region.capacity - region.length
        region.length += num_rows

    def commit_rows(self, region: Region, rows: list[int]) -> None:
        """Keep these rows of the last pass, copied into consecutive slots."""
        import torch

        if rows != list(range(len(rows))):
            slots = torch.tensor(rows, device=self.shape.device) + region.length  # [A]
            kept = region.pool.tensor[:, region.index].index_select(2, slots)  # [L, 2 * G, A, D]
            region.pool.tensor[:, region.index, :, region.length : region.length + len(rows)] = kept
        self.commit(region, len(rows))

    def truncate(self, region: Region, length: int) -> None:
        """Forget committed slots from `length` on."""
        assert 0 <= length <= region.length
        region.length = length

    def wipe(self, region: Region) -> None:
        """Forget all slots and zero them: NaN in one would reach whoever gets the region next, see `Pool`."""
        region.length = 0
        region.pool.tensor[:, region.index].zero_()

    def gather(self, regions: list[Region]) -> None:
        """Move these regions side by side into one pool, that of the largest: one batch for attention.

        Cost: 1 ms a region of 500 slots that has to move (SmolLM2, 23 KB a slot).
        """
        pool = max(regions, key=lambda region: region.capacity).pool
        for region in regions:
            if region.pool is not pool:
                self._move(region, pool)
        pool.gather(regions)

    def fork(self, region: Region, length: int | None = None, num_slots: int | None = None) -> Region:
        """Return a copy of a region.

        Args:
            region: what to copy.
            length: committed slots of the copy, the first ones; None takes all.
            num_slots: capacity of the copy at least, its length or more; None takes the region's.

        Raises:
            CapacityError: `num_slots` is above the limit.
        """
        length = region.length if length is None else length
        assert 0 <= length <= region.length
        pool = region.pool if num_slots is None else self._pool(num_slots)
        copy = pool.add()
        pool.tensor[:, copy.index, :, :length] = region.pool.tensor[:, region.index, :, :length]
        copy.length = length
        return copy

    def free(self, region: Region) -> None:
        """Give a region back; an empty pool's memory too."""
        region.pool.remove(region)
        if not region.pool.regions:
            del self._pools[region.capacity]

    def capacity(self, num_slots: int) -> int:
        """Return the slots of a region of at least `num_slots`, which may be above the limit: then of the largest."""
        capacity = BLOCK
        while capacity < num_slots:
            capacity *= 2
        return min(capacity, -(-self.shape.max_slots // BLOCK) * BLOCK)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.tensor.nbytes for pool in self._pools.values())

    def _pool(self, num_slots: int) -> Pool:
        limit = self.shape.max_slots
        if num_slots > limit:
            raise CapacityError(f"{num_slots} slots are needed, the cache's limit is {limit}: shorten the prompt")
        capacity = self.capacity(num_slots)
        if capacity not in self._pools:
            self._pools[capacity] = Pool(self.shape, capacity)
        return self._pools[capacity]

    def _move(self, region: Region, pool: Pool) -> None:
        moved = pool.add()
        kept = region.pool.tensor[:, region.index, :, : region.length]
        pool.tensor[:, moved.index, :, : region.length] = kept
        self.free(region)
        pool.regions[moved.index] = region
        region.pool, region.index = pool, moved.index
