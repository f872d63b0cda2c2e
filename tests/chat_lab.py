"""A server that speaks OpenAI's protocol and answers as a test wants, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from foretell.plato.events import Answer, AnswerText, Event, Finished, PartEnded
from foretell.plato.options import PlatoOptions
from foretell.plato.remote import stream_remote_plan

QUESTION = "How is electricity made?"
TITLES = ("Wind", "Water", "Sun", "Tides", "Waste", "Wood")
"""Of parts 1, 2, … in every plan: what is asked for is known by them."""
TEXTS = [f"Text of {part_id}, all of it." for part_id in (1, 2, 3)]
"""Of the parts of `PLAN`, unless a test has it otherwise."""
PLAN = "1. Wind < -\n2. Water < -\n3. Sun < 1,2\nEND\n"


@dataclass(frozen=True)
class Status:
    """Answers with an error."""

    code: int
    message: str = "no"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Until:
    """Writes on when something has happened: "2 asked", "2 asked again", "2 begun", "2 written", "2 left"."""

    signal: str


class Drop:
    """Breaks the connection off."""


Step = str | Status | Until | Drop


class ChatLab:
    """The server. Replies are lists of steps; the last reply of a key is given from then on.

    Keys: "probe", "plan", "direct", "1", "2", … for parts, and "1+" where part 1 is to be continued.
    """

    def __init__(self) -> None:
        self.owner = "somebody"
        self.models = ["tiny"]
        self.grammar_field: str | None = None
        self.finish: dict[str, str] = {}
        self.replies: dict[str, list[Sequence[Step]]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.key: str | None = None
        """What must be sent; None takes any or none."""
        self.connections: list[tuple[str, int]] = []
        """Of each request, the other end."""
        self.keys_sent: set[str | None] = set()
        self.open: set[str] = set()
        self.most_open = 0
        self.counts: Counter[str] = Counter()
        self.signals: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.left: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.url = ""

    def signal(self, name: str) -> None:
        """Say that something has happened, from any thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._signal, name)

    def bodies(self, key: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == key]

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        request = await _read(receive)
        self.connections.append(scope["client"])
        headers = dict(scope["headers"])
        sent = headers[b"authorization"].decode() if b"authorization" in headers else None
        self.keys_sent.add(sent)
        if self.key is not None and sent != f"Bearer {self.key}":
            await _send(send, 401, json.dumps({"error": {"message": f"not a key: {sent}"}}))
        elif scope["path"] == "/v1/models":
            listed = [{"id": model, "owned_by": self.owner} for model in self.models]
            await _send(send, 200, json.dumps({"data": listed}))
        elif scope["path"] == "/v1/chat/completions":
            await self._answer(json.loads(request), receive, send)
        else:
            await _send(send, 404, '{"detail": "Not Found"}')

    async def _answer(self, body: dict[str, Any], receive: Any, send: Any) -> None:
        key = _key(body)
        self.asked.append((key, body))
        self.counts[key] += 1
        self._signal(f"{key} asked" if self.counts[key] == 1 else f"{key} asked again")
        replies = self.replies.get(key) or [self._reply(key, body)]
        reply = replies[min(self.counts[key], len(replies)) - 1]
        if body["model"] not in self.models:
            reply = [Status(404, "no such model")]
        if reply and isinstance(status := reply[0], Status):
            await _send(send, status.code, json.dumps({"error": {"message": status.message}}), status.headers)
            return
        if "stream" not in body:
            text = "".join(step for step in reply if isinstance(step, str))
            await _send(send, 200, json.dumps({"choices": [{"message": {"content": text}}]}))
            return
        writing = asyncio.create_task(self._write(key, body, reply, send))
        leaving = asyncio.create_task(_left(receive))
        await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            self._signal(f"{key} left")
            self.left[key].set()
        for task in (writing, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _write(self, key: str, body: dict[str, Any], reply: Sequence[Step], send: Any) -> None:
        self.open.add(key)
        self.most_open = max(self.most_open, len(self.open))
        self._signal(f"{key} begun")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for step in reply:
                if isinstance(step, Until):
                    await self.signals[step.signal].wait()
                elif isinstance(step, Drop):
                    raise ConnectionError
                else:
                    await _event(send, {"choices": [{"delta": {"content": step}}]})
            await _event(send, {"choices": [{"delta": {}, "finish_reason": self.finish.get(key, "stop")}]})
            usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}, "completion_tokens": 7}
            if "stream_options" in body:
                await _event(send, {"choices": [], "usage": usage})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        finally:
            self.open.discard(key)
            self._signal(f"{key} written")

    def _reply(self, key: str, body: Mapping[str, Any]) -> Sequence[Step]:
        if key == "probe":
            said = {"structured_outputs": "7", "regex": "8", "grammar": "9"}.get(self.grammar_field or "", "Yes")
            return [said if self.grammar_field in body else "Yes"]
        return {"plan": [line + "\n" for line in PLAN.splitlines()], "direct": ["The whole", " answer."]}.get(
            key, [f"Text of {key}", ", all of it."]
        )

    def _signal(self, name: str) -> None:
        self.signals[name].set()


class Port:
    """Where a lab can be reached; another one may take its place."""

    def __init__(self) -> None:
        self.url, self.lab = "", ChatLab()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self.lab(scope, receive, send)

    def serve(self, lab: ChatLab) -> ChatLab:
        self.lab, lab.url = lab, self.url
        return lab


@contextmanager
def serving() -> Iterator[Port]:
    """Run a server in a thread."""
    port = Port()
    config = uvicorn.Config(port, port=0, log_config=None, lifespan="off", ws="none", http="h11", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.002)
    port.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield port
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


async def hurry(seconds: float) -> None:
    """Wait no time, for back-off."""


def ask(lab: ChatLab, question: str = QUESTION, model: str | None = None, **options: Any) -> list[Event]:
    settings = PlatoOptions(**({"has_headings": False} | options))
    return list(stream_remote_plan(lab.url, model, question, settings, sleep=hurry))


def last_said(body: Mapping[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def answer_of(events: list[Event]) -> Answer:
    """Return the answer after checking what holds for all of them."""
    *before, last = events
    assert isinstance(last, Finished)
    assert last.answer.text == "".join(event.text for event in before if isinstance(event, AnswerText))
    ended = [event.part_id for event in before if isinstance(event, PartEnded)]
    assert len(ended) == len(set(ended))
    return last.answer


def of_type(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def _key(body: Mapping[str, Any]) -> str:
    *before, last = body["messages"]
    said = last["content"]
    if last["role"] == "assistant":
        return _key({"messages": before}) + ("" if said.endswith("**\n\n") else "+")
    if said == "Say yes.":
        return "probe"
    places = [said.rfind(title) for title in TITLES]
    if max(places) >= 0:
        return str(1 + places.index(max(places)))
    return "plan" if before else "direct"


async def _read(receive: Any) -> bytes:
    body, is_more = b"", True
    while is_more:
        message = await receive()
        body, is_more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Any, status: int, body: str, headers: Mapping[str, str] | None = None) -> None:
    sent = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body.encode()})


async def _event(send: Any, document: Any) -> None:
    line = b"data: " + json.dumps(document).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": line, "more_body": True})
