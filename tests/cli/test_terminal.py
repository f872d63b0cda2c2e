"""Colours of who proposed a token, where somebody sees them; figures beside the data."""

from __future__ import annotations

import io
import re
import threading

import pytest

from foretell.cli.terminal import counted, counted_between, note_sources, note_stats, painter, source_style
from foretell.drafters.catalog import DRAFTERS
from foretell.result import DraftWork, Stats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_each_kind_of_source_has_a_colour_and_the_target_none() -> None:
    paint = painter(Terminal())
    assert paint("a\tb", "target") == "a\tb"
    codes = [re.fullmatch(r"\x1b\[(\d+)m\t b\n\x1b\[0m", paint("\t b\n", source)) for source in ("draft", "draft<katz")]
    assert [code and code[1] for code in codes] == ["35", "31"]
    assert paint("", "draft") == ""


def test_a_second_stage_looks_the_same_whoever_guessed() -> None:
    alone = {source_style(name) for name in ("target", "draft", *DRAFTERS)}
    assert source_style("draft<suffix") == source_style("draft<katz")
    assert source_style("draft<suffix") not in alone


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_none_are_wanted(variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*variable)
    assert painter(Terminal())("a", "draft") == "a"


def test_no_colours_in_a_file() -> None:
    assert painter(io.StringIO())("a", "draft") == "a"


def test_the_legend_counts_sources(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ["target", "draft", "draft<suffix", "draft"]
    note_sources(sources)
    assert capsys.readouterr().err == "proposed by: draft 2, target 1, draft<suffix 1\n"
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    note_sources(sources)
    assert stderr.getvalue().startswith("proposed by: \x1b[35mdraft 2\x1b[0m, target 1, \x1b[31m")


def test_progress_ends_at_a_hundred_percent(capsys: pytest.CaptureFixture[str]) -> None:
    with counted("writing") as count:
        for done in (0, 10, 25):
            count(done, 10)
    assert capsys.readouterr().err == "foretell: writing: 0 %\nforetell: writing: 100 %\n"


def test_a_measurement_is_announced_once_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with counted_between("measuring") as count:
        for done in range(3):
            count(done, 2)
    assert capsys.readouterr().err == "foretell: measuring …\n"


def test_where_somebody_watches_nothing_is_drawn_while_a_measurement_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    threads = threading.active_count()
    with counted_between("measuring") as count:
        assert threading.active_count() == threads
        assert "measuring" in stderr.getvalue()
        before = len(stderr.getvalue())
        count(1, 2)
        assert " 50%" in stderr.getvalue()[before:]


def test_figures_of_a_draft_model_are_told_where_one_ran(capsys: pytest.CaptureFixture[str]) -> None:
    stats = Stats(num_output_tokens=10)
    note_stats(stats)
    assert "draft passes" not in capsys.readouterr().err
    stats.take_draft_work(DraftWork(num_passes=4, num_confirmed=2))
    note_stats(stats)
    assert "0.40 draft passes per token, E₂ 1.50, " in capsys.readouterr().err
