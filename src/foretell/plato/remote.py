"""Planned answers from any server that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from foretell.errors import ConfigError
from foretell.plato.events import Event
from foretell.plato.options import PlatoOptions
from foretell.plato.remote_run import RemoteRun
from foretell.plato.server_client import ServerClient

if TYPE_CHECKING:
    import httpx

Sleep = Callable[[float], Awaitable[None]]


def stream_remote_plan(
    base_url: str,
    model: str | None,
    question: str,
    options: PlatoOptions | None = None,
    *,
    api_key: str | None = None,
    timeout_s: float = 120.0,
    transport: httpx.AsyncBaseTransport | None = None,
    sleep: Sleep = asyncio.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Event]:
    """Do what `remote_plan` does, where no event loop is running. Close the iterator to cancel.

    Args:
        base_url: the server's address, with or without `/v1`.
        model: the name by which the server knows it; None is the first that it lists.
        question: what to answer.
        options: how.
        api_key: sent as a bearer token; None sends none.
        timeout_s: how long the server may be silent.
        transport: what carries requests; None is the network.
        sleep: waits so many seconds.
        clock: seconds, monotonic.

    Raises:
        ConfigError: an event loop is running in this thread.
        ConfigError, InputError, RemoteError: see `ServerClient` and `remote_plan`.
    """
    if _is_loop_running():
        raise ConfigError("an event loop is running here: iterate over `remote_plan` instead of `stream_remote_plan`")
    options = options or PlatoOptions()
    server = ServerClient(
        base_url,
        model,
        api_key=api_key,
        max_streams=1 + options.max_parallel,
        timeout_s=timeout_s,
        transport=transport,
        sleep=sleep,
    )
    with asyncio.Runner() as runner:
        events = remote_plan(server, question, options, sleep=sleep, clock=clock)
        try:
            while (event := runner.run(_next(events))) is not None:
                yield event
        finally:
            runner.run(events.aclose())
            runner.run(server.aclose())


async def remote_plan(
    server: ServerClient,
    question: str,
    options: PlatoOptions | None = None,
    *,
    sleep: Sleep = asyncio.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncGenerator[Event, None]:
    """Answer a question part by part, yielding what happens; the last event has the answer.

    A stream that breaks off is tried once more: it goes on where the server can do that, else begins anew, unless its
    text is part of the answer already; such a part ends as "failed" and keeps its text. A second `PartStarted` of a
    part says that it begins anew. Where there is no plan, or no part could be written, the question is answered
    directly.

    Tokens and rows of prompts are counted by the server, at a stream's end. If it does not count them, a piece of text
    is taken for a token, and there are no rows.

    Close the generator to cancel: all streams are closed, by which servers learn that they may stop.

    Args:
        server: who writes.
        question: what to answer.
        options: how; after `deadline_s`, parts that the server has not accepted yet do not begin either.
        sleep: waits so many seconds.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the options choose what is the server's to choose.
        InputError: the question is empty.
        RemoteError: every attempt to get an answer failed.

    Source: arXiv:2402.12280 (Plato); Skeleton-of-Thought, arXiv:2307.15337, as a baseline.
    """
    run = RemoteRun(server, question, options or PlatoOptions(), sleep, clock)
    try:
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event
    finally:
        await run.close()


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)
