"""Planned answers from a server that stalls, drops and refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chat_lab import (
    PLAN,
    QUESTION,
    TEXTS,
    ChatLab,
    Drop,
    Status,
    Until,
    answer_of,
    ask,
    hurry,
    last_said,
    of_type,
)
from foretell.errors import ConfigError, InputError, RemoteError
from foretell.plato.events import Event, FellBack, PartEnded, PartStarted, PartText, PlanEnded
from foretell.plato.options import PlatoOptions
from foretell.plato.remote import remote_plan, stream_remote_plan
from foretell.plato.server_client import ServerClient

# What goes wrong


def test_a_busy_server_gets_fewer_requests_at_once(lab: ChatLab) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    lab.replies["plan"] = [["1. Wind < -\n2. Water < -\n3. Sun < -\nEND\n"]]
    lab.replies["1"] = [["Text of 1", Until("3 asked again"), ", all of it."]]
    lab.replies["2"] = [[Status(429, headers={"Retry-After": "7"})], [Status(429)], [Status(503)], TEXTS[1:2]]
    lab.replies["3"] = [[Status(429)], TEXTS[2:]]
    server = ServerClient(lab.url, max_streams=6, sleep=note)

    async def collect() -> list[Event]:
        events = [event async for event in remote_plan(server, QUESTION, PlatoOptions(has_headings=False))]
        await server.aclose()
        return events

    assert answer_of(asyncio.run(collect())).text == "\n\n".join(TEXTS)
    assert sorted(pauses) == [0.5, 1.0, 2.0, 7.0]
    assert server.max_streams == 3


def test_no_request_meets_a_connection_that_a_server_closes_after_a_stream(lab: ChatLab) -> None:
    answer_of(ask(lab))
    assert len(lab.connections) == len(set(lab.connections)) == 1 + 1 + 1 + 3  # models, grammar, plan, parts


def test_a_part_that_was_not_shown_is_written_anew(lab: ChatLab) -> None:
    lab.replies["plan"] = [["1. Wind < -\n2. Water < -\nEND\n"]]
    lab.replies["1"] = [["Text of 1", Until("2 asked again"), ", all of it."]]
    lab.replies["2"] = [["A beginning", Drop()], TEXTS[1:2]]
    events = ask(lab)
    assert answer_of(events).text == "\n\n".join(TEXTS[:2])
    assert [event.part_id for event in of_type(events, PartStarted)] == [1, 2, 2]


def test_a_part_that_was_shown_keeps_its_text(lab: ChatLab) -> None:
    lab.replies["1"] = [["A beginning", Drop()]]
    answer = answer_of(ask(lab))
    assert answer.text == "\n\n".join(["A beginning", *TEXTS[1:]])
    assert [result.reason for result in answer.parts] == ["failed", "stop", "stop"]
    assert "Wind is missing" in last_said(lab.bodies("3")[0])


def test_a_dropped_part_goes_on_where_the_server_can(lab: ChatLab) -> None:
    lab.owner, lab.replies["1"] = "llamacpp", [["A beginning", Drop()]]
    lab.replies["1+"] = [[" and an end."]]
    answer = answer_of(ask(lab))
    assert answer.text.startswith("A beginning and an end.\n\n")
    assert (answer.parts[0].reason, answer.parts[0].num_tokens) == ("stop", 1 + 7)
    assert "continue_final_message" not in lab.bodies("1+")[0]


def test_a_part_that_is_dropped_twice_keeps_its_text(lab: ChatLab) -> None:
    lab.owner, lab.replies["1"] = "sglang", [["A beginning", Drop()]]
    lab.replies["1+"] = [[" and more", Drop()]]
    answer = answer_of(ask(lab))
    assert (answer.parts[0].text, answer.parts[0].reason) == ("A beginning and more", "failed")
    assert lab.counts["1+"] == 1


@pytest.mark.parametrize("reply", [[Status(500)], [Status(400)], [Drop()], []])
def test_a_part_that_cannot_be_written_holds_up_nobody(lab: ChatLab, reply: list[Any]) -> None:
    lab.replies["2"] = [reply]
    answer = answer_of(ask(lab))
    assert answer.text == f"{TEXTS[0]}\n\n{TEXTS[2]}"
    assert [result.reason for result in answer.parts] == ["stop", "failed", "stop"]


def test_without_any_part_the_question_is_answered_directly(lab: ChatLab) -> None:
    lab.replies |= {key: [[Status(500, "out of memory")]] for key in "123"}
    events = ask(lab)
    assert answer_of(events).text == "The whole answer."
    assert "out of memory" in of_type(events, FellBack)[0].reason


@pytest.mark.parametrize("beginning", [[["1. Wi", Drop()]], []])
def test_a_dropped_plan_is_taken_as_far_as_it_goes(lab: ChatLab, beginning: list[Any]) -> None:
    lab.replies["plan"] = [*beginning, ["1. Wind < -\n2. Water < -\n3. Su", Drop()]]
    events = ask(lab)
    answer = answer_of(events)
    assert answer.text == "\n\n".join(TEXTS[:2])
    assert lab.counts["plan"] == 1 + len(beginning)
    assert [result.part.title for result in answer.parts] == ["Wind", "Water"]
    assert answer.repairs == ("cut off after 2 parts",)
    assert len(of_type(events, PlanEnded)) == 1


def test_a_broken_direct_answer_is_tried_again_and_kept(lab: ChatLab) -> None:
    lab.replies["direct"] = [[Drop()], ["A beginning", Drop()]]
    answer = answer_of(ask(lab, mode="sequential"))
    assert answer.text == "A beginning"
    assert "broke off" in answer.repairs[0]


def test_after_the_deadline_no_part_begins(lab: ChatLab) -> None:
    over = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds == 50:  # the server is busy for longer than the deadline allows
            await asyncio.Event().wait()
        await over.wait()
        lab.signal("deadline")

    lab.replies["plan"] = [["1. Wind < -\n2. Water < -\n3. Sun < 1\n4. Tides < -\nEND\n"]]
    lab.replies["1"] = [["Text of", Until("2 asked"), " 1", Until("deadline"), ", all of it."]]
    lab.replies["2"] = [[Status(429, headers={"Retry-After": "50"})]]
    events: list[Event] = []
    options = PlatoOptions(deadline_s=60, has_headings=False)
    for event in stream_remote_plan(lab.url, None, QUESTION, options, sleep=sleep, clock=lambda: 0.0):
        events.append(event)
        if PartText(1, " 1") in events and any(ended.part_id == 4 for ended in of_type(events, PartEnded)):
            over.set()
    answer = answer_of(events)
    assert answer.text == f"{TEXTS[0]}\n\nText of 4, all of it."
    assert [(result.part.id, result.reason) for result in answer.parts] == [(1, "stop"), (2, "failed"), (4, "stop")]
    assert not lab.bodies("3")


def test_a_deadline_before_any_text_leaves_the_question_to_be_answered_directly(lab: ChatLab) -> None:
    async def sleep(seconds: float) -> None:
        while not lab.bodies("1"):
            await asyncio.sleep(0.001)

    lab.replies["plan"] = [["1. Wind < -\n", Until("never")]]
    lab.replies["1"] = [[Until("never")]]
    options = PlatoOptions(deadline_s=60, has_headings=False)
    assert (
        answer_of(list(stream_remote_plan(lab.url, None, QUESTION, options, sleep=sleep))).text == "The whole answer."
    )


def test_closing_the_iterator_stops_the_server(lab: ChatLab) -> None:
    lab.replies["plan"] = [[PLAN.replace("END\n", ""), Until("never")]]
    lab.replies |= {key: [["Text", Until("never")]] for key in "12"}
    events = stream_remote_plan(lab.url, None, QUESTION, sleep=hurry)
    seen: set[int] = set()
    for event in events:
        seen |= {event.part_id} if isinstance(event, PartText) else set()
        if seen == {1, 2}:
            break
    events.close()  # type: ignore[attr-defined]
    assert all(lab.left[key].wait(5) for key in ("plan", "1", "2"))


# What cannot be answered


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        (
            [Status(401, "bad key")],
            r"answers 401: bad key: give an API key that it takes, by .* --api-key-env on the command line$",
        ),
        ([Status(429, "slow down")], r"answers 429: slow down: try again later, or with fewer parts at once$"),
        ([Status(413, "too long")], r"answers 413: too long$"),
        ([Status(502, "gone")], r"answers 502: gone: see the server's log$"),
        ([Drop()], r"it broke off \(.+\): check address and server$"),
        ([], r"the model wrote nothing: if it thinks first, switch that off at the server, or allow more tokens$"),
    ],
)
def test_where_every_attempt_fails_one_line_says_why(lab: ChatLab, replies: list[Any], message: str) -> None:
    lab.replies |= {key: [replies] for key in ("plan", "direct")}
    with pytest.raises(RemoteError, match=message) as caught:
        ask(lab)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_is_named_with_those_there_are(lab: ChatLab) -> None:
    with pytest.raises(RemoteError, match=r"404: no such model; asked for model 'huge'; it serves tiny; correct"):
        ask(lab, model="huge")


def test_the_first_model_listed_is_asked(lab: ChatLab) -> None:
    lab.models = ["small", "large"]
    ask(lab)
    assert {body["model"] for _, body in lab.asked} == {"small"}
    lab.models = []
    with pytest.raises(RemoteError, match="lists no model: name one"):
        ask(lab)


def test_silence_is_not_waited_for_twice(lab: ChatLab) -> None:
    lab.replies["direct"] = [[Until("never")]]
    with pytest.raises(RemoteError, match=r"was silent for 0\.2 s: check the server, or allow it more time"):
        list(stream_remote_plan(lab.url, None, QUESTION, PlatoOptions(mode="sequential"), timeout_s=0.2))
    assert lab.counts["direct"] == 1


def test_inside_an_event_loop_another_function_is_named() -> None:
    async def inside() -> None:
        list(stream_remote_plan("http://lab", None, QUESTION))

    with pytest.raises(ConfigError, match="an event loop is running here: iterate over `remote_plan`"):
        asyncio.run(inside())


def test_what_a_server_decides_cannot_be_chosen(lab: ChatLab) -> None:
    with pytest.raises(ConfigError, match="`max_rows` and `max_slots` have no effect on a server"):
        ask(lab, drafter="lookup")
    with pytest.raises(ConfigError, match="have no effect on a server"):
        ask(lab, max_rows=8)
    with pytest.raises(ConfigError, match="have no effect on a server"):
        ask(lab, max_slots=4096)
    with pytest.raises(InputError, match="the question is empty"):
        ask(lab, " ")
