"""`foretell generate` and `foretell demo` on a tiny random model, as subprocesses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Foretell, cli_environment

SHORT = ["--dtype", "float32", "--threads", "1", "--max-new-tokens", "12"]


def test_the_answer_is_all_of_stdout(foretell: Foretell, tiny_model: Path) -> None:
    result = foretell("generate", "--model", tiny_model, *SHORT, "--raw", "abcabcabc")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\n")
    assert result.stderr == ""


def test_json_is_one_document_on_the_last_line(foretell: Foretell, tiny_model: Path) -> None:
    args = ["generate", "--model", tiny_model, *SHORT, "--json", "hello"]
    plain, drafted = (
        json.loads(foretell(*args, *more).stdout)
        for more in (["--drafter", "none"], ["--drafter", "draft", "--draft", tiny_model])
    )
    (completion,) = plain["completions"]
    assert completion["token_ids"] == drafted["completions"][0]["token_ids"]
    assert completion["stats"]["num_draft_passes"] == 0 < drafted["completions"][0]["stats"]["num_draft_passes"]
    assert drafted["settings"]["draft"] == str(tiny_model)
    assert completion["stats"]["num_output_tokens"] == len(completion["token_ids"])
    assert {"num_draft_passes", "target_bytes", "bytes_per_token", "e2", "draft_share"} <= completion["stats"].keys()
    assert completion["sources"] == ["target"] * len(completion["token_ids"])
    assert plain["provenance"]["foretell"]
    assert plain["settings"]


@pytest.mark.parametrize("args", [["--regex", "(red|green)!{3}"], ["--json-schema", '{"enum": ["red", "green"]}']])
def test_an_answer_may_be_constrained(foretell: Foretell, tiny_model: Path, args: list[str]) -> None:
    result = foretell("generate", "--model", tiny_model, *SHORT, *args, "hello")
    assert result.stdout in ("red!!!\n", "green!!!\n", '"red"\n', '"green"\n')
    assert (result.returncode, result.stderr) == (0, "")


def test_samples_are_told_apart_and_a_seed_repeats_them(foretell: Foretell, tiny_model: Path) -> None:
    args = ["generate", "--model", tiny_model, *SHORT, "--temperature", "1", "--seed", "5", "--n", "2"]
    first = foretell(*args, stdin=b"from stdin")
    assert first.returncode == 0, first.stderr
    assert "--- 1 of 2 ---" in first.stdout
    assert "--- 2 of 2 ---" in first.stdout
    assert foretell(*args, stdin=b"from stdin").stdout == first.stdout


def test_a_rule_that_the_drafter_cannot_serve_is_refused_in_one_line(foretell: Foretell, tiny_model: Path) -> None:
    args = ["generate", "--model", tiny_model, *SHORT, "--temperature", "1", "--verification", "traversal"]
    refused = foretell(*args, "--drafter", "lookup", "hello")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "foretell: error: `verification`='traversal' tests what a draft model drew, drafter 'lookup' runs none"
    )
    assert refused.stderr.count("\n") == 1
    assert foretell(*args, "--drafter", "none", "hello").returncode == 0


def test_verbose_prints_settings_and_figures_to_stderr(foretell: Foretell, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("ünïcödé", encoding="utf-8")
    result = foretell("generate", "--model", tiny_model, *SHORT, "--verbose", "--file", file)
    assert result.returncode == 0, result.stderr
    assert "max_new_tokens" in result.stderr
    assert "tokens per pass" in result.stderr


def test_sources_are_counted_beside_the_same_answer(foretell: Foretell, tiny_model: Path) -> None:
    args = ["generate", "--model", tiny_model, *SHORT, "--raw", "abcabcabc"]
    result = foretell(*args, "--show-sources")
    assert (result.returncode, result.stdout) == (0, foretell(*args).stdout)
    counts = re.fullmatch(r"proposed by: (\w+ \d+(?:, \w+ \d+)*)\n", result.stderr)
    assert counts is not None
    assert sum(map(int, re.findall(r"\d+", counts[1]))) == 12


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (["generate", "--model", "no/such-folder", "x"], 1, "no/such-folder"),
        (["generate", "--drafter", "oracle", "x"], 2, "oracle"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    foretell: Foretell, tiny_model: Path, args: list[str], code: int, part: str
) -> None:
    model = [] if "--model" in args else ["--model", tiny_model]
    result = foretell(*args, *model)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith("foretell: error: ")
    assert result.stderr.count("\n") == 1
    assert part in result.stderr


def test_a_prompt_beyond_the_context_is_one_line(foretell: Foretell, tiny_model: Path) -> None:
    result = foretell("generate", "--model", tiny_model, "--dtype", "float32", "--raw", stdin=b"x" * 3000)
    assert result.returncode == 1
    assert result.stderr.startswith("foretell: error: ")
    assert "2048" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error(home: Path, tiny_model: Path) -> None:
    args = ["generate", "--model", str(tiny_model), "--dtype", "float32", "--max-new-tokens", "400", "--raw", "x"]
    with subprocess.Popen(
        [sys.executable, "-m", "foretell", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cli_environment(home),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_demo_compares_with_plain_decoding(foretell: Foretell, tiny_model: Path) -> None:
    result = foretell("demo", "--model", tiny_model, *SHORT, "abcabc")
    assert result.returncode == 0, result.stderr
    for part in ("tokens/s", "plain", "with drafts", "tokens per pass", "acceptance rate"):
        assert part in result.stdout
    assert result.stdout.endswith("identical: yes\n")
    assert "\x1b[3" not in result.stdout


@pytest.mark.parametrize("command", [["generate", "--raw"], ["demo"]])
def test_interrupting_ends_the_line_with_code_130(home: Path, tiny_model: Path, command: list[str]) -> None:
    args = [*command, "--model", str(tiny_model), "--dtype", "float32", "--max-new-tokens", "1900", "x"]
    with subprocess.Popen(
        [sys.executable, "-m", "foretell", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cli_environment(home),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell has it ignored
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1 if command[0] == "generate" else len("x\n\n") + 1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
    assert stdout.endswith(b"\n")
