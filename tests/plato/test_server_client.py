"""Streams as servers really send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import ConfigError, RemoteError
from foretell.plato.server_client import ChatRequest, Piece, ServerClient, StreamBrokenError, Usage

REQUEST = ChatRequest(messages=[{"role": "user", "content": "Why?"}], max_tokens=8, seed=3)
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
TEXT = "Grüße \u2028 von \x85 ½ 简介"
FINISH = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}], **more}


def events(*documents: Any) -> bytes:
    lines = [json.dumps(document, ensure_ascii=False) for document in documents]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def client_of(handle: Callable[[httpx.Request], httpx.Response], **more: Any) -> ServerClient:
    async def hurry(seconds: float) -> None:
        pass

    return ServerClient("http://lab", "tiny", transport=httpx.MockTransport(handle), sleep=hurry, **more)


def read(client: ServerClient, request: ChatRequest = REQUEST) -> list[Piece]:
    async def collect() -> list[Piece]:
        return [piece async for piece in client.stream(request)]

    return asyncio.run(collect())


def text_of(body: bytes) -> str:
    return "".join(piece.text for piece in read(client_of(lambda _: httpx.Response(200, content=body))))


@given(st.lists(st.integers(0, 400), max_size=9), st.sampled_from([b"\n", b"\r\n"]))
def test_it_does_not_matter_how_bytes_are_cut(places: list[int], line_end: bytes) -> None:
    body = b": waiting\n\nevent: message\n" + events(said(TEXT), said(" and more"), FINISH, said("", usage=USAGE))
    body = body.replace(b"\n", line_end) + b"data: [DONE]\n\n"
    cuts = [0, *sorted(places), len(body)]

    async def content() -> AsyncIterator[bytes]:
        for start, end in pairwise(cuts):
            yield body[start:end]

    pieces = read(client_of(lambda _: httpx.Response(200, content=content())))
    assert "".join(piece.text for piece in pieces) == f"{TEXT} and more"
    assert pieces[0] == Piece()
    assert pieces[-1].usage == Usage(num_prompt=9, num_cached=4, num_new=2)
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]


@pytest.mark.parametrize(
    "body",
    [
        events(said("all"), FINISH),  # no [DONE]
        events(said("all"), FINISH) + b"data: [DO",
        events({"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}).replace(b"data: ", b""),
        events({"choices": []}, {"choices": [{"delta": {"role": "assistant", "content": None}}]}, said("all"), FINISH),
        events(said("all"), FINISH).replace(b"data: ", b"data:"),
        events({"choices": [{"delta": {"content": "all"}, "finish_reason": "length"}], "usage": None}),
    ],
)
def test_servers_may_take_liberties(body: bytes) -> None:
    assert text_of(body) == "all"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (events(said("a")), "ended the stream before the text: see the server's log"),
        (events(said("a")) + b"data: [DONE]\n\n", "ended the stream before the text: see the server's log"),
        (events(said("a"), {"error": {"message": "out of\nmemory"}}), "broke off: out of memory"),
        (events(said("a"), {"error": "oops"}), "broke off: oops"),
        (events(said("a"), [1]), "streams something else than chat completions: check the address"),
        (b"data: {]\n\n", "streams something else than chat completions: check the address"),
        (events({"choices": ["a"]}), "streams something else than chat completions: check the address"),
    ],
)
def test_a_stream_that_breaks_off_says_so(body: bytes, message: str) -> None:
    with pytest.raises(StreamBrokenError, match=f"^http://lab/v1/chat/completions {message}$"):
        text_of(body)


def test_what_follows_a_complete_text_does_not_matter() -> None:
    async def content() -> AsyncIterator[bytes]:
        yield events(said("all"), FINISH)
        raise httpx.ReadTimeout("still here")

    assert read(client_of(lambda _: httpx.Response(200, content=content())))[1].text == "all"


def test_refused_fields_are_left_out_from_then_on() -> None:
    bodies: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if "seed" in bodies[-1]:
            return httpx.Response(400, json={"detail": "seed is not supported"})
        return httpx.Response(200, content=events(said("a"), FINISH))

    client = client_of(handle)
    read(client)
    read(client)
    assert ["seed" in body for body in bodies] == [True, False, False]
    assert all({"stream_options", "temperature", "stream", "model"} <= body.keys() for body in bodies)


def test_a_refused_request_is_not_repeated() -> None:
    num_asked = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        return httpx.Response(400, json={"error": {"message": "the prompt is too long"}})

    with pytest.raises(RemoteError, match=r"answers 400: the prompt is too long$"):
        read(client_of(handle))
    assert num_asked == 1


@pytest.mark.parametrize(
    ("header", "pause_s"), [("3", 3.0), ("0", 0.0), ("900", 60.0), ("Wed, 21 Oct", 0.5), (None, 0.5)]
)
def test_a_busy_server_says_how_long_to_wait(header: str | None, pause_s: float) -> None:
    pauses: list[float] = []
    answers = [httpx.Response(503, headers={"Retry-After": header} if header else {})]
    answers.append(httpx.Response(200, content=events(said("a"), FINISH)))

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    transport = httpx.MockTransport(lambda _: answers.pop(0))
    read(ServerClient("http://lab", "tiny", transport=transport, sleep=sleep))
    assert pauses == [pause_s]


@pytest.mark.parametrize("url", ["http://lab", "http://lab/", "http://lab/v1", "http://lab/v1/"])
def test_the_version_may_be_left_out(url: str) -> None:
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(404)  # some servers do not list models

    client = ServerClient(url, "tiny", api_key="secret", transport=httpx.MockTransport(handle))
    asyncio.run(client.connect())
    assert client.model == "tiny"
    assert not client.can_continue
    assert [str(request.url) for request in asked] == ["http://lab/v1/models"]
    assert asked[0].headers["Authorization"] == "Bearer secret"


def test_a_key_that_no_header_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="the API key holds a line break"):
        ServerClient("http://lab", "tiny", api_key="a\nb")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="`base_url`"):
        ServerClient(url)


def test_a_server_that_is_not_there_is_said_so() -> None:
    with pytest.raises(RemoteError, match=r"cannot reach http://127\.0\.0\.1:1/v1/models.*check address and server$"):
        asyncio.run(ServerClient("http://127.0.0.1:1/v1/").connect())


def test_a_request_may_wait_without_a_word_while_another_is_answered() -> None:
    is_written = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(10):
            await asyncio.sleep(0.1)
            yield events(said("a"))
        yield events(FINISH)
        is_written.set()

    async def handle(request: httpx.Request) -> httpx.Response:
        if b"later" not in request.content:
            return httpx.Response(200, content=slowly())
        await is_written.wait()
        return httpx.Response(200, content=events(said("b"), FINISH))

    async def both() -> list[str]:
        client = ServerClient("http://lab", "tiny", transport=httpx.MockTransport(handle), timeout_s=0.5)

        async def text(question: str) -> str:
            request = ChatRequest(messages=[{"role": "user", "content": question}], max_tokens=8)
            return "".join([piece.text async for piece in client.stream(request)])

        return await asyncio.gather(text("now"), text("later"))

    assert asyncio.run(both()) == ["a" * 10, "b"]
