"""What both backends keep of one question until it is answered."""

from __future__ import annotations

from collections.abc import Callable

from foretell.plato.assembly import Assembly
from foretell.plato.events import Answer, AnswerText, PartPlanned
from foretell.plato.options import PlatoOptions
from foretell.plato.plan import Part
from foretell.plato.schedule import Schedule


class AnswerRun:
    """The plan so far, which parts are due, and the answer so far.

    Args:
        question: what to answer.
        options: how.
        clock: seconds, monotonic.
        max_share: see `Schedule`.
    """

    def __init__(self, question: str, options: PlatoOptions, clock: Callable[[], float], *, max_share: int = 1) -> None:
        self._question, self._options = question, options
        self._clock, self._started_s = clock, clock()
        self._parts: list[Part] = []
        self._assembly = Assembly(has_headings=options.has_headings)
        self._schedule = Schedule(
            max_parallel=options.max_parallel,
            max_answer_tokens=options.max_answer_tokens,
            max_parts=options.max_parts,
            max_share=max_share,
            is_pipelined=options.is_pipelined and options.visibility == "prefix" and options.mode == "plato",
        )
        self._answer = Answer(text="", mode=options.mode, plan=None, is_direct=False)

    def _add_part(self, part: Part) -> PartPlanned:
        """Take a part of the plan; in a skeleton none needs another."""
        if self._options.mode == "sot":
            part = Part(part.id, part.title)
        self._parts.append(part)
        self._schedule.add(part)
        self._assembly.add(part)
        return PartPlanned(part)

    def _answer_text(self, text: str) -> AnswerText:
        """Let the answer go on."""
        if not self._answer.text:
            self._answer.first_text_s = self._now_s()
        self._answer.text += text
        return AnswerText(text)

    def _now_s(self) -> float:
        return self._clock() - self._started_s
