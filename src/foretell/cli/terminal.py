"""What appears beside the data, on stderr: progress, settings, figures; and the colours of who proposed a token."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from foretell.result import Stats

Paint = Callable[[str, str], str]
"""Takes a token's text and its source, returns the text to print."""

SOURCE_STYLES: Final = {
    "target": "none",
    "draft": "magenta",
    "lookup": "green",
    "suffix": "cyan",
    "ngram": "blue",
    "recycle": "yellow",
}
SECOND_STAGE_STYLE: Final = "red"
OTHER_STYLE: Final = "bright_blue"


@contextmanager
def progress(message: str) -> Iterator[Callable[[str], None]]:
    """Show that something is being waited for, where somebody is watching; what is yielded says more, in one line."""
    if not sys.stderr.isatty():
        yield lambda text: note(f"foretell: {text}")
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    with console.status(f"{message} …"):
        yield console.print


@contextmanager
def ended_line() -> Iterator[None]:
    """End the line on stdout where Ctrl-C interrupts what prints it piece by piece."""
    try:
        yield
    except KeyboardInterrupt:
        print(flush=True)
        raise


Count = Callable[[int, int], None]
"""Takes how much is done, and the total."""


@contextmanager
def counted(message: str) -> Iterator[Count]:
    """Show how much of something is done, by what is yielded."""
    with counted_stages(message) as (count,):
        yield count


@contextmanager
def counted_stages(*messages: str) -> Iterator[Sequence[Count]]:
    """Show how much is done of each of several stages, by what is yielded for it; a stage appears when it begins.

    Where somebody is watching that is a bar with the time that is left, else a line at every tenth.
    """
    if not sys.stderr.isatty():
        yield [_tenths(message) for message in messages]
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks = [bar.add_task(message, total=None, visible=False) for message in messages]
        yield [
            lambda done, total, task=task: bar.update(task, completed=done, total=total, visible=True)  # type: ignore[misc]
            for task in tasks
        ]


@contextmanager
def counted_between(message: str) -> Iterator[Count]:
    """Show how much of a measurement is done, by what is yielded; only then is anything drawn, or it were timed too.

    Where nobody is watching that is one line at the beginning.
    """
    if not sys.stderr.isatty():
        announce(message)
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(message, total=None)
        bar.refresh()
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)


def _tenths(message: str) -> Count:
    """Return what notes every tenth of a stage."""
    tenths = set()

    def note_tenth(done: int, total: int) -> None:
        if (tenth := min(10, 10 * done // total)) not in tenths:
            tenths.add(tenth)
            note(f"foretell: {message}: {10 * tenth} %")

    return note_tenth


def announce(message: str) -> None:
    """Say what is waited for, in a line that stands still: a spinner would be timed too."""
    note(f"foretell: {message} …")


def note(text: str = "") -> None:
    """Print a line that is not data."""
    print(text, file=sys.stderr, flush=True)


def note_settings(settings: Mapping[str, Any]) -> None:
    """Print one `name: value` line per setting, aligned."""
    width = max(map(len, settings), default=0)
    for name, value in settings.items():
        note(f"{name:<{width}}  {value}")


def note_stats(stats: Stats) -> None:
    """Print what a request cost, in one line."""
    drafting = ""
    if stats.num_draft_passes > 0:
        drafting = f"{stats.draft_passes_per_token:.2f} draft passes per token, E₂ {stats.e2:.2f}, "
    if stats.num_exhausted_steps > 0:
        drafting += f"{stats.num_exhausted_steps} steps without the draft model, whose context is shorter, "
    note(
        f"{stats.num_output_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, "
        f"{stats.tokens_per_pass:.2f} tokens per pass, acceptance rate {stats.acceptance_rate:.2f}, {drafting}"
        f"first token after {stats.first_token_s:.2f} s"
    )


def note_sources(sources: Sequence[str]) -> None:
    """Print how many tokens each source proposed, in one line and in its colour."""
    paint = painter(sys.stderr)
    counts = Counter(sources).most_common()
    note("proposed by: " + ", ".join(paint(f"{source} {count}", source) for source, count in counts))


def source_style(source: str) -> str:
    """Return the colour of a source; what a second stage had guessed for the draft model has its own."""
    return SECOND_STAGE_STYLE if "<" in source else SOURCE_STYLES.get(source, OTHER_STYLE)


def painter(stream: TextIO) -> Paint:
    """Return what colours texts by their source; where `stream` shows no colours, texts stay as they are."""
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    console = Console(file=stream)
    if console.no_color or console.color_system is None:
        return unpainted
    return lambda text, source: Style.parse(source_style(source)).render(text, color_system=ColorSystem.STANDARD)


def unpainted(text: str, source: str) -> str:
    """Return the text as it is."""
    return text
