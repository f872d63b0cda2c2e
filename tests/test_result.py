"""Ratios of raw counters, and what they are before there is anything to divide by."""

from __future__ import annotations

import pytest

from foretell.result import DraftWork, Stats


def test_ratios_before_the_first_token() -> None:
    stats = Stats()
    assert (stats.draft_passes_per_token, stats.e2, stats.bytes_per_token, stats.draft_share) == (0.0, 1.0, 0.0, 0.0)


def test_draft_work_is_copied_whole() -> None:
    stats = Stats(num_output_tokens=20, target_bytes=3000)
    stats.take_draft_work(DraftWork(num_passes=8, num_rows=40, num_confirmed=6, num_staged_passes=5, num_bytes=1000))
    assert (stats.num_draft_passes, stats.num_draft_rows, stats.num_confirmed) == (8, 40, 6)
    assert (stats.num_staged_passes, stats.draft_bytes) == (5, 1000)
    assert stats.draft_passes_per_token == pytest.approx(0.4)
    assert stats.e2 == pytest.approx(1.75)
    assert stats.bytes_per_token == pytest.approx(200.0)


def test_draft_share_leaves_the_prompt_out() -> None:
    stats = Stats(prefill_s=2.0, first_token_s=3.0, decode_s=4.0, draft_s=2.0)
    assert stats.draft_share == pytest.approx(2.0 / 5.0)
