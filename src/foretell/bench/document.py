"""The outcome of a benchmark: rows, the profile they were measured under, where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foretell.bench.aggregate import BenchResult, Summaries
from foretell.bench.suites import ALL_CATEGORIES

TABLE_HEADER = ("arm", "tok/s", "speed-up", "noise", "first", "per pass", "accepted", "same ids", "memory")
DRAFT_HEADER = (
    "arm", "tok/s", "speed-up", "per pass", "draft passes/token", "bytes", "drafting", "E₂", "second stage", "bound",
)  # fmt: skip

SAME_IDS: Final = "Same ids: share of outputs whose token ids equal those of `none`."
SECOND_STAGE: Final = (
    "Second stage: speed ÷ that of the same arm without it, `staged` ÷ `draft`. Bound: what that can",
    "reach with as many tokens per target pass, 1 ÷ (1 - s (1 - 1/E₂)), where s is the share that drafting",
    "has of the arm without it.",
)
"""Legends of columns whose names do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything that a benchmark found out."""

    results: Sequence[BenchResult]
    profile: Mapping[str, Any] | None
    """The measured T(N) as plain data; None where there is none."""
    provenance: Mapping[str, Any]
    summaries: Summaries
    """The runs behind the rows, for plots."""
    suite: str

    @property
    def names(self) -> list[str]:
        """The arms, plain first."""
        return list(dict.fromkeys(result.name for result in self.results))

    @property
    def categories(self) -> list[str]:
        """The suite's categories, without the totals."""
        names = dict.fromkeys(result.category for result in self.results)
        return [name for name in names if name != ALL_CATEGORIES]

    @property
    def num_repeats(self) -> int:
        """Runs of each arm on each prompt."""
        return min(len(summary.runs) for summary in self.summaries[self.names[0]])

    @property
    def has_draft_model(self) -> bool:
        """Whether an arm ran a draft model."""
        return any(result.draft_passes_per_token for result in self.results)

    def result(self, name: str, category: str = ALL_CATEGORIES) -> BenchResult:
        """Return one row."""
        return next(each for each in self.results if (each.name, each.category) == (name, category))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "results": [result.to_json() for result in self.results],
            "profile": self.profile,
            "provenance": dict(self.provenance),
        }


def table_rows(report: BenchReport, category: str = ALL_CATEGORIES) -> list[tuple[str, ...]]:
    """Return one row of short texts per arm, in the columns of `TABLE_HEADER`."""
    return [
        (
            result.name,
            f"{result.tokens_per_s:.1f}",
            _ratio(result.speedup_vs_plain),
            _noise(report, result),
            f"{result.ttft_s * 1e3:.0f} ms",
            _number(result.tokens_per_pass),
            _number(result.acceptance_rate),
            _share(result.identical),
            _memory(result.peak_rss_bytes),
        )
        for result in (report.result(name, category) for name in report.names)
    ]


def draft_rows(report: BenchReport) -> list[tuple[str, ...]]:
    """Return one row of short texts per arm that ran a draft model, in the columns of `DRAFT_HEADER`."""
    return [
        (
            result.name,
            f"{result.tokens_per_s:.1f}",
            _ratio(result.speedup_vs_plain),
            _number(result.tokens_per_pass),
            _number(result.draft_passes_per_token),
            _number(result.relative_bytes),
            "—" if result.draft_share is None else f"{result.draft_share:.0%}",
            _number(result.e2),
            _ratio(result.second_stage_gain),
            _ratio(result.second_stage_bound),
        )
        for result in map(report.result, report.names)
        if result.draft_passes_per_token
    ]


def category_rows(report: BenchReport) -> list[tuple[str, ...]]:
    """Return one row per category: its name, the number of prompts, each arm's speed-up, the noise."""
    rows = []
    for category in [*report.categories, ALL_CATEGORIES]:
        results = [report.result(name, category) for name in report.names]
        speedups = [f"{result.speedup_vs_plain:.2f}" for result in results]
        name = "total" if category == ALL_CATEGORIES else category
        rows.append((name, str(results[0].num_prompts), *speedups, _noise(report, results[0])))
    return rows


def category_header(report: BenchReport) -> tuple[str, ...]:
    """Return the column names of `category_rows`."""
    return ("category", "#", *report.names, "noise")


def _noise(report: BenchReport, result: BenchResult) -> str:
    # One run against one run tells how two runs differ, not how medians do.
    return "—" if report.num_repeats == 1 else f"{result.noise:.2f}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f} ×"


def _share(value: float) -> str:
    # Never rounded up to 1: one output in ten thousand that differs is worth knowing.
    return "1" if value == 1.0 else f"{min(value, 0.999):.3f}"


def _memory(num_bytes: int | None) -> str:
    return "—" if num_bytes is None else f"{num_bytes / 1e6:.0f} MB"
