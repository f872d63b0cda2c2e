"""Planned answers from servers that can do this and not that, and from models that cannot plan."""

from __future__ import annotations

import pytest

from chat_lab import (
    PLAN,
    QUESTION,
    TEXTS,
    TITLES,
    ChatLab,
    Status,
    Until,
    answer_of,
    ask,
    last_said,
    of_type,
)
from foretell.plato.events import FellBack, PartPlanned, PartStarted, Routed

# The order of things


def test_parts_are_assembled_in_order_and_counted(lab: ChatLab) -> None:
    events = ask(lab, has_headings=True, seed=5)
    answer = answer_of(events)
    assert [lab.bodies(key)[0]["seed"] for key in ("plan", "1", "2", "3")] == [5, 6, 7, 8]
    assert answer.text == "\n\n".join(f"**{title}**\n\n{text}" for title, text in zip(TITLES, TEXTS))
    assert answer.plan is not None
    assert [part.needs for part in answer.plan] == [(), (), (1, 2)]
    assert [result.text for result in answer.parts] == TEXTS
    assert [(result.num_tokens, result.num_computed, result.num_reused) for result in answer.parts] == [(7, 40, 60)] * 3
    assert (answer.num_answer_tokens, answer.num_plan_tokens) == (21, 7)
    assert (answer.num_computed, answer.num_reused) == (4 * 40, 4 * 60)
    assert not answer.is_direct
    assert 0 < answer.first_text_s <= answer.total_s
    assert [type(event) for event in events[:3]] == [Routed, PartPlanned, PartStarted]


def test_a_part_begins_while_the_plan_is_written(lab: ChatLab) -> None:
    lab.replies["plan"] = [["1. Wind < -\n", Until("1 asked"), "2. Water < -\nEND\n"]]
    assert answer_of(ask(lab)).text == "\n\n".join(TEXTS[:2])


def test_a_slow_part_holds_up_nobody(lab: ChatLab) -> None:
    lab.replies["plan"] = [["1. Wind < -\n2. Water < -\n3. Sun < 2\nEND\n"]]
    lab.replies["1"] = [["Text of 1", Until("3 written"), ", all of it."]]
    assert answer_of(ask(lab)).text == "\n\n".join(TEXTS)


def test_only_so_many_parts_are_written_at_once(lab: ChatLab) -> None:
    lab.replies["plan"] = [["".join(f"{k}. {title} < -\n" for k, title in enumerate(TITLES, 1)) + "END\n"]]
    lab.replies |= {str(k): [["a", Until(f"{k + 1} begun"), "b"]] for k in (1, 3, 5)}
    answer = answer_of(ask(lab, max_parallel=2, is_pipelined=False))
    assert len(answer.parts) == 6
    assert lab.most_open == 2


def test_conversations_share_their_beginnings(lab: ChatLab) -> None:
    lab.replies["plan"] = [["1. Wind < -\n2. Water < -\n3. Sun < 2\n4. Tides < 1,3\nEND\n"]]
    answer_of(ask(lab))
    (plan,), (first,), (third,), (fourth,) = (lab.bodies(key) for key in ("plan", "1", "3", "4"))
    assert first["messages"][: len(plan["messages"])] == plan["messages"]
    assert first["messages"][-2]["content"] == "1. Wind < -\n"
    assert third["messages"][-2] == {"role": "assistant", "content": TEXTS[1]}
    assert fourth["messages"][: len(third["messages"])] == third["messages"]
    assert [text in last_said(fourth) for text in TEXTS] == [True, False, False]
    assert "do not conclude" in last_said(third)
    assert "do not conclude" not in last_said(fourth)
    assert last_said(fourth).endswith("Leave out the title.")


def test_all_of_the_plan_can_be_shown_to_all_parts(lab: ChatLab) -> None:
    answer_of(ask(lab, visibility="full"))
    assert lab.bodies("1")[0]["messages"][-2]["content"] == PLAN


def test_points_of_a_skeleton_see_each_other_not(lab: ChatLab) -> None:
    answer = answer_of(ask(lab, mode="sot"))
    assert answer.text == "\n\n".join(TEXTS)
    assert answer.plan is not None
    assert answer.plan.width == 3
    (third,) = lab.bodies("3")
    assert len(third["messages"]) == 1
    assert "1. Wind\n2. Water\n3. Sun" in last_said(third)


# What a server can do


@pytest.mark.parametrize("name", ["structured_outputs", "regex", "grammar", None])
def test_a_server_is_held_to_the_grammar_that_it_obeys(lab: ChatLab, name: str | None) -> None:
    lab.grammar_field = name
    assert answer_of(ask(lab)).text == "\n\n".join(TEXTS)
    (plan,) = lab.bodies("plan")
    assert {"structured_outputs", "regex", "grammar"} & plan.keys() == ({name} if name else set())
    assert plan.get("stop") == (None if name else ["\nEND"])


def test_a_grammar_that_is_refused_after_all_is_left_out(lab: ChatLab) -> None:
    lab.grammar_field = "regex"
    lab.replies["plan"] = [[Status(400, "cannot compile")], ["Sure:\n1) Wind\n2) Water < none\n"]]
    answer = answer_of(ask(lab))
    assert answer.text == "\n\n".join(TEXTS[:2])
    assert "regex" not in lab.bodies("plan")[1]


def test_a_server_that_refuses_unknown_fields_is_asked_without(lab: ChatLab) -> None:
    lab.replies["probe"] = [[Status(422, "extra inputs")], [Status(400, "what is stream_options?")], ["Yes"]]
    answer = answer_of(ask(lab))
    assert answer.text == "\n\n".join(TEXTS)
    assert all("stream_options" not in body for _, body in lab.asked[2:])
    assert [result.num_tokens for result in answer.parts] == [2, 2, 2]  # pieces, where nobody counts tokens


def test_a_cut_part_goes_on_where_the_server_can(lab: ChatLab) -> None:
    lab.owner, lab.finish["1"] = "vllm", "length"
    answer = answer_of(ask(lab))
    assert answer.parts[0].text == TEXTS[0] + "Text of 1+, all of it."
    assert answer.parts[0].reason == "stop"
    (more,) = lab.bodies("1+")
    assert more["continue_final_message"]
    assert not more["add_generation_prompt"]
    assert last_said(more) == f"**Wind**\n\n{TEXTS[0]}"
    assert lab.bodies("1")[0]["max_tokens"] == 512 // 8


def test_a_cut_part_ends_where_the_server_cannot(lab: ChatLab) -> None:
    lab.finish["1"] = "length"
    answer = answer_of(ask(lab))
    assert [result.reason for result in answer.parts] == ["length", "stop", "stop"]
    assert answer.text == "\n\n".join(TEXTS)
    assert lab.bodies("1")[0]["max_tokens"] > 512 // 8  # it had to be given more at once


# Plans that are none


@pytest.mark.parametrize("reply", [["I would rather", " talk.\n", "A lot.\n"], ["1. Wind < -\nEND\n"], []])
def test_without_a_plan_the_question_is_answered_directly(lab: ChatLab, reply: list[str]) -> None:
    lab.replies["plan"] = [reply]
    events = ask(lab)
    answer = answer_of(events)
    assert answer.text == "The whole answer."
    assert (answer.is_direct, answer.plan, answer.parts) == (True, None, [])
    assert len(of_type(events, FellBack)) == 1
    assert lab.bodies("direct")[0]["messages"] == [{"role": "user", "content": QUESTION}]


def test_parts_of_a_plan_that_becomes_garbage_are_stopped(lab: ChatLab) -> None:
    lab.replies["plan"] = [["1. Wind < -\n", Until("1 asked"), "Well, no.\nI changed my mind.\n", Until("never")]]
    lab.replies["1"] = [[Until("never")]]
    lab.replies["direct"] = [[Until("1 left"), Until("plan left"), "The whole answer."]]
    assert answer_of(ask(lab)).text == "The whole answer."


def test_garbage_after_text_that_was_shown_ends_the_plan(lab: ChatLab) -> None:
    lab.replies["plan"] = [["1. Wind < -\n2. Water < 1\n", Until("2 asked"), "Well, no.\nI changed my mind.\n"]]
    events = ask(lab)
    answer = answer_of(events)
    assert answer.text == "\n\n".join(TEXTS[:2])
    assert answer.repairs
    assert not of_type(events, FellBack)


def test_the_model_may_choose_to_answer_directly(lab: ChatLab) -> None:
    lab.replies["plan"] = [["DIRECT", "\n", Until("never")]]
    events = ask(lab)
    assert answer_of(events).text == "The whole answer."
    assert of_type(events, Routed) == [Routed(True, None, "the model chose to answer directly")]
    assert not of_type(events, FellBack)


@pytest.mark.parametrize(("question", "mode"), [("How many feet are 3 miles?", "plato"), (QUESTION, "sequential")])
def test_what_needs_no_plan_takes_one_request(lab: ChatLab, question: str, mode: str) -> None:
    answer = answer_of(ask(lab, question, mode=mode))
    assert (answer.text, answer.is_direct) == ("The whole answer.", True)
    assert [key for key, _ in lab.asked] == ["direct"]


def test_a_plan_that_goes_on_for_too_long_is_closed(lab: ChatLab) -> None:
    lab.replies["plan"] = [[PLAN.removesuffix("END\n"), *["\n", "so ", "on "] * 3, Until("never")]]
    lab.replies["1"] = [["Text of 1", Until("plan left"), ", all of it."]]
    assert answer_of(ask(lab, max_parts=2)).text == "\n\n".join(TEXTS[:2])
