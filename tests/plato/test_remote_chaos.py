"""Whatever a server does and whenever, no text is lost and all that was opened is closed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_lab import QUESTION, answer_of, hurry, of_type
from foretell.plato.events import FellBack
from foretell.plato.options import PlatoOptions
from foretell.plato.plan import Part
from foretell.plato.remote import stream_remote_plan
from plan_lab import plans, written


class Chaos(httpx.AsyncBaseTransport):
    """Writes a plan and its parts in pieces at random times, and drops some streams."""

    def __init__(self, parts: list[Part], random: Random, owner: str) -> None:
        self.parts, self.random, self.owner = parts, random, owner
        self.num_open = self.most_open = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "tiny", "owned_by": self.owner}]})
        await self._pause()
        if self.random.random() < 0.1:
            return httpx.Response(self.random.choice([429, 503, 500]))
        messages = json.loads(request.content)["messages"]
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        asked = re.findall(r"Title (\d)", messages[-1]["content"])
        text = asked[-1] * (9 - len(begun.partition("\n\n")[2])) if asked else written(self.parts)
        return httpx.Response(200, content=self._stream(text, is_whole=not asked))

    async def _stream(self, text: str, *, is_whole: bool) -> AsyncIterator[bytes]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for mark in text:
                await self._pause()
                if not is_whole and self.random.random() < 0.03:
                    raise httpx.ReadError("gone")
                yield event({"choices": [{"delta": {"content": mark}}]})
            yield event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        finally:
            self.num_open -= 1

    async def _pause(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)


def event(document: Any) -> bytes:
    return f"data: {httpx.Response(200, json=document).text}\n\n".encode()


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(["vllm", "somebody"]))
def test_whatever_happens_no_text_is_lost(parts: list[Part], seed: int, max_parallel: int, owner: str) -> None:
    chaos = Chaos(parts, Random(seed), owner)
    options = PlatoOptions(max_parallel=max_parallel, has_headings=False, force_plan=True)
    events = list(stream_remote_plan("http://lab", None, QUESTION, options, transport=chaos, sleep=hurry))
    answer = answer_of(events)
    assert chaos.num_open == 0
    assert chaos.most_open <= max_parallel + 1
    if answer.is_direct:
        assert of_type(events, FellBack)
        return
    assert [result.part for result in answer.parts] == parts
    assert answer.text == "\n\n".join(result.text for result in answer.parts if result.text)
    for result in answer.parts:
        assert result.text == str(result.part.id) * (9 if result.reason == "stop" else len(result.text))
