"""Calibration: what is learned, from which nodes, and that nothing else of a tree changes."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.drafters.calibration import Calibration
from foretell.tree.shape import best_first
from foretell.tree.token_tree import TokenTree


def fan(probabilities: list[float], source: str = "a") -> TokenTree:
    """Return a root with children 0, 1, … of these probabilities."""
    tree = TokenTree.root(99)
    for token_id, probability in enumerate(probabilities):
        tree.add(0, token_id, math.log(probability), source)
    return tree


def chances(calibration: Calibration, tree: TokenTree) -> list[float]:
    return [math.exp(value) for value in calibration.calibrate(tree).log_accept]


@st.composite
def trees(draw: Any) -> TokenTree:
    tree = TokenTree.root(7)
    for _ in range(draw(st.integers(0, 16))):
        parent, token_id = draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 3))
        if token_id not in tree.children()[parent]:
            step = math.log(draw(st.sampled_from([1.0, 0.99, 0.5, 0.04, 1e-6])))
            tree.add(parent, token_id, tree.log_accept[parent] + step, draw(st.sampled_from("ab")))
    return tree


def test_without_observations_the_drafter_is_believed() -> None:
    tree = fan([0.6, 0.3, 0.01])
    assert Calibration().calibrate(tree).log_accept == pytest.approx(tree.log_accept)


@pytest.mark.parametrize(("truth", "claim"), [(0.2, 0.9), (0.95, 0.3), (0.5, 0.5)])
def test_estimates_approach_what_happens(truth: float, claim: float) -> None:
    calibration, draw = Calibration(), random.Random(0)
    for _ in range(2000):
        calibration.update(fan([claim]), [0 if draw.random() < truth else 5])
    assert chances(calibration, fan([claim]))[1] == pytest.approx(truth, abs=0.06)


def test_few_observations_hardly_move_the_estimate() -> None:
    calibration = Calibration()
    calibration.update(fan([0.9]), [5])
    assert 0.8 < chances(calibration, fan([0.9]))[1] < 0.9


def test_old_observations_fade() -> None:
    calibration = Calibration()
    for token_id in [5] * 3000 + [0] * 3000:
        calibration.update(fan([0.4]), [token_id])
    assert chances(calibration, fan([0.4]))[1] > 0.95


def test_ranks_and_sources_and_confidences_are_apart() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.update(fan([0.5, 0.4]), [1])
    first, second = chances(calibration, fan([0.5, 0.4]))[1:]
    assert first < 0.1
    assert second > 0.9
    assert chances(calibration, fan([0.5], source="b"))[1] == pytest.approx(0.5)
    assert chances(calibration, fan([0.97]))[1] == pytest.approx(0.97)


def test_only_reached_nodes_are_judged() -> None:
    """A child is tested iff its parent was accepted."""
    tree = fan([0.5, 0.4])
    reached = tree.add(1, 8, tree.log_accept[1] + math.log(0.5), "b")
    tree.add(2, 8, tree.log_accept[2] + math.log(0.5), "c")
    tree.add(reached, 8, tree.log_accept[reached] + math.log(0.5), "d")
    calibration = Calibration()
    calibration.update(tree, [0, 7])
    counts = calibration.to_json()["sources"]
    assert set(counts) == {"a", "b"}
    assert sorted(counts["a"].values()) == [[1.0, 0.0], [1.0, 1.0]]
    assert list(counts["b"].values()) == [[1.0, 0.0]]


def test_nodes_that_were_not_bought_are_judged_too() -> None:
    """The text after the root decides, so a plain step says whether its drafts would have come true."""
    calibration = Calibration()
    calibration.update(fan([0.5, 0.4]), [1])
    assert sum(right for _, right in calibration.to_json()["sources"]["a"].values()) == 1.0


@given(trees(), st.lists(st.tuples(trees(), st.lists(st.integers(0, 3), max_size=5)), max_size=5))
def test_a_calibrated_tree_is_the_same_tree(tree: TokenTree, history: list[tuple[TokenTree, list[int]]]) -> None:
    calibration = Calibration()
    for observed, token_ids in history:
        before = copy.deepcopy(observed)
        calibration.update(observed, token_ids)
        assert observed == before
    before = copy.deepcopy(tree)
    calibrated = calibration.calibrate(tree)
    assert tree == before
    assert (calibrated.token_ids, calibrated.parents, calibrated.sources) == (
        tree.token_ids,
        tree.parents,
        tree.sources,
    )
    assert calibrated.log_accept[0] == 0.0
    for node in range(1, len(tree)):
        assert calibrated.log_accept[node] <= calibrated.log_accept[tree.parents[node]]
        assert math.isfinite(calibrated.log_accept[node])
    order = best_first(calibrated)
    assert all(order.index(tree.parents[node]) < order.index(node) for node in range(1, len(tree)))


@given(st.lists(st.tuples(trees(), st.lists(st.integers(0, 3), max_size=5)), max_size=8), trees())
def test_json_keeps_the_counts(history: list[tuple[TokenTree, list[int]]], tree: TokenTree) -> None:
    calibration = Calibration()
    for observed, token_ids in history:
        calibration.update(observed, token_ids)
    document = json.loads(json.dumps(calibration.to_json()))
    copied = Calibration.from_json(document)
    assert copied.to_json() == document
    assert copied.calibrate(tree).log_accept == pytest.approx(calibration.calibrate(tree).log_accept, abs=1e-3)


def test_counts_of_other_buckets_are_dropped() -> None:
    calibration = Calibration()
    calibration.update(fan([0.5]), [0])
    assert Calibration.from_json({}).to_json()["sources"] == {}
    assert Calibration.from_json(calibration.to_json() | {"num_buckets": 3}).to_json()["sources"] == {}


def test_sampled_text_is_counted_apart() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.update(fan([0.5]), [0])
        calibration.update(fan([0.5]), [5], is_sampled=True)
    greedy = chances(calibration, fan([0.5]))[1]
    sampled = math.exp(calibration.calibrate(fan([0.5]), is_sampled=True).log_accept[1])
    assert greedy > 0.9
    assert sampled < 0.1
    document = json.loads(json.dumps(calibration.to_json()))
    assert math.exp(Calibration.from_json(document).calibrate(fan([0.5]), is_sampled=True).log_accept[1]) < 0.1
