"""Planned answers on our own engine: every branch says what plain decoding says, in any company, and gives all back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
import torch

from foretell.errors import CapacityError, ConfigError, InputError
from foretell.llm import LLM
from foretell.params import SamplingParams
from foretell.plato import embedded
from foretell.plato.events import (
    Answer,
    AnswerText,
    Event,
    FellBack,
    Finished,
    PartEnded,
    PartPlanned,
    PartStarted,
    PartText,
    PlanEnded,
    Routed,
    last_answer,
)
from foretell.plato.options import PlatoOptions
from foretell.plato.plan import Part
from foretell.plato.prompts import PlanPrompts
from foretell.plato.router import Router, route_by_rule
from foretell.plato.titles import DistinctTitles
from tiny import save_model

pytest.importorskip("llguidance")

QUESTION = "Which tools does a gardener need?"
OPTIONS = PlatoOptions(force_plan=True, max_answer_tokens=160, max_parts=4, drafter="none")
TITLE = "[a-z]{3,8}"
GRAMMAR = f"1\\. {TITLE} < -\n2\\. {TITLE} < (-|1)\n3\\. {TITLE} < (-|1|2|1,2)\nEND\n"
"""Short enough for tokens that are bytes."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        folder = save_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096, initializer_range=0.6)
        yield LLM(folder, dtype="float32", threads=1)
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "plan_grammar", lambda *args, **options: GRAMMAR)


@pytest.fixture(autouse=True)
def everything_comes_back(llm: LLM) -> Iterator[None]:
    yield
    llm.prefixes.close()
    assert llm.engine.runner.cache.num_bytes == 0


def answers(llm: LLM, **fields: Any) -> Answer:
    return llm.plan_and_generate(QUESTION, replace(OPTIONS, **fields))


@pytest.mark.parametrize("drafter", ["none", "suffix", "all"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("max_rows", [None, 1, 5])
def test_a_branch_says_what_plain_decoding_says(
    llm: LLM, drafter: str, seed: int | None, max_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, start = [], llm.start

    def noted(*args: Any, **options: Any) -> Any:
        jobs.append((start(*args, **options), args[1], options.get("sample", 0)))
        return jobs[-1][0]

    monkeypatch.setattr(llm, "start", noted)
    answers(llm, drafter=drafter, seed=seed, temperature=0.0 if seed is None else 0.8, max_rows=max_rows)
    monkeypatch.undo()
    assert len(jobs) > 2
    for job, sampling, sample in jobs[1:]:
        request = job.sequence.request
        alone = llm.start(
            request.prompt_ids, replace(sampling, max_new_tokens=request.max_new_tokens), drafter="none", sample=sample
        )
        while not alone.sequence.is_finished:
            llm.step([alone])
        assert alone.sequence.token_ids == job.sequence.token_ids
        llm.finish(alone)


def test_events_tell_the_whole_answer_in_order(llm: LLM) -> None:
    events = list(llm.stream_plan(QUESTION, OPTIONS))
    assert isinstance(events[0], Routed)
    assert isinstance(events[-1], Finished)
    answer = events[-1].answer
    assert answer.text == "".join(event.text for event in events if isinstance(event, AnswerText))
    assert answer.plan is not None
    assert [event.part for event in events if isinstance(event, PartPlanned)] == list(answer.plan)
    for part in answer.plan:
        result = answer.parts[part.id - 1]
        assert result.text == "".join(
            event.text for event in events if isinstance(event, PartText) and event.part_id == part.id
        )
        assert place(events, PartPlanned, part.id) < place(events, PartStarted, part.id)
        assert place(events, PartStarted, part.id) < place(events, PartEnded, part.id)
        for need in part.needs:
            assert place(events, PartEnded, need) < place(events, PartStarted, part.id)
    assert sum(result.num_tokens for result in answer.parts) == answer.num_answer_tokens <= OPTIONS.max_answer_tokens
    assert 0 < answer.first_text_s < answer.total_s
    assert answer.critical_path[-1] == max(answer.parts, key=lambda result: result.ended_s).part.id


def place(events: list[Event], kind: type, part_id: int) -> int:
    """Return where an event of this kind tells of a part."""
    return next(
        at
        for at, event in enumerate(events)
        if isinstance(event, kind) and (event.part.id if isinstance(event, PartPlanned) else event.part_id) == part_id
    )


def test_a_part_begins_while_the_plan_is_written_or_waits_for_its_end(llm: LLM) -> None:
    def first_start(**fields: Any) -> int:
        events = list(llm.stream_plan(QUESTION, replace(OPTIONS, **fields)))
        end = next(at for at, event in enumerate(events) if isinstance(event, PlanEnded))
        return next(at for at, event in enumerate(events) if isinstance(event, PartStarted)) - end

    assert first_start() < 0
    assert first_start(is_pipelined=False) > 0
    assert first_start(visibility="full") > 0
    assert first_start(mode="sot") > 0


def test_what_is_reused_changes_nothing_but_the_work(llm: LLM) -> None:
    first, again, alone = answers(llm), answers(llm), answers(llm, is_reusing=False)
    assert first.text == again.text == alone.text
    assert alone.num_reused == 0
    for answer in (first, again):
        assert answer.num_computed + answer.num_reused == alone.num_computed
    assert again.num_computed < first.num_computed < alone.num_computed / 2
    assert again.num_reused - first.num_reused >= 100  # rules and examples


@pytest.mark.parametrize("num_events", [1, 3, 8, 20])
def test_closing_gives_everything_back_at_once(llm: LLM, num_events: int) -> None:
    events = llm.stream_plan(QUESTION, OPTIONS)
    assert len(list(islice(events, num_events))) == num_events
    events.close()  # type: ignore[attr-defined]


@pytest.fixture
def started(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Jobs in the order of their starts."""
    jobs, start = [], llm.start

    def noted(*args: Any, **options: Any) -> Any:
        jobs.append(start(*args, **options))
        return jobs[-1]

    monkeypatch.setattr(llm, "start", noted)
    return jobs


def test_a_part_that_needs_others_goes_on_from_one_and_quotes_the_rest(
    llm: LLM, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = "1\\. Soil < -\n2\\. Plants < -\n3\\. Harvest < 1,2\nEND\n"
    monkeypatch.setattr(embedded, "plan_grammar", lambda *args, **options: plan)
    answer = answers(llm)
    assert [result.part.needs for result in answer.parts] == [(), (), (1, 2)]
    last = list(started[3].sequence.request.prompt_ids)
    assert llm.tokenizer.decode(last[-16:]).endswith("**Harvest**\n\n")
    extended = [job.sequence.token_ids[:-1] == last[: len(job.sequence.token_ids) - 1] for job in started[1:3]]
    assert sum(extended) == 1
    (quoted,) = [part for part, is_parent in zip(answer.parts[:2], extended, strict=True) if not is_parent]
    quote = llm.tokenizer.encode(f"**{quoted.part.title}**\n\n{quoted.text.strip()}\n\n")
    assert any(last[at : at + len(quote)] == quote for at in range(len(last)))
    assert answer.plan is not None
    assert (answer.plan.width, answer.plan.depth) == (2, 2)
    assert answer.critical_path in ((1, 3), (2, 3))


def test_a_deadline_starts_no_more_parts(llm: LLM) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    options = replace(OPTIONS, max_parallel=1, deadline_s=60.0)
    answer = last_answer(embedded.answer(llm, QUESTION, options, clock=clock))
    assert answer.plan is not None
    assert 1 <= len(answer.parts) < len(answer.plan)
    assert answer.text


def test_a_plan_without_parts_is_answered_directly(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "plan_grammar", lambda *args, **options: "END\n")
    answer = answers(llm)
    (plain,) = llm.generate(
        llm.tokenizer.encode_chat([{"role": "user", "content": QUESTION}]), SamplingParams(max_new_tokens=160)
    )
    assert answer.is_direct
    assert answer.text == plain.text


def test_sequential_is_plain_decoding(llm: LLM) -> None:
    answer = answers(llm, mode="sequential")
    assert answer.is_direct
    assert answer.plan is None
    assert answer.text == llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_new_tokens=160)).text


def test_a_skeletons_points_see_no_other(llm: LLM, started: list[Any]) -> None:
    answer = answers(llm, mode="sot")
    assert answer.plan is not None
    assert all(part.needs == () for part in answer.plan)
    prompts = [llm.tokenizer.decode(list(job.sequence.request.prompt_ids)) for job in started[1:]]
    assert not any(result.text in prompt for result in answer.parts for prompt in prompts if result.text)
    assert any(result.num_reused for result in answer.parts)  # of question and skeleton


@pytest.mark.parametrize(
    ("question", "is_direct"),
    [
        ("What is 12 * 9?", True),
        ("Write a Python function that sorts a list.", True),
        ("Answer in JSON: name three rivers.", True),
        ("Translate this into French: good morning.", True),
        ("Implement a search algorithm.", True),
        ("How do I plan a garden?", None),
        ("Write a letter to a computer science program.", None),
    ],
)
def test_what_never_gains_is_answered_directly(question: str, is_direct: bool | None) -> None:
    route = route_by_rule(question, PlatoOptions())
    assert (None if route is None else route.is_direct) == is_direct
    assert route_by_rule(question, PlatoOptions(max_answer_tokens=10)).is_direct  # type: ignore[union-attr]
    forced = route_by_rule(question, PlatoOptions(force_plan=True, max_answer_tokens=10))
    assert forced is not None
    assert not forced.is_direct


@pytest.mark.parametrize(("direct", "plan"), [(3.0, 1.0), (1.0, 3.0)])
def test_the_router_keeps_the_likelier_beginning(llm: LLM, direct: float, plan: float) -> None:
    router = Router(llm.tokenizer, 5)
    direct_id = llm.tokenizer.encode("D", add_special_tokens=False)[0]
    plan_id = llm.tokenizer.encode("1", add_special_tokens=False)[0]
    scores = torch.zeros(1, llm.config.vocab_size)
    scores[0, direct_id], scores[0, plan_id] = direct, plan
    kept = router(torch.zeros(1, 5, dtype=torch.int64), scores)
    assert kept[0, [direct_id, plan_id]].isinf().tolist() == [direct < plan, direct > plan]
    route = router.route()
    assert route.is_direct == (direct > plan)
    assert route.direct_probability == pytest.approx(float(torch.tensor([direct, plan]).softmax(0)[0]))
    assert router(torch.zeros(1, 6, dtype=torch.int64), scores) is scores


def test_no_title_begins_like_an_earlier_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = DistinctTitles(llm.tokenizer, 3)
    prompt = [7, 8, 9]
    scores = torch.zeros(1, llm.config.vocab_size)

    def forbidden(text: str) -> str:
        ids = torch.tensor([[*prompt, *llm.tokenizer.encode(text, add_special_tokens=False)]])
        return llm.tokenizer.decode(titles(ids, scores)[0].isinf().nonzero()[:, 0].tolist())

    assert forbidden("1. ") == ""
    assert forbidden("1. Air < -\n2.") == "A"  # where a token may hold the blank before the title
    assert forbidden("1. Air < -\n2. Sea < 1\n3. ") == "AS"
    assert forbidden("1. Air < -\n2. Se") == ""
    assert not scores.isinf().any()
    monkeypatch.setattr(embedded, "plan_grammar", lambda *_, **__: "1\\. [ab]xy < -\n2\\. [ab]xy < -\nEND\n")
    plan = answers(llm).plan
    assert plan is not None
    assert {part.title for part in plan} == {"axy", "bxy"}


def test_a_row_budget_holds_for_plan_and_parts_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, sizes = llm.engine.runner.decode, []

    def counted(rows: Any) -> Any:
        sizes.append(sum(len(each.token_ids) for each in rows))
        return decode(rows)

    monkeypatch.setattr(llm.engine.runner, "decode", counted)
    answers(llm, drafter="suffix", max_rows=2)
    assert max(sizes) == 2
    with pytest.raises(ConfigError, match="`max_rows` must be at least 1, got 0"):
        PlatoOptions(max_rows=0)


@pytest.mark.parametrize("is_reusing", [True, False])
@pytest.mark.parametrize("mode", ["plato", "sot"])
@pytest.mark.parametrize("max_slots", [2048, 4096, 8192])
def test_a_slot_budget_holds_for_plan_and_parts_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, max_slots: int, mode: Any, is_reusing: bool
) -> None:
    decode, held, num_parallel = llm.engine.runner.decode, [], []

    def counted(rows: Any) -> Any:
        held.append(num_slots(llm))
        num_parallel.append(len(rows))
        return decode(rows)

    free = answers(llm, mode=mode, drafter="suffix")
    shared = num_slots(llm)
    monkeypatch.setattr(llm.engine.runner, "decode", counted)
    tight = answers(llm, mode=mode, drafter="suffix", max_slots=max_slots, is_reusing=is_reusing)
    assert max(held) - shared <= max_slots
    assert (max(num_parallel) > 1) == (mode == "sot" or max_slots > 2048)  # points have short prompts
    assert tight.plan == free.plan
    assert [result.text for result in tight.parts] == [result.text for result in free.parts]


def num_slots(llm: LLM) -> int:
    """Return how many slots are held."""
    return sum(pool.capacity * len(pool.regions) for pool in llm.engine.runner.cache._pools.values())


def test_slots_that_no_part_waits_for_are_given_back_at_once(llm: LLM) -> None:
    events = llm.stream_plan(QUESTION, OPTIONS)
    held = [num_slots(llm) for event in events if isinstance(event, PartEnded | Finished)]
    assert held[-1] == min(held)  # rules and examples, for the next question
    assert max(held) > min(held)


def test_too_few_slots_are_told_before_anything_is_written(llm: LLM) -> None:
    for mode in ("plato", "sequential"):
        with pytest.raises(CapacityError, match="`max_slots` has room for 0: shorten it or give more"):
            answers(llm, mode=mode, max_slots=100)
    answers(llm)
    held = num_slots(llm)
    with pytest.raises(CapacityError, match="`max_slots` has room for 448"):
        answers(llm, max_slots=512)
    assert num_slots(llm) == held
    with pytest.raises(ConfigError, match="`max_slots` must be at least 1, got 0"):
        PlatoOptions(max_slots=0)


def test_a_part_that_does_not_fit_the_context_has_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = PlanPrompts.part

    def long(self: PlanPrompts, part: Part, *args: Any, **options: Any) -> list[int]:
        prompt = ask(self, part, *args, **options)
        return prompt * 400 if part.id in too_long else prompt

    monkeypatch.setattr(PlanPrompts, "part", long)
    monkeypatch.setattr(
        embedded, "plan_grammar", lambda *_, **__: "1\\. Soil < -\n2\\. Plants < -\n3\\. Harvest < 2\nEND\n"
    )
    too_long = {2}
    answer = answers(llm)
    assert [result.reason == "failed" for result in answer.parts] == [False, True, False]
    assert all(result.text in answer.text for result in answer.parts)
    too_long = {1, 2, 3}
    events = list(llm.stream_plan(QUESTION, OPTIONS))
    assert FellBack("no part fits the context") in events
    assert last_answer(events).text == answers(llm, mode="sequential").text


@pytest.mark.parametrize(("max_answer_tokens", "num_parts"), [(512, 4), (160, 3), (100, 2), (10, 2)])
def test_no_more_parts_are_planned_than_can_say_something(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, max_answer_tokens: int, num_parts: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(embedded, "plan_grammar", lambda max_parts, **_: asked.append(max_parts) or GRAMMAR)
    answers(llm, max_answer_tokens=max_answer_tokens)
    assert asked == [num_parts]


def test_no_prompt_ends_a_turn_twice(llm: LLM, started: list[Any]) -> None:
    answers(llm, visibility="full")
    eos_ids = started[0].sequence.request.stop_ids
    for job in started[1:]:
        ids = job.sequence.request.prompt_ids
        assert not any(left == right and left in eos_ids for left, right in pairwise(ids))


def test_a_request_that_cannot_start_leaves_no_slots(llm: LLM) -> None:
    answers(llm)
    held = num_slots(llm)
    with pytest.raises(ConfigError, match="nonsense"):
        answers(llm, drafter="nonsense")
    assert num_slots(llm) == held


def test_a_deadline_before_the_first_part_is_named(llm: LLM) -> None:
    times = iter(range(10_000))
    options = replace(OPTIONS, deadline_s=1.5)
    events = list(embedded.answer(llm, QUESTION, options, clock=lambda: float(next(times))))
    assert FellBack("the deadline came before the plan's first part") in events
    assert last_answer(events).text


def test_bad_input(llm: LLM) -> None:
    with pytest.raises(InputError, match="empty"):
        llm.plan_and_generate("  ")
