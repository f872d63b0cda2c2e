"""Stream chat completions from any server that speaks OpenAI's protocol, several at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from foretell.errors import RemoteError
from foretell.plato.http import KEY_REMEDY, failure_text, key_headers, one_line, retry_after_s, server_url
from foretell.text.chat_template import Message

if TYPE_CHECKING:
    import httpx

_Sent = TypeVar("_Sent")

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each further attempt at a busy server."""
_LONGEST_PAUSE_S: Final = 60.0
"""Of what a server asks for."""
_CONNECT_S: Final = 10.0

_CONTINUATIONS: Final[Mapping[str, Mapping[str, bool]]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
    "llamacpp": {},  # does so unasked
}
"""What makes a server go on with an assistant's message, by how it calls itself in `owned_by`."""

_DISPENSABLE: Final = ("stream_options", "seed", "temperature", "stop")
"""Fields without which a request still makes sense, should a server refuse them."""

_MARKERS: Final[Mapping[str, Any]] = {"structured_outputs": {"regex": "7"}, "regex": "8", "grammar": 'root ::= "9"'}
"""What each field that may hold a server to a grammar makes it say, whatever it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What one stream is asked for."""

    messages: Sequence[Message]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    grammar: Mapping[str, Any] = field(default_factory=dict)
    """By field of the request, the language that the text is to be of; the server gets the field that it obeys."""
    stop: str | None = None
    """Ends the text where the server obeys none."""
    is_continuation: bool = False
    """The last message is an assistant's, and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, as the server counts them."""

    num_prompt: int
    num_cached: int
    """Of the prompt, those whose keys and values were there already; 0 where the server does not say."""
    num_new: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream brings at once; its first piece is empty and says that the server accepted the request."""

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class StreamBrokenError(RemoteError):
    """A stream failed in a way that another attempt may not."""


class ServerClient:
    """A model behind an OpenAI-compatible server. Use it in one event loop, and close it.

    While the server says that it is busy (429, 503), a request is repeated after pauses that double from 0.5 s, or
    that the server asks for; each 429 lowers by one how many streams are open at once.

    Args:
        base_url: `http://localhost:8000`, which means `http://localhost:8000/v1`, or an address with a path as it is.
        model: the name by which the server knows it; None is the first that it lists.
        api_key: sent as a bearer token; None sends none.
        max_streams: most streams that are open at once; further ones wait.
        timeout_s: how long the server may be silent on all streams together: some let requests wait without a word
            while they write others.
        transport: what carries requests; None is the network.
        sleep: waits so many seconds.

    Raises:
        ConfigError: httpx is not installed, or address or key cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        max_streams: int = 9,
        timeout_s: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url, headers = server_url(base_url), key_headers(api_key)
        import httpx

        self._httpx, self._sleep, self._timeout_s = httpx, sleep, timeout_s
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_keepalive_connections=0),  # llama.cpp closes them after a stream, also while asked
            transport=transport,
        )
        self._silences: set[asyncio.Timeout] = set()
        """One for each stream that something is awaited of."""
        self.model = model
        self.max_streams = max_streams
        """As lowered so far."""
        self._permits = asyncio.Semaphore(max_streams)
        self._listed: list[str] | None = None
        self._owner = ""
        self._grammar_fields = set(_MARKERS)
        """Those that the server may obey; the one that it does, once that is known."""
        self._is_probed = False
        self._refused: set[str] = set()

    @property
    def can_continue(self) -> bool:
        """Whether the server goes on with an assistant's message instead of answering it."""
        return self._owner in _CONTINUATIONS

    @property
    def obeys_grammar(self) -> bool:
        """Whether the server keeps to a request's grammar."""
        return self._is_probed and bool(self._grammar_fields)

    async def connect(self) -> None:
        """Find out which model answers, once.

        Raises:
            RemoteError: the server cannot be reached, refuses, or lists no model where none was named.
        """
        if self._listed is not None:
            return
        response = await self._get("/models")
        entries: Any = None
        if response.status_code == 200:
            try:
                entries = response.json()["data"]
            except (ValueError, KeyError, TypeError):
                entries = None
        elif response.status_code in (401, 403) or self.model is None:
            raise self._refusal(response)
        named = [each for each in entries or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
        if self.model is None and not named:
            raise RemoteError(f"{self._url}/models lists no model: name one, or correct the address")
        self._listed = [each["id"] for each in named]
        self.model = self.model or self._listed[0]
        asked = [each for each in named if each["id"] == self.model] or named[:1]
        self._owner = str(asked[0].get("owned_by", "")) if asked else ""

    async def find_grammar(self) -> None:
        """Find out, once, by which field the server is held to a grammar, if by any.

        Servers ignore fields that they do not know, so each field asks for another token that the prompt does not.

        Raises:
            RemoteError: the server cannot be reached, or refuses.

        Cost: a request of one token.
        """
        if self._is_probed:
            return
        messages: list[Message] = [{"role": "user", "content": "Say yes."}]
        text = ""
        with suppress(StreamBrokenError):
            async for piece in self.stream(ChatRequest(messages=messages, max_tokens=1, grammar=_MARKERS)):
                text += piece.text
        said = {"7": "structured_outputs", "8": "regex", "9": "grammar"}.get(text.strip())
        self._grammar_fields &= {said or ""}
        self._is_probed = True

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Piece, None]:
        """Yield a text as the server writes it. Close the generator to stop the server.

        Raises:
            StreamBrokenError: the server cannot be reached, fails, or ends before the text does.
            RemoteError: it refuses, stays busy, or is silent for too long.
        """
        pauses = iter(_PAUSES_S)
        while True:
            await self._permits.acquire()
            is_lowered, pause_s = False, 0.0
            try:
                async with aclosing(self._attempt(request)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except _BusyError as busy:
                is_lowered = busy.is_throttled and self._lower()
                planned_s = next(pauses, None)
                if planned_s is None:
                    raise RemoteError(f"{busy}: try again later, or with fewer parts at once") from None
                pause_s = busy.pause_s if busy.pause_s is not None else planned_s
            except _RejectedError as rejected:
                if not self._give_up_fields(request, str(rejected)):
                    raise RemoteError(str(rejected)) from None
            finally:
                if not is_lowered:
                    self._permits.release()
            await self._sleep(pause_s)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _attempt(self, request: ChatRequest) -> AsyncGenerator[Piece, None]:
        url, httpx = f"{self._url}/chat/completions", self._httpx
        lines, has_finished = _Lines(), False
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            asked = self._http.build_request("POST", url, json=self._body(request), timeout=timeout)
            async with aclosing(await self._heard(self._http.send(asked, stream=True))) as response:
                if response.status_code != 200:
                    await self._heard(response.aread())
                    raise self._refusal(response)
                yield Piece()
                received = response.aiter_bytes()
                while (data := await self._heard(anext(received, None))) is not None:
                    for payload in lines.push(data):
                        if payload == b"[DONE]":
                            break
                        piece = _piece(payload)
                        has_finished = has_finished or piece.finish_reason is not None
                        yield piece
        except _MalformedError as error:
            raise StreamBrokenError(f"{url} {error}") from None
        except (httpx.RequestError, TimeoutError) as error:
            if has_finished:  # once the text is complete, nothing that follows matters
                return
            if isinstance(error, httpx.TimeoutException | TimeoutError):
                raise self._silence() from None
            raise StreamBrokenError(_broken(url, error)) from None
        if not has_finished:
            raise StreamBrokenError(f"{url} ended the stream before the text: see the server's log")

    async def _heard(self, sent: Awaitable[_Sent]) -> _Sent:
        """Return what the server sends, unless it is silent for too long; what it sends elsewhere counts too."""
        async with asyncio.timeout(self._timeout_s) as silence:
            self._silences.add(silence)
            try:
                heard = await sent
            finally:
                self._silences.discard(silence)
        end_s = asyncio.get_running_loop().time() + self._timeout_s
        for other in self._silences:
            if not other.expired():
                other.reschedule(end_s)
        return heard

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._http.get(self._url + path)
        except self._httpx.TimeoutException:
            raise self._silence() from None
        except self._httpx.RequestError as error:
            raise RemoteError(_broken(self._url + path, error)) from None

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        obeyed = {name: value for name, value in request.grammar.items() if name in self._grammar_fields}
        body = {
            "model": self.model,
            "messages": [dict(message) for message in request.messages],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop": None if obeyed or request.stop is None else [request.stop],
            "stream": True,
            "stream_options": {"include_usage": True},
            **obeyed,
            **(_CONTINUATIONS[self._owner] if request.is_continuation else {}),
        }
        return {name: value for name, value in body.items() if value is not None and name not in self._refused}

    def _give_up_fields(self, request: ChatRequest, message: str) -> bool:
        """Leave out from now on what the server refused, and return whether that is anything."""
        sent = self._body(request).keys()
        grammar = sent & self._grammar_fields
        named = {name for name in [*_DISPENSABLE, *grammar] if name in sent and name in message}
        dropped = named or grammar
        self._refused |= dropped - grammar
        self._grammar_fields -= dropped
        return bool(dropped)

    def _lower(self) -> bool:
        """Have one stream fewer at once, if there can be, by keeping the permit of one that was refused."""
        if self.max_streams == 1:
            return False
        self.max_streams -= 1
        return True

    def _refusal(self, response: httpx.Response) -> Exception:
        status, url = response.status_code, response.request.url
        said = f"{url} answers {status}: {failure_text(response)}"
        if status in (429, 503):
            pause_s = retry_after_s(response)
            pause_s = None if pause_s is None else min(pause_s, _LONGEST_PAUSE_S)
            return _BusyError(said, is_throttled=status == 429, pause_s=pause_s)
        if status in (400, 422):
            return _RejectedError(said)
        if status in (401, 403):
            return RemoteError(f"{said}: {KEY_REMEDY}")
        if status == 404:
            listed = f" it serves {', '.join(self._listed)};" if self._listed else ""
            return RemoteError(f"{said}; asked for model {self.model!r};{listed} correct model or address")
        if status >= 500:
            return StreamBrokenError(f"{said}: see the server's log")
        return RemoteError(said)

    def _silence(self) -> RemoteError:
        return RemoteError(f"{self._url} was silent for {self._timeout_s:g} s: check the server, or allow it more time")


class _BusyError(RemoteError):
    """The server will take a request later."""

    def __init__(self, message: str, *, is_throttled: bool, pause_s: float | None) -> None:
        super().__init__(message)
        self.is_throttled, self.pause_s = is_throttled, pause_s


class _RejectedError(RemoteError):
    """The server does not understand a request, or does not want to."""


class _MalformedError(Exception):
    """An event is none of the protocol, or says that the server failed."""


class _Lines:
    """Takes a stream's bytes as they come, and gives the data of each server-sent event.

    Only line feeds end lines: JSON may hold what else counts as a line's end in text, such as U+2028.
    """

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [line.strip() for line in lines]
        return [event.removeprefix(b"data:").strip() for event in events if event.startswith((b"data:", b"{"))]


def _piece(payload: bytes) -> Piece:
    try:
        document = json.loads(payload)
        if error := document.get("error"):
            raise _MalformedError(
                f"broke off: {one_line(error.get('message', error) if isinstance(error, dict) else error)}"
            )
        choice = (document.get("choices") or [{}])[0]
        text = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        usage = document.get("usage")
        return Piece(str(text), choice.get("finish_reason"), _usage(usage) if usage else None)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _MalformedError("streams something else than chat completions: check the address") from None


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        num_prompt=int(usage.get("prompt_tokens") or 0),
        num_cached=int(details.get("cached_tokens") or 0),
        num_new=int(usage.get("completion_tokens") or 0),
    )


def _broken(url: str, error: Exception) -> str:
    return f"cannot reach {url}, or it broke off ({one_line(error) or type(error).__name__}): check address and server"
