"""Keyed Gumbel noise: a pure function, Gumbel distributed, independent across every part of its key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gumbel_r, kstest

from foretell.verify.noise import _to_gumbel, gumbel_noise, gumbel_noise_array, loud_ids

MASK = 2**64 - 1
KEYS = st.integers(0, 2**63 - 1)


def splitmix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def slow_noise(seed: int, sequence_key: int, position: int, token_id: int) -> float:
    """The definition, in Python's integers."""
    key = 0
    for value in (seed, sequence_key, position):
        key = splitmix((key + (value + 1) * 0x9E3779B97F4A7C15) & MASK)
    bits = splitmix((key + token_id * 0x9E3779B97F4A7C15) & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


@settings(deadline=None)
@given(KEYS, KEYS, st.integers(0, 2**20), st.lists(st.integers(0, 2**40), max_size=8))
def test_agrees_with_its_slow_twin(seed: int, key: int, position: int, token_ids: list[int]) -> None:
    noise = gumbel_noise_array(seed, key, position, np.array(token_ids, dtype=np.int64))
    assert noise == pytest.approx(
        [slow_noise(seed, key, position, token_id) for token_id in token_ids], rel=1e-12, abs=1e-12
    )


def test_a_seed_means_the_same_in_every_version() -> None:
    noise = gumbel_noise_array(42, 1, 100, np.array([0, 1, 49151]))
    assert noise == pytest.approx([-1.0275786009805827, -0.2762857755172231, 1.4123940172176752], rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(KEYS, st.integers(0, 3), st.integers(0, 5000), st.permutations(range(100)), st.integers(0, 100))
def test_depends_on_the_id_alone_not_on_the_company(
    seed: int, key: int, position: int, order: list[int], size: int
) -> None:
    everything = gumbel_noise_array(seed, key, position, np.arange(100))
    subset = np.array(order[:size], dtype=np.int64)
    assert np.array_equal(gumbel_noise_array(seed, key, position, subset), everything[subset])


def test_any_length_and_stride_gives_the_same_bits() -> None:
    everything = gumbel_noise_array(3, 0, 7, np.arange(3000))
    for size in (1, 2, 3, 7, 8, 9, 15, 17, 63, 1001):
        for start in (0, 1, 5, 1998):
            assert np.array_equal(
                gumbel_noise_array(3, 0, 7, np.arange(start, start + size)), everything[start : start + size]
            )
    assert np.array_equal(gumbel_noise_array(3, 0, 7, np.arange(3000)[::-7]), everything[::-7])


def test_tensors_and_arrays_agree() -> None:
    token_ids = torch.tensor([5, 0, 49151])
    noise = gumbel_noise(9, 2, 31, token_ids)
    assert noise.dtype == torch.float64
    assert np.array_equal(noise.numpy(), gumbel_noise_array(9, 2, 31, token_ids.numpy()))
    assert gumbel_noise(9, 2, 31, torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("part", ["seed", "sequence_key", "position", "token_id"])
@pytest.mark.parametrize("start", [0, 10_000_000, 2**62])
def test_is_gumbel_along_every_part_of_the_key(part: str, start: int) -> None:
    span = range(start, start + 3000)
    ids = np.array([11, 12])
    if part == "seed":
        noise = np.array([gumbel_noise_array(value, 0, 5, ids) for value in span])
    elif part == "sequence_key":
        noise = np.array([gumbel_noise_array(0, value, 5, ids) for value in span])
    elif part == "position":
        noise = np.array([gumbel_noise_array(0, 0, value, ids) for value in span])
    else:
        noise = np.stack([gumbel_noise_array(0, 0, position, np.array(span)) for position in (5, 6)], axis=1)
    for column in noise.T:
        assert kstest(column, gumbel_r.cdf).pvalue > 1e-3
        uniform = np.exp(-np.exp(-column))
        # Neighbours in the key, and neighbours one bit apart, share nothing.
        for lag in (1, 2, 64, 1024):
            assert abs(np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]) < 4 / math.sqrt(len(column) - lag)
    uniform = np.exp(-np.exp(-noise))
    assert abs(np.corrcoef(uniform[:, 0], uniform[:, 1])[0, 1]) < 4 / math.sqrt(len(noise))


def test_is_gumbel_over_a_whole_vocabulary() -> None:
    noise = gumbel_noise_array(1, 0, 0, np.arange(262144))
    assert kstest(noise, gumbel_r.cdf).pvalue > 1e-3
    assert np.unique(noise).size > 262000


def test_parts_of_the_key_are_not_interchangeable() -> None:
    ids = np.arange(16)
    keys = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (0, 0, 6), (6, 0, 0), (0, 6, 0), (0, 0, 0), (0, 0, 1)]
    assert len({gumbel_noise_array(*key, ids).tobytes() for key in keys}) == len(keys)


def test_extreme_bits_stay_finite() -> None:
    # With 53 bits and a half the greatest would round to 1, and its noise to infinity.
    noise = _to_gumbel(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert noise == pytest.approx([-3.6042, 36.7368], abs=1e-3)


@pytest.mark.parametrize("num_ids", [1, 100, 2**14, 2**14 + 1, 50_000])
@pytest.mark.parametrize("least", [-1000.0, -4.0, -1.0, 0.0, 2.5, 7.0, 12.0, 36.0, 100.0])
def test_loud_ids_misses_none(num_ids: int, least: float) -> None:
    noise = gumbel_noise_array(8, 1, 77, np.arange(num_ids))
    loud = loud_ids(8, 1, 77, num_ids, least)
    assert set(np.flatnonzero(noise >= least)) <= set(loud)
    assert (noise[loud] >= least - 1e-6).all()
    assert loud.dtype == np.int64
