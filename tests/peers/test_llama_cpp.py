"""Planned answers from llama.cpp's Python server: `make test-peers`."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from foretell.models.files import find_default_gguf
from foretell.plato.events import AnswerText, last_answer
from foretell.plato.options import PlatoOptions
from foretell.plato.remote import stream_remote_plan

pytestmark = pytest.mark.peers

_START_S = 120.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp is not installed: pip install 'llama-cpp-python[server]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(find_default_gguf()), "--n_ctx", "4096"]
    # By default this server ends a stream as soon as another is asked for.
    command += ["--port", str(port), "--interrupt_requests", "false"]
    server = subprocess.Popen(command)
    try:
        yield _wait_for(f"http://127.0.0.1:{port}", server)
    finally:
        server.terminate()
        server.wait()


def test_a_plan_is_kept_to_its_grammar_and_answered(url: str) -> None:
    options = PlatoOptions(force_plan=True, max_parts=3, max_answer_tokens=96)
    events = list(stream_remote_plan(url, None, "What are wind, water and solar power good for?", options))
    answer = last_answer(events)
    assert answer.plan is not None
    assert 2 <= len(answer.plan) <= 3
    assert answer.repairs == ()
    assert answer.text == "".join(event.text for event in events if isinstance(event, AnswerText)) != ""


def test_a_short_question_is_answered_directly(url: str) -> None:
    answer = last_answer(stream_remote_plan(url, None, "What is 2 + 2?", PlatoOptions(max_answer_tokens=32)))
    assert answer.is_direct
    assert answer.text


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> str:
    give_up_s = time.monotonic() + _START_S
    while time.monotonic() < give_up_s and server.poll() is None:
        try:
            httpx.get(f"{url}/v1/models").raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return url
    raise AssertionError(f"the server did not start within {_START_S:g} s")
