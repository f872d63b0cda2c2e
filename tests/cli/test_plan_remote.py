"""`foretell plan --backend openai`."""

from __future__ import annotations

import json

import pytest

from chat_lab import QUESTION, ChatLab, serving
from foretell.cli.main import run


def test_a_server_answers_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as port:
        command = ["plan", QUESTION, "--backend", "openai", "--base-url", port.serve(ChatLab()).url]
        assert run(command) == 0
        shown = capsys.readouterr()
        assert run([*command, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out.splitlines()[-1])["answer"]
        assert run([*command, "--model", "huge"]) == 1
    assert shown.out.strip() == answer["text"]
    assert answer["text"].startswith("**Wind**\n\nText of 1")
    assert "foretell: part 3 begins\n" in shown.err
    assert "asked for model 'huge'; it serves tiny" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--stop", "--top-k", "--n", "--verification"])
def test_plan_has_no_option_that_it_would_ignore(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Why?", option, "1"]) == 2
    assert f"No such option: {option}" in capsys.readouterr().err


def test_no_answer_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Why?", "--max-new-tokens", "0"]) == 2
    assert "`max_answer_tokens` must be at least 1, got 0" in capsys.readouterr().err
