"""`foretell chat` over pipes: turns, the end of input, Ctrl-C, a full context."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from .conftest import Foretell, cli_environment

MODEL = ["--dtype", "float32", "--threads", "1"]


def test_each_line_is_a_turn(foretell: Foretell, tiny_model: Path) -> None:
    args = ["chat", "--model", tiny_model, *MODEL, "--system", "Be brief.", "--max-new-tokens", "5", "--verbose"]
    result = foretell(*args, stdin=b"one\n\ntwo\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("tokens per pass") == 2


def test_a_full_context_is_said(foretell: Foretell, tiny_model: Path) -> None:
    args = ["chat", "--model", tiny_model, *MODEL, "--context-tokens", "128", "--max-new-tokens", "500"]
    result = foretell(*args, stdin=b"x" * 70 + b"\n" + b"y" * 70 + b"\n" + b"z\n")
    assert "context" in result.stderr
    assert "Traceback" not in result.stderr


def test_interrupting_ends_the_answer_only(home: Path, tiny_model: Path) -> None:
    args = ["chat", "--model", str(tiny_model), *MODEL, "--max-new-tokens", "1900"]
    with subprocess.Popen(
        [sys.executable, "-m", "foretell", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cli_environment(home),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == b"(stopped)\n"
        process.stdin.close()
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0
