"""Parts start as soon as they can and never before, and share the tokens of an answer."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.plato.plan import MAX_PARTS, Part
from foretell.plato.schedule import Launch, Schedule
from plan_lab import FakeEngine, plans


def schedule_of(*needs: tuple[int, ...], max_parallel: int = 8, max_tokens: int = 1024, **knobs: bool) -> Schedule:
    schedule = Schedule(max_parallel=max_parallel, max_answer_tokens=max_tokens, **knobs)
    for part_id, each in enumerate(needs, start=1):
        schedule.add(Part(part_id, f"Title {part_id}", each))
    return schedule


def ids(launches: list[Launch]) -> list[int]:
    return [launch.part.id for launch in launches]


def grants(launches: list[Launch]) -> list[int]:
    return [launch.max_new_tokens for launch in launches]


def test_a_part_starts_while_the_plan_is_written() -> None:
    schedule = schedule_of(())
    assert ids(schedule.start()) == [1]
    schedule.add(Part(2, "Title 2", (1,)))
    schedule.add(Part(3, "Title 3"))
    assert ids(schedule.start()) == [3]
    schedule.end(1, 10, "stop")
    assert ids(schedule.start()) == [2]
    assert schedule.running == (2, 3)
    schedule.end(2, 10, "stop")
    schedule.end(3, 10, "stop")
    assert not schedule.is_done
    schedule.end_plan()
    assert schedule.is_done


def test_without_a_pipeline_the_whole_plan_comes_first() -> None:
    schedule = schedule_of((), (), is_pipelined=False)
    assert schedule.start() == []
    schedule.end_plan()
    assert ids(schedule.start()) == [1, 2]


def test_the_longest_chain_comes_first_then_the_smaller_id() -> None:
    schedule = schedule_of((), (), (), (3,), (4,), (2,), max_parallel=2)
    assert ids(schedule.start()) == [3, 2]
    schedule.end(2, 10, "stop")
    assert ids(schedule.start()) == [1]
    schedule.end(3, 10, "stop")
    assert ids(schedule.start()) == [4]


def test_what_comes_next_is_told_until_it_is_taken() -> None:
    schedule = schedule_of((), ())
    first = schedule.next()
    assert first == schedule.next()
    assert first is not None
    schedule.take(first)
    second = schedule.next()
    assert second is not None
    assert (first.part.id, second.part.id) == (1, 2)
    assert schedule.running == (1,)


def test_what_none_will_go_on_from_is_not_awaited() -> None:
    schedule = schedule_of((), (), (1,))
    schedule.start()
    schedule.end(1, 10, "stop")
    schedule.end(2, 10, "stop")
    assert all(schedule.is_awaited(part_id) for part_id in (None, 1, 2))  # by parts still to be planned
    schedule.end_plan()
    assert [schedule.is_awaited(part_id) for part_id in (None, 1, 2)] == [False, True, False]
    schedule.start()
    assert not schedule.is_awaited(1)
    through_another = schedule_of((), (1,), (2,), ())
    through_another.end_plan()
    assert all(through_another.is_awaited(part_id) for part_id in (None, 1, 2))
    through_another.expire()
    assert not through_another.is_awaited(1)


def test_a_part_goes_on_from_what_saves_most() -> None:
    schedule = schedule_of((), (), (1,), (2, 3))
    schedule.start()
    schedule.end(1, 30, "stop")
    assert [(launch.needs_all, launch.primary) for launch in schedule.start()] == [((1,), 1)]
    schedule.end(2, 39, "stop")
    schedule.end(3, 10, "stop")
    assert [(launch.needs_all, launch.primary) for launch in schedule.start()] == [((1, 2, 3), 3)]
    equal = schedule_of((), (), (1, 2))
    equal.start()
    equal.end(2, 10, "stop")
    equal.end(1, 10, "stop")
    assert [launch.primary for launch in equal.start()] == [1]


def test_a_part_that_failed_holds_up_nobody() -> None:
    schedule = schedule_of((), (), (1,), (2, 3))
    schedule.start()
    schedule.end(1, 0, "failed")
    assert [(launch.needs_all, launch.lost, launch.primary) for launch in schedule.start()] == [((), (1,), None)]
    schedule.end(3, 5, "stop")
    schedule.end(2, 50, "failed")
    assert [(launch.needs_all, launch.lost, launch.primary) for launch in schedule.start()] == [((3,), (1, 2), 3)]


def test_parts_share_what_is_left() -> None:
    whole = schedule_of((), (), (), (1, 2, 3), max_tokens=400)
    whole.end_plan()
    assert grants(whole.start()) == [100, 100, 100]
    for part_id in (1, 2, 3):
        whole.end(part_id, 50, "stop")
    assert grants(whole.start()) == [100]  # 250 are left, an equal share is 100


def test_while_the_plan_is_written_it_may_have_many_parts() -> None:
    schedule = schedule_of((), (), max_tokens=800)
    assert grants(schedule.start()) == [100, 100]
    assert schedule.extend(1) == 0  # an eighth is all, as long as there may be eight
    schedule.add(Part(3, "Title 3"))
    schedule.end_plan()
    assert grants(schedule.start()) == [266]
    assert [schedule.extend(1), schedule.extend(2)] == [166, 166]
    schedule.end(3, 14, "stop")
    assert [schedule.extend(1), schedule.extend(2)] == [0, 0]


def test_a_part_may_take_more_than_its_share_where_nothing_can_be_added_later() -> None:
    schedule = Schedule(max_parallel=8, max_answer_tokens=800, max_share=2)
    schedule.add(Part(1, "Alone"))
    assert [*grants(schedule.start()), schedule.extend(1)] == [100, 700 // 8]
    assert schedule.extend(1) == 200 - 100 - 700 // 8
    schedule.end_plan()
    assert schedule.extend(1) == 600


@pytest.mark.parametrize(
    ("max_tokens", "given"), [(1, [1]), (7, [7]), (8, [1] * 8), (100, [16] + [12] * 7), (400, [50] * 8)]
)
def test_few_tokens_are_shared_too(max_tokens: int, given: list[int]) -> None:
    schedule = schedule_of(*[()] * 8, max_tokens=max_tokens)
    assert grants(schedule.start()) == given
    for part_id in schedule.running:
        schedule.end(part_id, 9999, "length")  # counts as what it was given
    schedule.end_plan()
    assert schedule.start() == []
    assert schedule.is_done
    assert schedule.waiting == tuple(range(1 + len(given), 9))


def test_a_floor_is_kept_for_every_part() -> None:
    schedule = schedule_of((), *[(1,)] * 7, max_tokens=8 * 48)
    schedule.end_plan()
    assert grants(schedule.start()) == [48]
    schedule.end(1, 0, "stop")
    assert grants(schedule.start()) == [48] * 7


def test_after_a_deadline_nothing_starts_and_what_runs_may_end() -> None:
    schedule = schedule_of((), (), (1,), max_parallel=1)
    schedule.start()
    schedule.expire()
    assert not schedule.is_done
    assert schedule.extend(1) == 0
    schedule.end(1, 10, "stop")
    assert schedule.start() == []
    assert schedule.is_done
    assert schedule.waiting == (2, 3)


def test_cancelling_stops_all() -> None:
    schedule = schedule_of((), (), (1,))
    schedule.start()
    assert schedule.cancel() == (1, 2)
    assert schedule.is_done
    assert schedule.running == ()
    schedule.end(1, 10, "stop")  # it was on its way
    assert schedule.start() == []


engines = st.builds(
    FakeEngine,
    plans(),
    st.integers().map(Random),
    max_parallel=st.integers(1, MAX_PARTS),
    max_tokens=st.one_of(st.integers(1, 100), st.integers(100, 800)),
    is_pipelined=st.booleans(),
)


@given(engines, st.sampled_from([0.0, 0.05]))
def test_all_parts_are_written_in_any_order_of_events(engine: FakeEngine, chance_to_fail: float) -> None:
    engine.run(chance_to_fail=chance_to_fail)
    num_tokens = sum(map(len, engine.texts.values()))
    assert num_tokens <= engine.max_tokens
    assert len(engine.ended) == len(engine.parts) or num_tokens == engine.max_tokens
    for part_id in engine.schedule.waiting:
        engine.output += engine.assembly.end(part_id)
    assert engine.output == engine.assembly.text
    assert engine.output == "\n\n".join(text.strip() for _, text in sorted(engine.texts.items()) if text.strip())


@given(engines)
def test_a_deadline_leaves_a_beginning(engine: FakeEngine) -> None:
    engine.run(chance_to_expire=0.02)
    assert engine.schedule.running == ()
    assert engine.ended == set(engine.texts)
    written = [text.strip() for _, text in sorted(engine.texts.items()) if text.strip()]
    assert "\n\n".join(written).startswith(engine.output)


@given(engines, st.integers(0, 60))
def test_cancelling_at_any_time_leaves_nothing_running(engine: FakeEngine, num_events: int) -> None:
    for _ in range(num_events):
        engine.start()
        if engine.running:
            engine.write(engine.random.choice(sorted(engine.running)))
        if engine.plan_text and engine.random.random() < 0.5:
            engine.plan()
    engine.start()
    assert engine.schedule.cancel() == tuple(sorted(engine.running))
    assert engine.schedule.running == ()
    assert engine.schedule.is_done
    assert engine.schedule.start() == []
