"""A Markdown report with plots, in a folder."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foretell.bench.aggregate import forward_share, rows_per_pass
from foretell.bench.document import (
    DRAFT_HEADER,
    SAME_IDS,
    SECOND_STAGE,
    TABLE_HEADER,
    BenchReport,
    category_header,
    category_rows,
    draft_rows,
    table_rows,
)
from foretell.errors import ConfigError

REPORT_FILE: Final = "report.md"


def check_report_folder(folder: Path) -> None:
    """Refuse a report that could not be written, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, or the folder cannot be made or written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("`report` needs matplotlib, which is not installed: pip install matplotlib, or drop it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write a report to {folder}: {error.strerror}; name another folder") from error


def write_report(report: BenchReport, folder: Path) -> None:
    """Write `report.md`, `results.json` and the plots; all are finished before the first takes its place.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
            files = _write_files(report, Path(unfinished))
            for file in files:
                file.replace(folder / file.name)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {folder}: {error.strerror}; name another folder") from error


def _write_files(report: BenchReport, folder: Path) -> list[Path]:
    """Write everything to `folder`; the report is last, so that it never names a file that is not there."""
    from foretell.bench.plots import bytes_figure, latency_figure, speedup_figure, tokens_per_pass_figure

    figures = {"speedup.png": speedup_figure(report), "tokens_per_pass.png": tokens_per_pass_figure(report)}
    if report.has_draft_model:
        figures["bytes.png"] = bytes_figure(report)
    curves = latency_curves(report.profile)
    if curves:
        figures["latency.png"] = latency_figure(curves)
    for name, figure in figures.items():
        figure.savefig(folder / name)
    document = json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False, default=str)
    (folder / "results.json").write_text(document + "\n", encoding="utf-8")
    (folder / REPORT_FILE).write_text(markdown(report, has_latency=bool(curves)), encoding="utf-8")
    return [folder / name for name in (*figures, "results.json", REPORT_FILE)]


def markdown(report: BenchReport, *, has_latency: bool) -> str:
    """Return the text of `report.md`."""
    return "\n".join(_lines(report, has_latency=has_latency)) + "\n"


def _lines(report: BenchReport, *, has_latency: bool) -> Iterator[str]:
    where = report.provenance
    num_prompts = report.result(report.names[0]).num_prompts
    yield "# Benchmark"
    yield ""
    yield f"Suite `{report.suite}`, {num_prompts} prompts in {len(report.categories)} categories."
    yield f"foretell {where.get('foretell')} ({where.get('commit')}), torch {where.get('torch')}, {where.get('cpu')}."
    yield "Speeds of one machine at one time: compare them within this report only."
    yield ""
    yield from _table(TABLE_HEADER, table_rows(report))
    yield ""
    yield "`none` is foretell without drafts. Tok/s: tokens after the first ÷ seconds after the first."
    yield "Speed-up: plain seconds per token ÷ the arm's. Noise: how far a second `none` was from the first, where each"
    yield "arm ran more than once."
    yield "First: time to the first token, the median over prompts."
    yield "Per pass: tokens that a target pass emitted. Accepted: accepted ÷ drafted tokens."
    yield SAME_IDS
    yield "Memory: peak of a process with that arm alone."
    yield ""
    if report.has_draft_model:
        yield from _draft_lines(report)
    yield "## Speed-up by category"
    yield ""
    yield "![Speed-up by category](speedup.png)"
    yield ""
    yield from _table(category_header(report), category_rows(report))
    yield ""
    yield "## Tokens per pass"
    yield ""
    yield "![Tokens per pass](tokens_per_pass.png)"
    yield ""
    yield from _table(("arm", "rows/pass", "time in passes", "accepted ÷ drafted, by source"), _pass_rows(report))
    yield ""
    if has_latency:
        yield "## What a pass costs"
        yield ""
        yield "![T(N)](latency.png)"
        yield ""
    yield from _divergence_lines(report)
    yield "## Where the numbers come from"
    yield ""
    yield "```json"
    yield json.dumps(dict(where), indent=1, ensure_ascii=False, default=str)
    yield "```"


def _draft_lines(report: BenchReport) -> Iterator[str]:
    yield "## The draft model and its second stage"
    yield ""
    yield "![Bytes moved](bytes.png)"
    yield ""
    yield from _table(DRAFT_HEADER, draft_rows(report))
    yield ""
    yield "Bytes: what passes after the prompt read per token, weights and the keys and values in sight, relative to"
    yield "`none`. Drafting: share of the time after the prompt. E₂: 1 + tokens that the draft model's own choice"
    yield "confirmed of the second stage ÷ draft passes."
    yield from SECOND_STAGE
    yield ""


def _pass_rows(report: BenchReport) -> Iterator[tuple[str, ...]]:
    for name in report.names:
        summaries = report.summaries[name]
        rows, share = rows_per_pass(summaries), forward_share(summaries)
        sources = report.result(name).accepted_by_source
        yield (
            name,
            "—" if rows is None else f"{rows:.1f}",
            "—" if share is None else f"{share:.0%}",
            ", ".join(f"{source} {each['accepted']} ÷ {each['drafted']}" for source, each in sources.items()) or "—",
        )


def _divergence_lines(report: BenchReport) -> Iterator[str]:
    gaps = [(name, report.result(name).first_divergence_gap) for name in report.names]
    known = [(name, gap) for name, gap in gaps if gap is not None]
    if not known:
        return
    yield "## Where outputs differ"
    yield ""
    yield "The largest gap between plain's two best logits where an output first differs. A gap of 0 is an exact tie."
    yield ""
    yield from _table(("arm", "largest gap"), [(name, f"{gap:.4g}") for name, gap in known])
    yield ""


def _table(header: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def latency_curves(profile: Mapping[str, Any] | None) -> dict[int, list[tuple[int, float]]]:
    """Return T(N) as (rows, seconds) by context length, from a profile as plain data; empty without one."""
    if profile is None:
        return {}
    return {
        context: list(zip(profile["num_rows"], seconds, strict=True))
        for context, seconds in zip(profile["contexts"], profile["pass_s"], strict=True)
    }
