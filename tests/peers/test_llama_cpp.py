"""Planned answers and judgements from llama.cpp's server and from its Python server: `make test-peers`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretell.errors import RemoteError
from foretell.models.files import find_default_gguf
from foretell.plato.answers import AnswerFile, AnswerRecord, Question
from foretell.plato.events import Answer, AnswerText, Event, PartEnded, PartText, last_answer
from foretell.plato.grammar import plan_gbnf, plan_grammar
from foretell.plato.options import PlatoOptions
from foretell.plato.remote import stream_remote_plan
from foretell.plato.server_client import ChatRequest, ServerClient

pytestmark = pytest.mark.peers

QUESTION = "What are wind, water and solar power good for?"
KEY = "peer-key"
INSTALL = {"xllamacpp": "pip install xllamacpp", "llama_cpp": "pip install 'llama-cpp-python[server]'"}
"""By module, how to get it: the first is a wheel, the second is compiled for a quarter of an hour."""
LLAMA_CPP = ["-m", "llama_cpp.server", "--n_ctx", "2048", "--interrupt_requests", "false"]
"""By default it ends a stream as soon as another is asked for."""
_START_S = 120.0
_CANCEL_S = 5.0


@dataclass(frozen=True)
class Peer:
    name: str
    url: str

    def ask(self, question: str = QUESTION, **options: Any) -> list[Event]:
        return list(stream_remote_plan(self.url, None, question, PlatoOptions(**options), api_key=KEY))

    def slots(self) -> list[dict[str, Any]]:
        """What each sequence of the server does; it is skipped where that cannot be asked."""
        if self.name != "xllamacpp":
            pytest.skip("writes one stream at a time, and does not tell which")
        slots: list[dict[str, Any]] = httpx.get(f"{self.url}/slots", headers=_headers()).raise_for_status().json()
        return slots


@pytest.fixture(scope="module", params=INSTALL)
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: {INSTALL[name]}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    model, script = str(find_default_gguf()), str(Path(__file__).with_name("serve_xllamacpp.py"))
    command = {
        "xllamacpp": [script, model, port, KEY],
        "llama_cpp": [*LLAMA_CPP, "--model", model, "--port", port, "--api_key", KEY],
    }
    server = subprocess.Popen([sys.executable, *command[name]])
    try:
        yield Peer(name, _wait_for(f"http://127.0.0.1:{port}", server))
    finally:
        server.terminate()
        server.wait()


def test_whatever_is_asked_a_plan_is_kept_to_its_grammar(peer: Peer) -> None:
    language = {"regex": plan_grammar(3, may_be_direct=False), "grammar": plan_gbnf(3, may_be_direct=False)}
    request = ChatRequest(messages=[{"role": "user", "content": "Say hello."}], max_tokens=600, grammar=language)

    async def plan() -> str:
        server = ServerClient(peer.url, api_key=KEY)
        await server.connect()
        await server.find_grammar()
        assert server.obeys_grammar
        text = "".join([piece.text async for piece in server.stream(request)])
        await server.aclose()
        return text

    assert re.fullmatch(language["regex"], asyncio.run(plan()))


def test_a_plan_is_answered(peer: Peer) -> None:
    events = peer.ask(force_plan=True, max_parts=3, max_answer_tokens=96)
    answer = last_answer(events)
    assert answer.plan is not None
    assert 2 <= len(answer.plan) <= 3
    assert answer.repairs == ()
    assert answer.text == "".join(event.text for event in events if isinstance(event, AnswerText)) != ""
    assert {result.reason for result in answer.parts} <= {"stop", "length"}
    assert 0 < answer.num_answer_tokens <= 96


def test_a_short_question_is_answered_directly(peer: Peer) -> None:
    answer = last_answer(peer.ask("What is 2 + 2?", max_answer_tokens=32))
    assert answer.is_direct
    assert answer.text


def test_parts_are_written_at_once_and_share_their_prompts(peer: Peer) -> None:
    assert len(peer.slots()) == 2
    events = peer.ask(mode="sot", force_plan=True, max_parts=3, max_answer_tokens=96)
    begun, num_at_once = set(), []
    for event in events:
        begun |= {event.part_id} if isinstance(event, PartText) else set()
        begun -= {event.part_id} if isinstance(event, PartEnded) else set()
        num_at_once.append(len(begun))
    assert max(num_at_once) >= 2
    assert last_answer(events).num_reused > 0


def test_closing_the_iterator_stops_the_server(peer: Peer) -> None:
    assert not any(slot["is_processing"] for slot in peer.slots())
    options = PlatoOptions(mode="sequential", max_answer_tokens=1900)
    events = stream_remote_plan(peer.url, None, "Count from 1 to 1000.", options, api_key=KEY)
    while not isinstance(next(events), AnswerText):
        pass
    assert any(slot["is_processing"] for slot in peer.slots())
    events.close()  # type: ignore[attr-defined]
    give_up_s = time.monotonic() + _CANCEL_S
    while any(slot["is_processing"] for slot in peer.slots()):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def test_more_than_the_context_holds_is_cut(peer: Peer) -> None:
    note = "This is a note. "  # of five tokens
    answer = last_answer(peer.ask(note * 380 + "Count to 1000.", mode="sequential", max_answer_tokens=400))
    assert 0 < answer.num_answer_tokens < 400
    with pytest.raises(RemoteError, match=r"answers 400: .*context|ended the stream"):
        peer.ask(note * 500, mode="sequential")


def test_without_its_key_the_server_refuses(peer: Peer) -> None:
    with pytest.raises(RemoteError, match=r"answers 401: .*--api-key-env"):
        list(stream_remote_plan(peer.url, None, QUESTION, PlatoOptions(force_plan=True)))


def test_the_command_plans(peer: Peer) -> None:
    options = ["--force-plan", "--max-parts", "3", "--max-new-tokens", "96", "--json"]
    printed = foretell("plan", QUESTION, "--backend", "openai", "--base-url", peer.url, *options)
    answer = json.loads(printed.splitlines()[-1])["answer"]
    assert 2 <= len(answer["plan"]) == len(answer["parts"]) <= 3
    assert answer["text"].startswith(f"**{answer['plan'][0]['title']}**")


def test_the_command_has_pairs_judged(peer: Peer, tmp_path: Path) -> None:
    texts = {
        "1": ("The sky is blue because air scatters blue light most.", "Because it is."),
        "2": ("I do not know.", "Ice floats because it is less dense than water."),
        "3": ("Yes.", "Yes."),
    }
    answers = AnswerFile(tmp_path / "answers.jsonl", {})
    for question_id, pair in texts.items():
        for arm, text in zip(("plato", "plain"), pair):
            answer = Answer(text=text, mode="plato", plan=None, is_direct=True)
            question = Question(question_id=question_id, category="qa", text=f"Question {question_id}: why?")
            answers.add(AnswerRecord(question=question, arm=arm, answer=answer, wall_s=1.0, mean_logprob=None))
    model = httpx.get(f"{peer.url}/v1/models", headers=_headers()).json()["data"][0]["id"]
    file = str(tmp_path / "answers.jsonl")
    document = json.loads(foretell("eval", "judge", file, "--base-url", peer.url, "--model", model, "--json"))
    pairs = document["pairs"]
    assert (document["num_questions"], document["num_identical"]) == (3, 1)
    assert pairs[2]["verdicts"] == ["tie", "tie"]
    for pair in pairs:
        expected = "unparsable" if None in pair["verdicts"] else "tie"
        expected = {("A", "B"): "win", ("B", "A"): "loss"}.get(tuple(pair["verdicts"]), expected)
        assert pair["outcome"] == expected
    kept = [document[name] for name in ("wins", "losses", "ties", "num_unparsable")]
    assert sum(kept) == 3
    assert document["ties"] >= 1


def foretell(*arguments: str) -> str:
    """Return what a command prints that asks the server with its key."""
    command = [sys.executable, "-m", "foretell", *arguments, "--api-key-env", "PEER_KEY"]
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PEER_KEY": KEY}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> str:
    give_up_s = time.monotonic() + _START_S
    while time.monotonic() < give_up_s and server.poll() is None:
        try:
            httpx.get(f"{url}/v1/models", headers=_headers()).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return url
    raise AssertionError(f"the server did not start within {_START_S:g} s")
