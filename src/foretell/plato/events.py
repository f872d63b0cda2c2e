"""What happens while a planned answer is written, in order, and what remains at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from foretell.plato.plan import Part, Plan

Mode = Literal["plato", "sot", "sequential"]
"""`plato`: a plan, its independent parts at once; `sot`: Skeleton-of-Thought, all points at once and none sees another;
`sequential`: plain decoding."""

PartEnd = Literal["stop", "length", "failed"]


@dataclass(frozen=True, slots=True)
class Routed:
    """It is known whether the question is planned or answered directly."""

    is_direct: bool
    direct_probability: float | None
    """What the model gives to answering directly; None where it was not asked."""
    reason: str


@dataclass(frozen=True, slots=True)
class PartPlanned:
    """A line of the plan is complete."""

    part: Part


@dataclass(frozen=True, slots=True)
class PlanEnded:
    """The plan is complete."""

    plan: Plan
    repairs: tuple[str, ...] = ()
    """What was wrong with the plan as written, in one line each."""


@dataclass(frozen=True, slots=True)
class PartStarted:
    """A branch begins to write a part."""

    part_id: int
    num_computed: int | None = None
    """Rows of its prompt that were computed; None from a server, which tells at the end."""
    num_reused: int | None = None
    """Rows of its prompt whose keys and values were there already; None likewise."""


@dataclass(frozen=True, slots=True)
class PartText:
    """A branch wrote something; branches take turns in any order."""

    part_id: int
    text: str


@dataclass(frozen=True, slots=True)
class PartEnded:
    """A branch is done."""

    part_id: int
    reason: PartEnd
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerText:
    """The answer goes on with this text: parts in the order of their ids, each as soon as those before it are done."""

    text: str


@dataclass(frozen=True, slots=True)
class FellBack:
    """The plan was given up; the question is answered directly."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event."""

    answer: Answer


Event = Routed | PartPlanned | PlanEnded | PartStarted | PartText | PartEnded | AnswerText | FellBack | Finished


@dataclass(slots=True, kw_only=True)
class PartResult:
    """What a branch wrote, and what it took. Seconds count from the request's start."""

    part: Part
    text: str = ""
    num_tokens: int = 0
    num_computed: int = 0
    num_reused: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    reason: PartEnd = "stop"


@dataclass(slots=True, kw_only=True)
class Answer:
    """A planned answer. Seconds count from the request's start."""

    text: str
    mode: Mode
    plan: Plan | None
    """None where none was written; one that was given up stands here."""
    is_direct: bool
    direct_probability: float | None = None
    parts: list[PartResult] = field(default_factory=list)
    repairs: tuple[str, ...] = ()
    num_plan_tokens: int = 0
    num_answer_tokens: int = 0
    """Tokens of all parts; plan and headings excluded."""
    num_computed: int = 0
    """Rows computed for prompts: the plan's and those of all parts."""
    num_reused: int = 0
    """Rows of prompts whose keys and values were there already."""
    first_text_s: float = 0.0
    """When the answer's first token was there."""
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens ÷ seconds from the request to its last token, planning included."""
        return self.num_answer_tokens / self.total_s if self.total_s > 0 else 0.0

    @property
    def critical_path(self) -> tuple[int, ...]:
        """Ids of the chain of parts that ended last: each began when the one before it was done."""
        by_id = {result.part.id: result for result in self.parts}
        if not by_id:
            return ()
        path = [max(by_id, key=lambda part_id: by_id[part_id].ended_s)]
        while needs := [need for need in by_id[path[0]].part.needs if need in by_id]:
            path.insert(0, max(needs, key=lambda part_id: by_id[part_id].ended_s))
        return tuple(path)


def last_answer(events: Iterable[Event]) -> Answer:
    """Return the answer with which events end."""
    answer = None
    for event in events:
        if isinstance(event, Finished):
            answer = event.answer
    assert answer is not None
    return answer
