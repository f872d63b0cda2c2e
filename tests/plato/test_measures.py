"""Overlap, coverage, validity and intervals against values worked out by hand or by scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foretell.plato.measures import (
    bootstrap_interval,
    is_plan_valid,
    known_mean,
    overlap,
    paragraphs,
    title_coverage,
)
from foretell.plato.plan import MAX_PARTS, Part, Plan
from foretell.plato.reader import PlanReader

TEXTS = st.lists(st.lists(st.sampled_from(["a", "b", "c"]), max_size=8).map(" ".join), max_size=4)


def test_overlap_counts_every_occurrence_in_every_part() -> None:
    # "the cat sat" stands twice in the first part and once in the second: 3 of 4 + 2 trigrams.
    assert overlap(["The cat sat, the cat sat", "the CAT\nsat down"]) == 3 / 6


def test_a_part_that_repeats_itself_does_not_overlap() -> None:
    assert overlap(["one two three one two three", "four five six"]) == 0.0


@pytest.mark.parametrize("parts", [[], ["one two three four"], ["one two three", "one two"], ["", ""]])
def test_no_overlap_is_known_without_trigrams_in_two_parts(parts: list[str]) -> None:
    assert overlap(parts) is None


@given(TEXTS)
def test_overlap_is_a_share_and_does_not_depend_on_the_order(parts: list[str]) -> None:
    value = overlap(parts)
    assert value == overlap(parts[::-1])
    assert value is None or 0.0 <= value <= 1.0


@given(TEXTS)
def test_a_text_that_is_there_twice_overlaps_wholly(parts: list[str]) -> None:
    assert overlap([*parts, *parts]) in (None, 1.0)


def test_paragraphs_are_divided_by_blank_lines() -> None:
    assert paragraphs("\n\none\ntwo\n \nthree\n\n\n") == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("title", "text", "share"),
    [
        ("Types of bicycles", "There is one type: the bicycle.", 1.0),
        ("Size and fit", "It must fit.", 0.5),
        ("The rider's budget", "Riders save.", 0.5),
        ("Budget", "", 0.0),
        ("What is it?", "It is what it is.", None),
    ],
)
def test_coverage_of_titles(title: str, text: str, share: float | None) -> None:
    assert title_coverage(title, text) == share


def test_valid_plans() -> None:
    two = (Part(1, "Causes"), Part(2, "Effects", (1,)))
    assert is_plan_valid(Plan(two))
    assert not is_plan_valid(Plan(two), ["line 2 named part 9"])
    assert not is_plan_valid(Plan(two[:1]))
    reader = PlanReader(is_strict=True)
    reader.push("1. Causes < -\n2. causes < -\n3. Effects < 2\n4. Conclusion < -\nEND\n")
    plan = reader.close()
    assert plan is not None
    assert len(reader.repairs) == 4
    assert is_plan_valid(plan, reader.repairs)
    reader = PlanReader()
    reader.push("1. Causes < -\n2. Effects < 7\nEND\n")
    plan = reader.close()
    assert plan is not None
    assert not is_plan_valid(plan, reader.repairs)
    assert not is_plan_valid(Plan(tuple(Part(number, str(number)) for number in range(1, MAX_PARTS + 2))))


def test_mean_of_what_is_known() -> None:
    assert known_mean([1.0, None, True, 4]) == 2.0
    assert known_mean([None]) is None


def test_intervals_of_means_are_those_of_scipy() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=60)
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    low, high = bootstrap_interval(values.tolist(), num_resamples=10_000)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.05)
    assert bootstrap_interval(values.tolist(), level=0.5) > (low, low)
    assert bootstrap_interval(values.tolist()) == bootstrap_interval(values.tolist())
    assert bootstrap_interval(values.tolist()) != bootstrap_interval(values.tolist(), seed=1)


def test_questions_are_drawn_whole() -> None:
    rows = [[2.0 * size, size] for size in (1.0, 10.0, 100.0)]
    interval = bootstrap_interval(rows, lambda samples: samples.sum(axis=1)[:, 0] / samples.sum(axis=1)[:, 1])
    assert interval == (2.0, 2.0)
