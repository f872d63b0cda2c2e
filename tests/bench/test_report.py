from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import report as report_module
from foretell.bench.aggregate import result_rows, summarise_prompts
from foretell.bench.arms import ForetellArm, with_second_plain
from foretell.bench.document import (
    DRAFT_HEADER,
    TABLE_HEADER,
    BenchReport,
    category_header,
    category_rows,
    draft_rows,
    table_rows,
)
from foretell.bench.report import check_report_folder, latency_curves, markdown, write_report
from foretell.bench.runner import measure_rounds
from foretell.errors import ConfigError
from foretell.hardware.profile import LatencyProfile
from foretell.params import SamplingParams
from foretell.result import DraftWork


@pytest.fixture
def report(fake_llm: Callable[..., Any], profile: LatencyProfile) -> BenchReport:
    return report_of(fake_llm(), profile)


@pytest.fixture
def staged_report(fake_llm: Callable[..., Any], profile: LatencyProfile) -> BenchReport:
    work = {
        "draft": DraftWork(num_passes=20, num_bytes=2000),
        "staged": DraftWork(num_passes=8, num_confirmed=12, num_bytes=800),
    }
    return report_of(fake_llm(tokens_per_pass={"none": 1, "draft": 4, "staged": 4}, work=work), profile)


def report_of(llm: Any, profile: LatencyProfile, repeats: int = 1) -> BenchReport:
    own = [ForetellArm(key=name, drafter=name, llm=llm, clock=llm.clock) for name in llm.tokens_per_pass]
    rounds = measure_rounds(
        with_second_plain(own, llm, clock=llm.clock),
        [[1], [2], [3]],
        SamplingParams(max_new_tokens=21),
        repeats=repeats,
    )
    summaries = summarise_prompts(rounds)
    memory = {"all": 512_000_000}
    return BenchReport(
        results=result_rows(summaries, ["rag", "writing", "rag"], memory=memory, gaps={"all": {0: 0.125}}),
        profile=profile.to_json(),
        provenance={"foretell": "0.1.0", "commit": "abc", "torch": "2", "cpu": "a | b", "argv": ["foretell"]},
        summaries=summaries,
        suite="builtin",
    )


def test_document_has_exactly_three_parts_and_no_not_a_number(report: BenchReport) -> None:
    document = report.to_json()
    assert list(document) == ["results", "profile", "provenance"]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [(row["name"], row["category"]) for row in document["results"]][:4] == [
        ("none", "all"),
        ("none", "rag"),
        ("none", "writing"),
        ("lookup", "all"),
    ]


def test_tables_for_the_terminal(report: BenchReport) -> None:
    rows = table_rows(report)
    assert [row[0] for row in rows] == ["none", "lookup", "all"]
    assert {len(row) for row in rows} == {len(TABLE_HEADER)}
    assert rows[2][2] == "4.00 ×"
    assert rows[2][4:] == ("500 ms", "4.00", "0.50", "1", "512 MB")
    assert rows[0][-1] == "—"
    assert category_header(report) == ("category", "#", "none", "lookup", "all", "noise")
    assert [row[:3] for row in category_rows(report)] == [
        ("rag", "2", "1.00"),
        ("writing", "1", "1.00"),
        ("total", "3", "1.00"),
    ]


@pytest.mark.parametrize(("repeats", "noise"), [(1, "—"), (2, "0.00")])
def test_noise_needs_repeats(fake_llm: Callable[..., Any], profile: LatencyProfile, repeats: int, noise: str) -> None:
    report = report_of(fake_llm(), profile, repeats)
    assert {row[3] for row in table_rows(report)} == {row[-1] for row in category_rows(report)} == {noise}


def test_report_names_only_files_that_it_wrote(report: BenchReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "report"
    write_report(report, folder)
    names = {file.name for file in folder.iterdir()}
    assert names == {"report.md", "results.json", "speedup.png", "tokens_per_pass.png", "latency.png"}
    text = (folder / "report.md").read_text()
    assert set(re.findall(r"\]\((.+?\.png)\)", text)) == {name for name in names if name.endswith(".png")}
    for image in folder.glob("*.png"):
        assert image.read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "results.json").read_text()) == report.to_json()


def test_a_draft_model_has_a_table_of_its_own(staged_report: BenchReport) -> None:
    draft, staged = draft_rows(staged_report)
    assert {len(row) for row in (draft, staged)} == {len(DRAFT_HEADER)}
    assert draft == ("draft", "100.0", "2.00 ×", "4.00", "0.95", "0.35", "33%", "1.00", "—", "—")
    assert staged == ("staged", "142.9", "2.86 ×", "4.00", "0.38", "0.29", "17%", "2.50", "1.43 ×", "1.25 ×")


def test_a_report_on_a_draft_model_shows_bytes(staged_report: BenchReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_report(staged_report, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| staged | 142.9 |" in text
    assert "](bytes.png)" in text
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")


def test_bars_add_up_to_relative_bytes(staged_report: BenchReport) -> None:
    pytest.importorskip("matplotlib")
    from foretell.bench.plots import bytes_figure

    (axes,) = bytes_figure(staged_report).axes
    target, draft = axes.containers
    heights = [low.get_height() + high.get_height() for low, high in zip(target, draft, strict=True)]
    assert heights == pytest.approx(
        [result.relative_bytes for result in map(staged_report.result, staged_report.names)]
    )
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.35", "0.29"]


def test_markdown_tables_are_rectangular_and_sections_follow_what_is_known(report: BenchReport) -> None:
    text = markdown(report, has_latency=True)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "| all | 0.125 |" in text
    assert "## What a pass costs" in text
    assert "## What a pass costs" not in markdown(report, has_latency=False)


def test_a_failing_plot_leaves_the_old_report_alone(
    report: BenchReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "report.md").write_text("old")
    monkeypatch.setattr(report_module, "markdown", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(report, tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.md", "old")]


def test_unwritable_folder_and_missing_matplotlib_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write a report to .*file"):
        check_report_folder(tmp_path / "file")
    check_report_folder(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    monkeypatch.setattr(report_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="`report` needs matplotlib, which is not installed"):
        check_report_folder(tmp_path)


def test_latency_curves_come_from_the_profile(profile: LatencyProfile) -> None:
    curves = latency_curves(profile.to_json())
    assert list(curves) == [256, 1024]
    assert curves[256][0] == (1, 0.0125)
    assert latency_curves(None) == {}
