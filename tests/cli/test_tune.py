"""`foretell tune`, `bench` and `doctor` on a tiny random model, as subprocesses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.tune import Verdict
from foretell.cli.tune_prompts import draw_sizes
from foretell.errors import ConfigError

from .conftest import Foretell

MODEL = ["--dtype", "float32", "--threads", "1"]


def test_tune_keeps_a_profile_that_generate_then_uses(foretell: Foretell, tiny_model: Path, tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    result = foretell("tune", "--model", tiny_model, *MODEL, "--json", "--plot", plot)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    profile = document["profile"]
    assert len(profile["pass_s"]) == len(profile["contexts"])
    assert all(len(row) == len(profile["num_rows"]) for row in profile["pass_s"])
    assert document["verdict"]["num_different_outputs"] == 0
    assert Path(document["file"]).is_file()
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    table = document["next_ids"]
    assert (table["origin"], table["num_bytes"]) == ("cached", 259 * 4 * 2)
    assert table["build_s"] > 0
    assert Path(table["file"]).is_file()
    assert "building the table of likely next ids: 100 %" in result.stderr
    after = foretell("generate", "--model", tiny_model, *MODEL, "--max-new-tokens", "4", "--verbose", "x")
    assert "tuned" in after.stderr
    assert re.search(r"^next_ids +cached$", after.stderr, re.MULTILINE)


def test_bench_compares_with_plain(foretell: Foretell, tiny_model: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    lines = [{"question_id": n, "category": "qa", "turns": [f"abcabcabc {n}"]} for n in range(2)]
    suite.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    args = ["--suite", suite, "--repeats", "1", "--drafters", "none,lookup", "--no-memory", "--max-new-tokens", "8"]
    result = foretell("bench", "--model", tiny_model, *MODEL, *args, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    totals = {row["name"]: row for row in document["results"] if row["category"] == "all"}
    assert set(totals) == {"none", "lookup"}
    assert totals["none"]["speedup_vs_plain"] == 1.0
    assert totals["lookup"]["identical"] == 1.0
    assert "\x1b" not in result.stderr


def test_bench_refuses_a_missing_suite_before_loading(foretell: Foretell, tmp_path: Path) -> None:
    result = foretell("bench", "--suite", tmp_path / "none.jsonl")
    assert result.returncode in (1, 2)
    assert result.stderr.splitlines()[-1].startswith("foretell: error: ")
    assert "none.jsonl" in result.stderr


def test_doctor_reports_versions_precision_and_files(foretell: Foretell, home: Path) -> None:
    result = foretell("doctor")
    assert (result.returncode, result.stderr) == (0, "")
    for part in ("versions", "torch", "threads", "precision", "--dtype", "memory", str(home)):
        assert part in result.stdout


def test_a_missing_matplotlib_is_told_by_the_option_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "foretell.bench.plots", None)
    with pytest.raises(ConfigError, match=r"^`--plot-prompts` needs matplotlib, .*: pip install matplotlib$"):
        draw_sizes([], tmp_path / "sizes.svg")


def test_the_verdict_on_a_draft_model_says_why() -> None:
    facts: dict[str, Any] = {
        "plain_tokens_per_s": 40.0,
        "tokens_per_pass": 2.0,
        "rows_per_pass": 5.0,
        "num_different_outputs": 0,
    }
    assert Verdict(drafted_tokens_per_s=80.0, **facts).draft_sentence() is None
    priced = {**facts, "draft_pass_s": 0.03, "target_pass_s": 0.02}
    slow = Verdict(drafted_tokens_per_s=60.0, without_draft_tokens_per_s=75.0, **priced).draft_sentence()
    assert slow == (
        "the draft model does not pay here: 0.80 × the speed without it, a pass of it takes 30.0 ms, one of the model "
        "20.0 ms; use --draft none"
    )
    fast = Verdict(drafted_tokens_per_s=90.0, without_draft_tokens_per_s=75.0, **priced).draft_sentence()
    assert fast is not None
    assert fast.startswith("the draft model pays here: 1.20 × the speed without it")
