"""Which rows a step buys, and when it stops asking a drafter."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.hardware.budget import DraftGate, buy

ACCEPTANCE = st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda rest: [1.0, *sorted(rest, reverse=True)])
STEPS = st.lists(st.tuples(st.integers(1, 8), st.floats(0.0, 1.0)), min_size=1, max_size=8)


def staircase(steps: list[tuple[int, float]], start_s: float = 1.0) -> list[float]:
    """Return T(1), T(2), …: flat over each step's rows, then higher by what the step says."""
    seconds, curve = start_s, []
    for width, rise in steps:
        curve += [seconds] * width
        seconds += rise
    return curve


def logs(acceptance: list[float]) -> list[float]:
    return [math.log(value) if value else -math.inf for value in acceptance]


@given(ACCEPTANCE, STEPS, st.floats(0.0, 0.5), st.integers(1, 6))
def test_buys_the_best_count_of_all(
    acceptance: list[float], steps: list[tuple[int, float]], draft_s: float, num_certain: int
) -> None:
    curve = staircase(steps)
    num_certain = min(num_certain, len(acceptance), len(curve))
    acceptance[:num_certain] = [1.0] * num_certain
    value = {
        size: sum(acceptance[:size]) / (draft_s + curve[size - 1])
        for size in range(num_certain, min(len(acceptance), len(curve)) + 1)
    }
    purchase = buy(logs(acceptance), curve, draft_s, num_certain)
    assert purchase.num_nodes in value
    assert value[purchase.num_nodes] == pytest.approx(max(value.values()), rel=1e-9)
    assert purchase.tokens_per_s == pytest.approx(max(value.values()), rel=1e-9)
    assert purchase.plain_tokens_per_s == pytest.approx(num_certain / curve[num_certain - 1])


def test_looks_past_the_first_dip() -> None:
    """Tiles of 16 rows, arXiv:2606.01813's setting: the first decline comes long before the best count."""
    acceptance = [1.0, *(0.9 * 0.97**rank for rank in range(47))]
    curve = staircase([(16, 0.9), (16, 4.0), (16, 0.0)], start_s=10.0)
    assert buy(logs(acceptance), curve, 0.0).num_nodes == 32
    assert sum(acceptance[:17]) / curve[16] < sum(acceptance[:16]) / curve[15]


def test_buys_nothing_that_does_not_pay() -> None:
    assert buy(logs([1.0, 0.05, 0.01]), [1.0, 1.2, 1.4], 0.0).num_nodes == 1


def test_what_is_free_is_bought() -> None:
    assert buy(logs([1.0, 0.05, 0.01]), [1.0, 1.0, 1.0], 0.0).num_nodes == 3


def test_of_equals_the_fewest_rows() -> None:
    assert buy([0.0, -math.inf, -math.inf], [1.0, 1.0, 1.0], 0.0).num_nodes == 1


def test_certain_rows_ride_in_any_case() -> None:
    assert buy(logs([1.0, 1.0, 1.0, 0.01]), [1.0, 5.0, 9.0, 20.0], 0.0, 3).num_nodes == 3


def test_a_tree_longer_than_the_curve() -> None:
    assert buy(logs([1.0] * 9), [1.0, 1.0, 1.0], 0.0).num_nodes == 3


def test_time_spent_on_the_draft_makes_more_rows_worth_while() -> None:
    acceptance, curve = logs([1.0, 0.3]), [1.0, 1.4]
    assert [buy(acceptance, curve, draft_s).num_nodes for draft_s in (0.0, 1.0)] == [1, 2]


# The gate


def simulate(gate: DraftGate, num_steps: int, extra: float, num_tokens: int = 1) -> tuple[float, int]:
    """Return the mean cost of a step in plain passes, and how many steps drafted."""
    cost, num_drafted = 0.0, 0
    for _ in range(num_steps):
        if gate.is_open():
            num_drafted += 1
            gate.record(num_tokens, 1.0 + extra, 1.0)
            cost += extra
    return 1.0 + cost / num_steps, num_drafted


@pytest.mark.parametrize("extra", [0.01, 0.05, 0.1, 0.2, 0.4, 0.6])
def test_a_useless_drafter_costs_at_most_3_percent(extra: float) -> None:
    cost, num_drafted = simulate(DraftGate(), 256, extra)
    assert cost <= 1.03
    assert num_drafted >= 3  # it is asked again now and then


def test_a_drafter_that_pays_is_asked_every_step() -> None:
    assert simulate(DraftGate(), 100, 0.3, num_tokens=2)[1] == 100


def test_recovers_when_drafts_start_to_hit() -> None:
    gate = DraftGate()
    simulate(gate, 256, 0.3)
    assert simulate(gate, 200, 0.3, num_tokens=3)[1] >= 200 - gate.max_pause


def test_a_miss_now_and_then_does_not_close_it() -> None:
    gate = DraftGate()
    for step in range(200):
        assert gate.is_open()
        gate.record(4 if step % 4 == 0 else 1, 1.2, 1.0)


def test_a_step_that_pays_for_the_next_is_booked_with_it() -> None:
    """Prompt tokens cost a step before their guesses bring anything: a closed gate must let both through."""
    gate = DraftGate()
    is_helpful, has_guesses = False, False
    num_drafted = [0, 0]
    for step in range(600):
        is_helpful = step >= 300
        is_open = gate.is_open()
        num_drafted[is_helpful] += is_open
        if is_open:
            gate.record(3 if has_guesses and is_helpful else 1, 1.3, 1.0, is_for_next=not has_guesses)
        has_guesses = is_open and not has_guesses
    assert num_drafted[0] <= 30
    assert num_drafted[1] >= 300 - gate.max_pause


def test_steps_that_only_ever_pay_for_the_next_close_it() -> None:
    gate = DraftGate()
    for _ in range(10):
        if gate.is_open():
            gate.record(1, 1.5, 1.0, is_for_next=True)
    assert not gate.is_open()
