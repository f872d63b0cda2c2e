"""What the command line says before any model is loaded: help, usage errors, prompts that cannot be used."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import foretell as package
from foretell.cli import main
from foretell.cli.options import AnswerOptions, DecodingOptions, EngineOptions, SamplingOptions
from foretell.errors import InputError

from .conftest import SOURCE, Foretell, cli_environment

COMMANDS = ["generate", "chat", "demo", "tune", "bench", "doctor"]


def assert_one_line_error(stderr: str, *parts: str) -> None:
    assert stderr.startswith("foretell: error: ")
    assert stderr.count("\n") == 1
    for part in parts:
        assert part in stderr


def test_version(foretell: Foretell) -> None:
    result = foretell("--version")
    assert (result.returncode, result.stdout) == (0, f"foretell {package.__version__}\n")


def test_help_lists_the_commands(foretell: Foretell) -> None:
    result = foretell("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(foretell: Foretell, command: str) -> None:
    result = foretell(command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"foretell {command}" in result.stdout


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["generate", "--no-such-option"], "No such option"),
        (["generate", "--threads", "two", "x"], "threads"),
        (["generate", "--dtype", "float8", "x"], "float8"),
        (["nonsense"], "nonsense"),
        (["generate", "x", "--top-p", "0.9"], "`top_p`=0.9 has no effect with `temperature`=0"),
        (["generate", "x", "--temperature", "-1"], "`temperature` must be at least"),
        (["generate", "x", "--stop", ""], "empty string"),
        (["generate", "x", "--n", "3"], "`n`=3"),
        (["generate", "x", "--max-new-tokens", "4", "--min-new-tokens", "5"], "above `max_new_tokens`"),
        (["generate", "x", "--file", "y"], "both given"),
        (["generate", "x", "--model", "none/such", "--regex", "("], "`regex` '(' is refused"),
        (["generate", "x", "--model", "none/such", "--json-schema", '{"type": 5}'], "`json_schema` is refused"),
        (["generate", "x", "--model", "none/such", "--json-schema", "{'type': 5}"], "`json_schema` is not JSON"),
        (["generate", "x", "--json-schema", "{}", "--regex", "a"], "both given: drop one"),
        (["chat", "--model", "none/such", "--regex", "("], "`regex` '(' is refused"),
        (["demo", "--n", "2", "--temperature", "1"], "one answer"),
        (["train", "draft", "--tokens", "0"], "--tokens"),
        (["train", "draft", "--seed", str(2**63)], "--seed"),
        (["train", "ngram", "--tokens", "-5"], "--tokens"),
        (["train", "ngram", "--samples", "0"], "--samples"),
        (["train", "ngram", "--max-bytes", "0"], "--max-bytes"),
        (["train", "ngram", "--seed", "-1"], "--seed"),
        (["train", "prompts", "--slots", "6"], "less than or equal to 5"),
        (["train", "prompts", "--draft", "none/such", "--capacity", "prefix"], "`capacity`='prefix' is of no use"),
        (["train", "prompts", "--draft", "none/such", "--slots", "2"], "`slots`=2 is of no use with `draft`"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(foretell: Foretell, args: list[str], part: str) -> None:
    result = foretell(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert_one_line_error(result.stderr, part)


def test_an_end_of_file_is_no_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def app(**_: object) -> None:
        raise typer.Abort from EOFError("Ran out of input")  # what typer makes of it

    monkeypatch.setattr(main, "app", app)
    assert main.run([]) == 1
    assert_one_line_error(capsys.readouterr().err, "unexpected end of a file: Ran out of input")


def test_a_missing_file(foretell: Foretell, tmp_path: Path) -> None:
    result = foretell("generate", "--file", tmp_path / "none.txt")
    assert result.returncode == 1
    assert_one_line_error(result.stderr, "none.txt", "No such file")


def test_a_file_that_is_not_utf8(foretell: Foretell, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("naïve".encode("latin-1"))
    result = foretell("generate", "--file", file)
    assert result.returncode == 1
    assert_one_line_error(result.stderr, "latin.txt", "not UTF-8", "0xef at offset 2")


@pytest.mark.parametrize("args", [[""], ["  \n"], [], ["-"]])
def test_an_empty_prompt(foretell: Foretell, args: list[str]) -> None:
    result = foretell("generate", *args)
    assert result.returncode == 1
    assert_one_line_error(result.stderr, "the prompt is empty")


def test_stdin_that_is_not_utf8(foretell: Foretell) -> None:
    result = foretell("generate", stdin=b"\xff\xfe")
    assert result.returncode == 1
    assert_one_line_error(result.stderr, "stdin is not UTF-8")


@pytest.mark.parametrize("args", [["--debug", "generate", ""], ["generate", "--debug", ""]])
def test_debug_prints_the_traceback(foretell: Foretell, args: list[str]) -> None:
    result = foretell(*args)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "InputError" in result.stderr


def test_sampling_takes_what_was_given_over_defaults() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
    sampling = DecodingOptions(top_p=0.8, seed=3).sampling(defaults)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.seed) == (0.2, 0.8, 1.1, 3)


def test_temperature_zero_drops_the_default_filters() -> None:
    sampling = DecodingOptions(temperature=0.0).sampling({"temperature": 0.2, "top_p": 0.9, "top_k": 50})
    assert sampling.is_greedy
    assert (sampling.top_p, sampling.top_k) == (1.0, 0)


def test_a_schema_comes_as_text_or_as_a_file(tmp_path: Path) -> None:
    text = '{"enum": [1, 2]}'
    (tmp_path / "schema.json").write_text(text, encoding="utf-8")
    for given in (f"  {text}", str(tmp_path / "schema.json")):
        sampling = AnswerOptions(json_schema=given, top_k=3).sampling({"temperature": 0.5})
        assert json.loads(str(sampling.json_schema)) == {"enum": [1, 2]}
        assert (sampling.temperature, sampling.top_k) == (0.5, 3)
    with pytest.raises(InputError, match=r"none\.json.*No such file"):
        AnswerOptions(json_schema=str(tmp_path / "none.json")).sampling()


def test_each_level_of_options_adds_to_the_one_above() -> None:
    levels = (EngineOptions, SamplingOptions, DecodingOptions, AnswerOptions)
    names = [options.__dataclass_fields__.keys() for options in levels]
    assert names[0] < names[1] < names[2] < names[3]


def test_help_and_readme_name_every_drafter() -> None:
    from foretell.drafters.catalog import DRAFTERS, MODEL_DRAFTERS, PROMPTS_STAGED, STAGED_PROMPTS

    command_line = (SOURCE.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    assert not [name for name in MODEL_DRAFTERS if f" {name}" not in command_line]
    for document in ("docs/cli.md", "README.md"):
        text = (SOURCE.parent / document).read_text(encoding="utf-8")
        assert not [name for name in (*DRAFTERS, PROMPTS_STAGED, STAGED_PROMPTS) if name not in text]


@pytest.mark.parametrize(("closed", "code"), [("<&-", 2), (">&-", 2), ("2>&-", 2)])
def test_a_closed_stream_is_no_stumbling_block(closed: str, code: int, home: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m foretell generate hi --max-new-tokens 0 {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=cli_environment(home))
    assert done.returncode == code
    assert "unexpected" not in done.stdout + done.stderr
