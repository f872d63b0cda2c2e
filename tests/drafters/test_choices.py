"""From a draft's logits to children, best first."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_lab import (
    KEPT,
    begun,
    draft,
    engine,
    paths,
    run_alone,
)
from foretell.drafters.choices import NoiseMemory, filter_scores, rank
from foretell.drafters.drafter import DraftSampling
from foretell.drafters.grow import MAX_PROBABILITY, MIN_PATH_PROBABILITY
from foretell.verify.filters import keep_top_k, keep_top_p
from foretell.verify.noise import gumbel_noise_array


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 1000))
def test_ranks_are_those_of_a_sort(num_rows: int, seed: int) -> None:
    scores = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (num_rows, len(KEPT))).round(1))  # [N, K]
    for row, choices in zip(scores, rank(scores, KEPT), strict=True):
        probs = row.softmax(-1).tolist()
        order = sorted(range(len(KEPT)), key=lambda column: -probs[column])
        expected = [column for column in order if probs[column] >= MIN_PATH_PROBABILITY]
        assert [token_id for _, token_id in choices] == [int(KEPT[column]) for column in expected]
        assert [math.exp(value) for value, _ in choices] == pytest.approx([probs[column] for column in expected])


@pytest.mark.parametrize("num_kept", [14, 1000])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (5, 0.7), (99, 0.9), (1, 0.5)])
def test_filters_leave_what_the_target_would_leave(num_kept: int, top_k: int, top_p: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (4, num_kept)))  # [N, K]
    sampling = DraftSampling(seed=1, sequence_key=0, temperature=0.7, top_k=top_k, top_p=top_p)
    for row, filtered in zip(logits.numpy(), filter_scores(logits, sampling), strict=True):
        scores = (row / 0.7).astype(np.float32)  # [K]
        kept = keep_top_k(scores, top_k) if top_k else np.arange(len(scores))
        kept = kept[keep_top_p(scores[kept], top_p)] if top_p < 1 else kept
        assert np.flatnonzero(np.isfinite(filtered.numpy())).tolist() == kept.tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (5, 0.7)])
def test_the_least_temperatures_leave_the_best_token(top_k: int, top_p: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 30, (4, 300)))  # [N, K]
    for temperature in (1e-38, 5e-324):
        scores = filter_scores(logits, DraftSampling(1, 0, temperature, top_k, top_p))  # [N, K]
        assert scores.softmax(-1).tolist() == torch.nn.functional.one_hot(logits.argmax(-1), 300).tolist()


def test_noise_is_the_targets_own() -> None:
    memory = NoiseMemory(KEPT)
    for key in (0, 1, 0):
        sampling = DraftSampling(seed=7, sequence_key=key, temperature=1.0)
        noise = memory.rows(sampling, [3, 4, 3, *range(200)])  # [N, K]
        assert torch.equal(noise[0], noise[2])
        for row, position in zip(noise[:2], (3, 4), strict=True):
            assert row.numpy() == pytest.approx(gumbel_noise_array(7, key, position, KEPT), abs=1e-5)


def test_sampled_drafts_rank_by_noisy_scores() -> None:
    """Each child's estimate is the softmax of logits over temperature plus the noise of its own position."""
    shared = engine()
    sampling = DraftSampling(seed=3, sequence_key=2, temperature=0.8)
    tree = draft(begun(shared, [1, 2, 3]), 3, sampling=sampling)
    for path, value in paths(tree).items():
        law = run_alone(shared.model, [1, 2, 3, *path], None)[2:-1]  # [D, K]
        expected = 0.0
        for depth, token_id in enumerate(path):
            noisy = law[depth] / 0.8 + torch.from_numpy(gumbel_noise_array(3, 2, 3 + depth, KEPT))  # [K]
            expected += min(float(noisy.log_softmax(-1)[KEPT.tolist().index(token_id)]), math.log(MAX_PROBABILITY))
        assert value == pytest.approx(expected, abs=1e-4)
    assert max(tree.depths()) > 1
