from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foretell.bench import peak_rss
from foretell.bench.memory import measure_memory
from foretell.bench.peak_rss import peak_rss_bytes
from foretell.bench.settings import EngineSettings


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, num_steps: int) -> None: ...

    def step(self, label: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def child(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_each_arm_gets_a_child_that_is_told_arm_and_engine() -> None:
    program = (
        "import json, sys\n"
        "engine = json.loads(sys.argv[4])\n"
        "assert sys.argv[1::2] == ['--arm', '--engine']\n"
        "print('chatter')\n"
        "print(json.dumps({'peak_rss_bytes': len(sys.argv[2]) * engine['threads']}))"
    )
    engine = EngineSettings(threads=3, corpus=Path("some/corpus.txt"))
    memory = measure_memory(["none", "lookup"], engine, Notes(), command=child(program))
    assert memory == {"none": 12, "lookup": 18}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit('no such model')", "no such model"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("print('not a document')", "gave no measurement"),
        ("pass", "gave no measurement"),
        ("print('{}')", "gave no measurement"),
    ],
)
def test_a_child_that_fails_leaves_its_arm_unknown_and_says_why(program: str, reason: str) -> None:
    notes = Notes()
    assert measure_memory(["all"], EngineSettings(), notes, command=child(program)) == {"all": None}
    assert notes.notes[0] == "measuring the memory of all"
    assert reason in notes.notes[1]


def test_engine_settings_survive_json() -> None:
    for engine in (EngineSettings(), EngineSettings(model="m", corpus=Path("c"), compile=True)):
        assert EngineSettings.from_json(engine.to_json()) == engine


def test_the_peak_does_not_include_the_parents() -> None:
    program = "from foretell.bench.peak_rss import peak_rss_bytes; print(peak_rss_bytes())"
    ballast = bytearray(b"x") * 300_000_000
    result = subprocess.run(child(program), capture_output=True, text=True, check=True)
    assert len(ballast) < peak_rss_bytes()
    assert 1_000_000 < int(result.stdout) < 200_000_000


def test_without_proc_the_peak_comes_from_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(peak_rss.Path, "read_text", fail)
    assert 1_000_000 < peak_rss_bytes() < 1 << 40
