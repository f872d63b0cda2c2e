"""`foretell tune`, `bench` and `doctor` on a tiny random model, as subprocesses."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
