"""Plots of a benchmark, drawn without a display and without matplotlib's global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from foretell.bench.aggregate import counted, pass_counts
from foretell.bench.arms import PLAIN
from foretell.bench.document import BenchReport
from foretell.bench.suites import ALL_CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Okabe and Ito's, which readers with colour blindness tell apart; shapes tell the arms apart too."""
MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")
GREY: Final = "#555555"
LONGEST_BLOCK: Final = 8
"""Passes that emitted this many tokens or more share the histogram's last bin."""


def speedup_figure(report: BenchReport) -> Figure:
    """Draw each arm's speed-up in each category, over a band as wide as the noise."""
    categories = [ALL_CATEGORIES, *report.categories]
    figure, axes = _figure(height=1.4 + 0.36 * len(categories))
    places = range(len(categories), 0, -1)
    for place, category in zip(places, categories, strict=True):
        noise = report.result(PLAIN, category).noise
        axes.fill_betweenx([place - 0.4, place + 0.4], 1 - noise, 1 + noise, color="#dddddd", linewidth=0)
    for index, name in enumerate(_drafting(report)):
        speedups = [report.result(name, category).speedup_vs_plain for category in categories]
        axes.plot(speedups, places, linestyle="", label=name, **_style(index))
    axes.axvline(1.0, color=GREY, linewidth=1)
    axes.axhline(len(categories) - 0.5, color="#bbbbbb", linewidth=1)
    axes.set_yticks(list(places), ["total", *report.categories])
    axes.set_ylim(0.4, len(categories) + 0.6)
    axes.set_xlabel("decode speed ÷ plain foretell's (grey: noise)")
    axes.grid(axis="x", color="#eeeeee")
    axes.grid(axis="y", visible=False)
    _legend(axes)
    return figure


def tokens_per_pass_figure(report: BenchReport) -> Figure:
    """Draw the share of target passes by the number of tokens that they emitted, one bar per arm.

    Arms that emit one token in every pass are left out.
    """
    counts = {name: pass_counts(report.summaries[name]) for name in _drafting(report)}
    shares = {name: _shares(each) for name, each in counts.items() if max(each, default=1) > 1}
    figure, axes = _figure(height=3.6)
    width = 0.8 / max(1, len(shares))
    for index, (name, share) in enumerate(shares.items()):
        offset = (index - (len(shares) - 1) / 2) * width
        places = [num_tokens + offset for num_tokens in range(1, LONGEST_BLOCK + 1)]
        axes.bar(places, share, width=width * 0.9, label=name, color=_style(_drafting(report).index(name))["color"])
    names = [*map(str, range(1, LONGEST_BLOCK)), f"≥ {LONGEST_BLOCK}"]
    axes.set_xticks(range(1, LONGEST_BLOCK + 1), names)
    axes.set_xlabel("tokens that a pass emitted")
    axes.set_ylabel("share of passes, %")
    axes.grid(axis="x", visible=False)
    _legend(axes)
    return figure


def bytes_figure(report: BenchReport) -> Figure:
    """Draw the bytes that each arm's passes read per token, relative to plain's: the target's, and the draft's on top.

    Arms that do not count bytes are left out.
    """
    counters = {name: stats for name in report.names if (stats := counted(report.summaries[name])) is not None}
    plain_bytes = counters[PLAIN].bytes_per_token
    target = [stats.target_bytes / stats.num_output_tokens / plain_bytes for stats in counters.values()]
    draft = [stats.draft_bytes / stats.num_output_tokens / plain_bytes for stats in counters.values()]
    figure, axes = _figure(height=3.6)
    axes.bar(range(len(counters)), target, width=0.7, label="target", color=COLOURS[0])
    on_top = axes.bar(range(len(counters)), draft, width=0.7, bottom=target, label="draft", color=COLOURS[4])
    relative = [stats.bytes_per_token / plain_bytes for stats in counters.values()]
    axes.bar_label(on_top, labels=[f"{value:.2f}" for value in relative], padding=2)
    axes.set_xticks(range(len(counters)), list(counters))
    axes.set_ylabel("bytes per token ÷ plain's")
    axes.grid(axis="x", visible=False)
    _legend(axes)
    return figure


def latency_figure(curves: Mapping[int, Sequence[tuple[int, float]]]) -> Figure:
    """Draw T(N), milliseconds of a pass of N rows.

    Args:
        curves: for each context length in tokens the measured (rows, seconds).
    """
    figure, axes = _figure(height=3.6)
    for index, (context, points) in enumerate(sorted(curves.items())):
        rows = [num_rows for num_rows, _ in points]
        axes.plot(rows, [1e3 * seconds for _, seconds in points], label=f"{context} tokens", **_style(index))
    axes.set_xscale("log", base=2)
    ticks = sorted({num_rows for points in curves.values() for num_rows, _ in points if num_rows & (num_rows - 1) == 0})
    axes.set_xticks(ticks, [str(num_rows) for num_rows in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of a pass, N")
    axes.set_ylabel("T(N), ms")
    _legend(axes, title="context")
    return figure


def sizes_figure(measured: Sequence[tuple[int, float]], predicted: Sequence[tuple[int, float]]) -> Figure:
    """Draw tokens per second against the most rows of a pass, as `(rows, tokens/s)`."""
    figure, axes = _figure(height=3.6)
    for index, (name, points) in enumerate((("measured", measured), ("predicted", predicted))):
        axes.plot(*zip(*points, strict=True), label=name, **_style(index))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("most rows of a pass")
    axes.set_ylabel("tokens/s")
    _legend(axes)
    return figure


def _drafting(report: BenchReport) -> list[str]:
    return [name for name in report.names if name != PLAIN]


def _shares(counts: Mapping[int, int]) -> list[float]:
    """Return the percentage of passes for 1, 2, … `LONGEST_BLOCK` and more tokens."""
    num_passes = sum(counts.values())
    shares = [0.0] * LONGEST_BLOCK
    for num_tokens, times in counts.items():
        # A pass that only confirmed provisional rows may emit nothing new; it belongs with the shortest.
        shares[min(max(num_tokens, 1), LONGEST_BLOCK) - 1] += 100.0 * times / num_passes
    return shares


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 6}


def _figure(*, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color="#eeeeee")
    return figure, axes


def _legend(axes: Axes, title: str | None = None) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, title=title)
