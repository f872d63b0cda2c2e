"""`--api-key-env` of `plan` and of `eval judge`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chat_lab import QUESTION, ChatLab, serving
from foretell.cli.main import run
from foretell.plato.answers import AnswerFile, AnswerRecord, Question
from foretell.plato.events import Answer

SECRET = "sk-3141592653"
Commands = Callable[[str], list[list[str]]]


@pytest.fixture
def lab() -> Iterator[ChatLab]:
    with serving() as port:
        yield port.serve(ChatLab())


@pytest.fixture
def commands(lab: ChatLab, tmp_path: Path) -> Commands:
    """What asks the server with the key of a variable."""
    answers = AnswerFile(tmp_path / "answers.jsonl", {})
    for arm in ("plain", "plato"):
        answer = Answer(text=arm, mode="plato", plan=None, is_direct=True)
        question = Question(question_id="1", category="qa", text=QUESTION)
        answers.add(AnswerRecord(question=question, arm=arm, answer=answer, wall_s=1.0, mean_logprob=None))
    judge = ["eval", "judge", str(tmp_path / "answers.jsonl"), "--model", "tiny", "--base-url", lab.url]
    plan = ["plan", QUESTION, "--backend", "openai", "--base-url", lab.url]
    return lambda variable: [[*command, "--api-key-env", variable] for command in (plan, judge)]


def test_the_key_arrives(lab: ChatLab, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.key = SECRET
    monkeypatch.setenv("LAB_KEY", f"{SECRET}\n")
    assert [run(command) for command in commands("LAB_KEY")] == [0, 0]
    assert lab.keys_sent == {f"Bearer {SECRET}"}


def test_a_refused_key_is_one_line_that_names_the_option(
    lab: ChatLab, commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.key = "another"
    monkeypatch.setenv("LAB_KEY", SECRET)
    for command in commands("LAB_KEY"):
        assert run([*command, "--debug"]) != 0
        *_, line = (printed := capsys.readouterr()).err.splitlines()
        assert line.startswith("foretell: error: http")
        assert "401: not a key: Bearer …" in line
        assert "--api-key-env" in line
        assert SECRET not in printed.err + printed.out
    assert lab.keys_sent == {f"Bearer {SECRET}"}


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("NO_KEY", "--api-key-env names NO_KEY, which is not set: export it, or drop the option"),
        (SECRET, "--api-key-env names no variable that is set: export one that holds the key, and give its name"),
    ],
)
def test_a_variable_that_is_not_set_is_one_line(
    variable: str, message: str, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands(variable):
        assert run(command) == 2
        assert capsys.readouterr().err == f"foretell: error: {message}\n"


def test_without_a_server_a_key_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", QUESTION, "--api-key-env", "LAB_KEY"]) == 2
    assert "--api-key-env has no effect with --backend embedded" in capsys.readouterr().err
