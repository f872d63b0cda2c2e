"""Regions of slots: what is kept where, and what moves when."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretell.cache.kv_cache import BLOCK, CacheShape, KVCache, Region
from foretell.errors import CapacityError


def shape(max_slots: int = 4 * BLOCK) -> CacheShape:
    return CacheShape(
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        max_slots=max_slots,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def slots_of(region: Region) -> Tensor:
    """Return a region's slots [L, 2 * G, S, D]."""
    return region.pool.tensor[:, region.index]


def write(region: Region, values: list[float]) -> None:
    """Write rows after the committed length, as a pass does."""
    rows = torch.tensor(values)[None, None, :, None].expand(2, 2, -1, 2)  # [L, 2 * G, N, D]
    slots_of(region)[:, :, region.length : region.length + len(values)] = rows


def committed(region: Region) -> list[float]:
    """Return the values of the committed slots, which all layers and heads share."""
    kept = slots_of(region)[:, :, : region.length]  # [L, 2 * G, T, D]
    assert bool((kept == kept[:1, :1, :, :1]).all())
    values: list[float] = kept[0, 0, :, 0].tolist()
    return values


def filled(cache: KVCache, values: list[float], num_slots: int = 1) -> Region:
    region = cache.allocate(max(num_slots, len(values)))
    write(region, values)
    cache.commit(region, len(values))
    return region


def test_commit_keeps_the_first_rows_and_nothing_moves() -> None:
    cache = KVCache(shape())
    region = cache.allocate(10)
    write(region, [1, 2, 3, 4])
    before = slots_of(region).clone()
    cache.commit(region, 2)
    assert committed(region) == [1, 2]
    assert torch.equal(slots_of(region), before)
    write(region, [5])
    cache.commit(region, 1)
    assert committed(region) == [1, 2, 5]


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, 2], [0, 3, 4], [0, 1, 5], [0, 2, 3, 5], [0, 4]])
def test_commit_rows_copies_scattered_rows_into_place(rows: list[int]) -> None:
    """sglang#15360: accepted rows of a tree lie apart; taken for neighbours, they are gibberish."""
    cache = KVCache(shape())
    region = filled(cache, [9, 9, 9])
    write(region, [10, 11, 12, 13, 14, 15])
    cache.commit_rows(region, rows)
    assert committed(region) == [9, 9, 9, *(10 + row for row in rows)]


def test_commit_rows_leaves_neighbours_alone() -> None:
    cache = KVCache(shape())
    first, second, third = (filled(cache, [value] * 4) for value in (1, 2, 3))
    write(second, [10, 11, 12])
    cache.commit_rows(second, [0, 2])
    assert (committed(first), committed(second), committed(third)) == ([1] * 4, [2, 2, 2, 2, 10, 12], [3] * 4)


def test_truncate_forgets_the_end() -> None:
    cache = KVCache(shape())
    region = filled(cache, [1, 2, 3])
    cache.truncate(region, 1)
    write(region, [7])
    cache.commit(region, 1)
    assert committed(region) == [1, 7]


def test_fork_is_a_copy() -> None:
    cache = KVCache(shape())
    region = filled(cache, [1, 2, 3])
    fork = cache.fork(region)
    assert (committed(fork), fork.capacity) == ([1, 2, 3], region.capacity)
    for each, value in ((region, 4), (fork, 5)):
        write(each, [value])
        cache.commit(each, 1)
    assert (committed(region), committed(fork)) == ([1, 2, 3, 4], [1, 2, 3, 5])


def test_forks_survive_the_growth_of_their_pool() -> None:
    cache = KVCache(shape())
    region = filled(cache, [1, 2, 3])
    forks = [cache.fork(region) for _ in range(9)]
    assert all(committed(fork) == [1, 2, 3] for fork in [region, *forks])


@pytest.mark.parametrize("num_slots", [BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_reserve_moves_committed_slots_to_a_larger_pool(num_slots: int) -> None:
    cache = KVCache(shape())
    region, other = filled(cache, [1, 2, 3]), filled(cache, [4, 5])
    cache.reserve(region, num_slots)
    assert region.capacity == (2 * BLOCK if num_slots <= 2 * BLOCK else 4 * BLOCK)
    assert (committed(region), committed(other)) == ([1, 2, 3], [4, 5])
    assert (other.capacity, other.index) == (BLOCK, 0)


def test_reserve_within_the_capacity_does_nothing() -> None:
    cache = KVCache(shape())
    region = filled(cache, [1, 2, 3])
    pool = region.pool
    cache.reserve(region, BLOCK)
    assert region.pool is pool


def test_capacities_are_blocks_twice_as_many_each_up_to_the_limit() -> None:
    cache = KVCache(shape(max_slots=3 * BLOCK - 7))
    capacities = {num_slots: cache.allocate(num_slots).capacity for num_slots in (1, BLOCK, BLOCK + 1, 2 * BLOCK + 1)}
    assert capacities == {1: BLOCK, BLOCK: BLOCK, BLOCK + 1: 2 * BLOCK, 2 * BLOCK + 1: 3 * BLOCK}


def test_free_moves_the_last_region_into_the_gap() -> None:
    """Regions stay side by side, so that one attention call serves them all."""
    cache = KVCache(shape())
    regions = [filled(cache, [value, value]) for value in range(5)]
    cache.free(regions[1])
    kept = [regions[place] for place in (0, 4, 2, 3)]
    assert [region.index for region in kept] == [0, 1, 2, 3]
    assert [committed(region) for region in kept] == [[0, 0], [4, 4], [2, 2], [3, 3]]
    cache.free(regions[3])
    assert [(region.index, committed(region)) for region in kept[:3]] == [(0, [0, 0]), (1, [4, 4]), (2, [2, 2])]


def test_an_empty_pool_gives_its_memory_back() -> None:
    """sglang#13826: what was allocated is freed in full, so a long-lived engine does not grow."""
    cache = KVCache(shape())
    for _ in range(3):
        regions = [filled(cache, [1, 2]), filled(cache, [3], num_slots=2 * BLOCK)]
        regions.append(cache.fork(regions[0]))
        cache.reserve(regions[0], BLOCK + 1)
        assert cache.num_bytes > 0
        for region in regions:
            cache.free(region)
        assert cache.num_bytes == 0


def test_a_region_is_freed_once() -> None:
    """Freed twice, a region would take another's slots with it."""
    cache = KVCache(shape())
    region, other = filled(cache, [1, 2]), filled(cache, [3])
    cache.free(region)
    with pytest.raises(AssertionError):
        cache.free(region)
    assert committed(other) == [3]


def test_the_capacity_error_names_the_limit_and_changes_nothing() -> None:
    cache = KVCache(shape(max_slots=BLOCK + 64))
    region = filled(cache, [1, 2, 3])
    with pytest.raises(CapacityError, match=r"577 slots are needed, the cache's limit is 576"):
        cache.reserve(region, BLOCK + 65)
    with pytest.raises(CapacityError, match=r"limit is 576"):
        cache.allocate(BLOCK + 65)
    assert committed(region) == [1, 2, 3]
    assert cache.num_bytes == shape().slot_bytes * BLOCK


def test_slots_of_a_new_region_hold_numbers() -> None:
    """A hidden slot still multiplies its value by 0, and NaN times 0 is NaN."""
    cache = KVCache(shape())
    regions = [cache.allocate(1) for _ in range(5)]
    cache.reserve(regions[2], BLOCK + 1)
    assert all(bool(slots_of(region).isfinite().all()) for region in regions)


def test_wipe_leaves_nothing_to_the_next_owner() -> None:
    cache = KVCache(shape())
    other, region = filled(cache, [4, 5]), filled(cache, [1, float("nan"), 3])
    write(region, [float("nan")])
    cache.wipe(region)
    assert region.length == 0
    cache.free(region)
    assert bool((slots_of(cache.allocate(1)) == 0).all())
    assert committed(other) == [4, 5]


def test_num_bytes_counts_every_pool() -> None:
    cache = KVCache(shape())
    cache.allocate(1)
    cache.allocate(BLOCK + 1)
    assert cache.num_bytes == shape().slot_bytes * 3 * BLOCK


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "fork", "gather", "free", "grow", "commit", "rows", "cut"]), st.randoms())
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_any_sequence_of_verbs_keeps_every_regions_slots(operations: list[tuple[str, random.Random]]) -> None:
    cache, kept = KVCache(shape()), {}  # type: KVCache, dict[Region, list[float]]
    for verb, draw in operations:
        if verb == "add" or not kept:
            kept[cache.allocate(draw.choice([1, BLOCK, BLOCK + 1]))] = []
            continue
        region = draw.choice(sorted(kept, key=lambda each: (each.capacity, each.index)))
        values = kept[region]
        if verb == "fork":
            size = draw.choice([None, draw.randint(0, len(values))])
            kept[cache.fork(region, size)] = values[:size]
        elif verb == "gather":
            chosen_regions = [each for each in kept if each is region or draw.random() < 0.5]
            cache.gather(chosen_regions)
            indices = sorted(each.index for each in chosen_regions)
            assert indices == list(range(indices[0], indices[0] + len(indices)))
            assert len({each.capacity for each in chosen_regions}) == 1
        elif verb == "free":
            cache.free(region)
            del kept[region]
        elif verb == "grow":
            cache.reserve(region, draw.choice([1, 2 * BLOCK, 3 * BLOCK]))
        elif verb == "cut":
            del values[draw.randint(0, len(values)) :]
            cache.truncate(region, len(values))
        else:
            rows = [float(draw.randrange(100)) for _ in range(draw.randint(1, 8))]
            chosen = (
                list(range(len(rows))) if verb == "commit" else sorted(draw.sample(range(len(rows)), len(rows) // 2))
            )
            write(region, rows)
            cache.commit_rows(region, chosen)
            values.extend(rows[row] for row in chosen)
    assert {region: committed(region) for region in kept} == kept
    places = [(region.capacity, region.index) for region in kept]
    assert len(set(places)) == len(places)
    for capacity in {region.capacity for region in kept}:
        used = sorted(index for each, index in places if each == capacity)
        assert used == list(range(len(used)))
