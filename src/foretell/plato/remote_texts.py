"""Texts that a server writes at the same time: a stream for each, and one queue for what all of them bring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from foretell.plato.plan import Part
from foretell.plato.server_client import ChatRequest, Piece, ServerClient, Usage
from foretell.text.chat_template import Message


@dataclass(eq=False, slots=True)
class RemoteText:
    """A text that the server writes: the plan, a part, or the whole answer."""

    request: ChatRequest
    part: Part | None = None
    beginning: str = ""
    """What the model's message begins with, given to it; only where the server can continue."""
    holds: frozenset[int] = frozenset()
    """Parts whose text the conversation holds, its own included."""
    started_s: float = 0.0
    is_retried: bool = False
    is_accepted: bool = False
    """The server began with it."""
    text: str = ""
    num_shown: int = 0
    """Characters that are part of the answer."""
    finish_reason: str | None = None
    num_tokens: int = 0
    """Of ended streams, as the two below; a text that goes on takes several."""
    num_computed: int = 0
    num_reused: int = 0
    num_pieces: int = 0
    """Of the current stream: its tokens, as long as the server has not counted them."""
    usage: Usage | None = None

    @property
    def message(self) -> Message:
        """What the model says, as far as it is written."""
        return assistant_message(self.beginning + self.text)

    def take(self, piece: Piece) -> None:
        """Add what the stream brought."""
        self.is_accepted = True
        self.text += piece.text
        self.num_pieces += bool(piece.text)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage

    def end_stream(self) -> None:
        """Count what the stream took."""
        usage = self.usage or Usage(num_prompt=0, num_cached=0, num_new=self.num_pieces)
        self.num_tokens += usage.num_new
        self.num_computed += usage.num_prompt - usage.num_cached
        self.num_reused += usage.num_cached
        self.num_pieces, self.usage = 0, None


@dataclass(frozen=True, slots=True)
class Note:
    """A piece of a text, or its end: None if all went well. Without a text it says that the deadline is over."""

    text: RemoteText | None
    outcome: Piece | Exception | None


class RemoteTexts:
    """The streams of one question.

    Args:
        server: who writes.
        sleep: waits so many seconds.
    """

    def __init__(self, server: ServerClient, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._server, self._sleep = server, sleep
        self._notes: asyncio.Queue[Note] = asyncio.Queue()
        self._tasks: dict[RemoteText, asyncio.Task[None]] = {}
        self._left: list[asyncio.Task[None]] = []  # to be awaited at the end
        self._all: list[RemoteText] = []

    def __contains__(self, text: object) -> bool:
        return text in self._tasks

    def __iter__(self) -> Iterator[RemoteText]:
        """Iterate over those being written."""
        return iter(list(self._tasks))

    @property
    def num_computed(self) -> int:
        """Rows computed for the prompts of all streams that have ended."""
        return sum(text.num_computed for text in self._all)

    @property
    def num_reused(self) -> int:
        """Rows of their prompts whose keys and values were there already."""
        return sum(text.num_reused for text in self._all)

    def start(self, text: RemoteText) -> RemoteText:
        """Have a text written."""
        self._all.append(text)
        self.go_on(text, text.request.max_tokens)
        return text

    def go_on(self, text: RemoteText, max_tokens: int) -> None:
        """Have a text written further; once it is begun, only where the server can continue."""
        request = replace(text.request, max_tokens=max(1, max_tokens))
        if text.message["content"]:
            request = replace(request, messages=[*request.messages, text.message], is_continuation=True)
        self._tasks[text] = asyncio.create_task(self._pump(text, request))

    def stop(self, text: RemoteText) -> None:
        """Give up a text that is being written: nothing more is said of it."""
        task = self._tasks.pop(text)
        task.cancel()
        self._left.append(task)
        text.end_stream()

    def expire_after(self, wait_s: float) -> None:
        """Have it said when a deadline is over."""
        self._left.append(asyncio.create_task(self._expire(wait_s)))

    async def notes(self) -> AsyncGenerator[Note, None]:
        """Yield what happens, without end."""
        while True:
            note = await self._notes.get()
            if note.text is not None and note.text not in self._tasks:
                continue
            if note.text is not None and isinstance(note.outcome, Piece):
                note.text.take(note.outcome)
            elif note.text is not None:
                del self._tasks[note.text]
                note.text.end_stream()
            yield note

    async def close(self) -> None:
        """Close all streams."""
        tasks = [*self._left, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, text: RemoteText, request: ChatRequest) -> None:
        outcome: Exception | None = None
        try:
            async with aclosing(self._server.stream(request)) as pieces:
                async for piece in pieces:
                    self._notes.put_nowait(Note(text, piece))
        except Exception as error:  # goes to whoever reads the notes
            outcome = error
        self._notes.put_nowait(Note(text, outcome))

    async def _expire(self, wait_s: float) -> None:
        await self._sleep(max(0.0, wait_s))
        self._notes.put_nowait(Note(None, None))


def assistant_message(text: str) -> Message:
    """Return what the model said as a message."""
    return {"role": "assistant", "content": text}
