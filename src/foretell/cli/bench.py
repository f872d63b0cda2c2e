"""`foretell bench`: compare drafters and baselines with plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli.options import JsonOption, SamplingOptions, spread

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from foretell.bench.document import BenchReport
    from foretell.bench.runner import Progress as BenchProgress


@spread
def bench(
    suite: Annotated[str, typer.Option(help="builtin, humaneval, or a JSON Lines file as Spec-Bench's.")] = "builtin",
    limit: Annotated[
        int | None, typer.Option(help="Keep this many prompts, spread evenly over the categories.")
    ] = None,
    category: Annotated[str | None, typer.Option(help="Keep these categories, with commas between.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each arm on each prompt; medians count.")] = 3,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="foretell's arms, with commas between.",
            show_default="none,lookup,suffix,ngram,all; staged too with a draft model",
        ),
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="Others' decoding of the same weights: hf, hf-lookup, llamacpp.", show_default="none")
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Write a Markdown report and plots to this folder.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Keep finished rounds in this file, and go on from it.")] = None,
    memory: Annotated[bool, typer.Option(help="Measure memory, in one more process per arm.")] = True,
    as_json: JsonOption = False,
    *,
    options: SamplingOptions,
) -> None:
    """Time drafters and baselines on a suite of prompts, in turn, against plain decoding.

    Speeds count decoded tokens after the first; outputs are compared token by token.
    """
    from foretell.bench.run import run_bench
    from foretell.bench.settings import MAX_NEW_TOKENS, BenchSettings, EngineSettings
    from foretell.cli.documents import print_document
    from foretell.cli.terminal import note_settings

    settings = BenchSettings(
        suite=suite,
        limit=limit,
        category=category,
        repeats=repeats,
        drafters=None if drafters is None else _split(drafters),
        baselines=_split(baselines),
        sampling=options.sampling({"max_new_tokens": MAX_NEW_TOKENS}),
        engine=EngineSettings(
            model=options.model,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            compile=options.compile,
            context_tokens=options.context_tokens,
            corpus=options.corpus,
            draft=options.draft,
            prompts=options.prompts,
        ),
        report=report,
        resume=resume,
        has_memory=memory,
    )
    with _progress() as progress:
        outcome = run_bench(settings, progress)
    if options.verbose:
        note_settings(outcome.provenance["bench"])
    if as_json:
        print_document(outcome.to_json())
    else:
        _print_tables(outcome)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")] if names.strip() else []


def _print_tables(report: BenchReport) -> None:
    from rich.console import Console

    from foretell.bench.document import (
        DRAFT_HEADER,
        SAME_IDS,
        SECOND_STAGE,
        TABLE_HEADER,
        category_header,
        category_rows,
        draft_rows,
        table_rows,
    )

    # Where nobody reads the width of a terminal, 80 columns would cut what a file or a pipe can hold.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    console.print(_table(f"suite {report.suite}", TABLE_HEADER, table_rows(report)))
    console.print(SAME_IDS, style="dim")
    console.print()
    if report.has_draft_model:
        console.print(_table("the draft model and its second stage", DRAFT_HEADER, draft_rows(report)))
        console.print(" ".join(SECOND_STAGE), style="dim")
        console.print()
    console.print(_table("speed-up by category", category_header(report), category_rows(report)))


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="default", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


class BarProgress:
    """A progress bar on stderr, with the runner's notes above it."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)
        self._is_first = True

    def begin(self, num_steps: int) -> None:
        self._bar.update(self._task, total=num_steps)

    def step(self, label: str) -> None:
        # A step is told when it begins: what is done is one less.
        self._bar.update(self._task, description=label, advance=0 if self._is_first else 1)
        self._is_first = False
        self._bar.refresh()

    def note(self, text: str) -> None:
        self._bar.console.print(text)


class LineProgress:
    """The runner's notes as lines on stderr, where nobody watches a bar."""

    def begin(self, num_steps: int) -> None:
        self.note(f"{num_steps} runs")

    def step(self, label: str) -> None: ...

    def note(self, text: str) -> None:
        print(f"foretell: {text}", file=sys.stderr, flush=True)


@contextmanager
def _progress() -> Iterator[BenchProgress]:
    if not sys.stderr.isatty():
        yield LineProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True, highlight=False, markup=False)
    # Redrawn between runs only: a thread that draws would be timed too.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        yield BarProgress(bar)
