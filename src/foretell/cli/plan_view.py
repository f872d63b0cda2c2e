"""A planned answer while it is written: the plan as a tree, branches side by side, and the answer in order."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from foretell.cli.terminal import note
from foretell.plato.events import (
    Answer,
    AnswerText,
    Event,
    FellBack,
    Finished,
    PartEnded,
    PartPlanned,
    PartStarted,
    PartText,
    PlanEnded,
    Routed,
)
from foretell.plato.plan import Part

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN_CHARACTERS: Final = 60
"""Of what a branch wrote last."""


def show(events: Iterable[Event], *, is_quiet: bool = False) -> Answer:
    """Print an answer in order while it is written, and return it.

    In a terminal the branches are shown below it as they grow; elsewhere stderr gets a line for everything that
    happens, and stdout the answer alone.

    Args:
        events: what happens.
        is_quiet: print no answer.
    """
    is_live = sys.stdout.isatty() and not is_quiet
    view = _LiveView() if is_live else _LineView(is_quiet=is_quiet)
    answer = None
    with view:
        for event in events:
            view.take(event)
            if isinstance(event, Finished):
                answer = event.answer
    assert answer is not None
    _note_figures(answer)
    return answer


class _LineView:
    """One line on stderr for everything that happens, the answer on stdout."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if not self._is_quiet:
            print(flush=True)

    def take(self, event: Event) -> None:
        if isinstance(event, AnswerText) and not self._is_quiet:
            print(event.text, end="", flush=True)
        elif (line := describe(event)) is not None:
            note(f"foretell: {line}")


class _LiveView:
    """The plan's tree below the answer; lines of the answer move up once they are complete."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._parts: dict[int, Part] = {}
        self._state: dict[int, str] = {}
        self._written: dict[int, str] = {}
        self._line = self._head = ""
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=8)

    def __enter__(self) -> None:
        self._live.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._live.update("")
        self._live.__exit__(*error)
        if self._line:
            print(self._line, flush=True)

    def take(self, event: Event) -> None:
        if isinstance(event, AnswerText):
            *lines, self._line = (self._line + event.text).split("\n")
            for line in lines:
                self._console.print(line)
        elif isinstance(event, PartPlanned):
            self._parts[event.part.id], self._state[event.part.id] = event.part, "waits"
        elif isinstance(event, PartStarted):
            self._state[event.part_id] = "is written"
        elif isinstance(event, PartText):
            written = self._written.get(event.part_id, "") + event.text
            self._written[event.part_id] = written[-4 * _SHOWN_CHARACTERS :]
        elif isinstance(event, PartEnded):
            self._state[event.part_id] = f"{event.num_tokens} tokens"
        elif (head := describe(event)) is not None:
            self._head = head
        self._live.update(self._render())

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text
        from rich.tree import Tree

        tree = Tree(Text(self._head, style="dim"))
        nodes: dict[int, Tree] = {}
        for part in self._parts.values():
            above = nodes[part.needs[-1]] if part.needs else tree
            others = f" (and {', '.join(map(str, part.needs[:-1]))})" if len(part.needs) > 1 else ""
            label = Text(f"{part.id}. {part.title}{others}  ", style="bold")
            label.append(self._state[part.id], style="cyan")
            if self._state[part.id] == "is written":
                tail = " ".join(self._written.get(part.id, "").split())[-_SHOWN_CHARACTERS:]
                label.append(f"\n{tail}", style="dim")
            nodes[part.id] = above.add(label)
        return Group(Text(self._line), tree)


def describe(event: Event) -> str | None:
    """Return what happened in one line; None for text, and for the end."""
    if isinstance(event, Routed):
        probability = "" if event.direct_probability is None else f" (probability {event.direct_probability:.2f})"
        return f"{'answered directly' if event.is_direct else 'planned'}: {event.reason}{probability}"
    if isinstance(event, PartPlanned):
        needs = f" (needs {', '.join(map(str, event.part.needs))})" if event.part.needs else ""
        return f"plan: {event.part.id}. {event.part.title}{needs}"
    if isinstance(event, PlanEnded):
        repairs = f"; repaired: {'; '.join(event.repairs)}" if event.repairs else ""
        return f"plan: {len(event.plan)} parts, {event.plan.width} at once, {event.plan.depth} in a row{repairs}"
    if isinstance(event, PartStarted):
        rows = "" if event.num_computed is None else f": {event.num_computed} rows computed, {event.num_reused} reused"
        return f"part {event.part_id} begins{rows}"
    if isinstance(event, PartEnded):
        return f"part {event.part_id} ends ({event.reason}) after {event.num_tokens} tokens"
    if isinstance(event, FellBack):
        return f"the plan is given up, answered directly: {event.reason}"
    return None


def _note_figures(answer: Answer) -> None:
    """Print what an answer took, in two lines."""
    note(
        f"{answer.num_answer_tokens} tokens in {answer.total_s:.2f} s, {answer.tokens_per_s:.1f} tokens/s, "
        f"first after {answer.first_text_s:.2f} s"
    )
    if answer.plan is not None:
        path = " → ".join(map(str, answer.critical_path))
        note(
            f"plan of {answer.num_plan_tokens} tokens, {answer.plan.width} parts at once, critical path {path}; "
            f"{answer.num_computed} prompt rows computed, {answer.num_reused} reused"
        )
