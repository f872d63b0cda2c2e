"""A server that answers as a test wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chat_lab import ChatLab, Port, serving


@pytest.fixture(scope="module")
def port() -> Iterator[Port]:
    with serving() as port:
        yield port


@pytest.fixture
def lab(port: Port) -> ChatLab:
    return port.serve(ChatLab())
