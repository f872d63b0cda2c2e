"""Random plans, and an engine that writes nonsense but keeps count: everything happens in any order."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from foretell.plato.assembly import Assembly
from foretell.plato.events import PartEnd
from foretell.plato.grammar import MAX_TITLE, MIN_TITLE
from foretell.plato.plan import MAX_PARTS, Part
from foretell.plato.reader import PlanReader
from foretell.plato.schedule import Schedule


def titles() -> st.SearchStrategy[str]:
    marks = st.text(st.characters(exclude_characters=" \t\r\n|<", exclude_categories=["Cs"]), min_size=1, max_size=9)
    lists = st.lists(marks, min_size=1, max_size=7).map(" ".join)
    return lists.filter(lambda title: MIN_TITLE <= len(title.replace(" ", "")) <= MAX_TITLE)


@st.composite
def plans(draw: st.DrawFn, titled: st.SearchStrategy[str] | None = None) -> list[Part]:
    """Draw a plan; unless told otherwise all titles differ."""
    parts = []
    for part_id in range(1, draw(st.integers(2, MAX_PARTS)) + 1):
        needs = draw(st.sets(st.integers(1, part_id - 1))) if part_id > 1 else set()
        title = f"Title {part_id}" if titled is None else draw(titled)
        parts.append(Part(part_id, title, tuple(sorted(needs))))
    return parts


def written(parts: list[Part]) -> str:
    lines = [f"{part.id}. {part.title} < {','.join(map(str, part.needs)) or '-'}\n" for part in parts]
    return "".join([*lines, "END\n"])


class FakeEngine:
    """Writes a plan and its parts, one character or one line at a time, in the order that `random` wants.

    It checks what has to hold after every event: nothing early, nothing that could run left waiting, never too many at
    once, never more tokens than there are.
    """

    def __init__(
        self, parts: list[Part], random: Random, *, max_parallel: int, max_tokens: int, is_pipelined: bool
    ) -> None:
        self.parts, self.random = parts, random
        self.max_parallel, self.max_tokens, self.is_pipelined = max_parallel, max_tokens, is_pipelined
        self.schedule = Schedule(max_parallel=max_parallel, max_answer_tokens=max_tokens, is_pipelined=is_pipelined)
        self.assembly = Assembly()
        self.reader = PlanReader(is_strict=True)
        self.plan_text = written(parts)
        self.known: dict[int, Part] = {}
        self.limits: dict[int, int] = {}
        self.texts: dict[int, str] = {}
        self.running: set[int] = set()
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.output = ""
        self.is_closed = False

    def run(self, *, chance_to_fail: float = 0.0, chance_to_expire: float = 0.0) -> None:
        """Write until the schedule says that all is done."""
        while not self.schedule.is_done:
            self.start()
            if self.random.random() < chance_to_expire:
                self.schedule.expire()
                self.is_closed = True
            can_plan = bool(self.plan_text) and not self.is_closed
            if self.running and not (can_plan and self.random.random() < 0.3):
                part_id = self.random.choice(sorted(self.running))
                self.end(part_id, "failed") if self.random.random() < chance_to_fail else self.write(part_id)
            elif can_plan:
                self.plan()
            else:
                assert self.schedule.is_done, "stalled"

    def plan(self) -> None:
        """Write a piece of the plan."""
        size = self.random.randint(1, 30)
        for part in self.reader.push(self.plan_text[:size]):
            self.known[part.id] = part
            self.schedule.add(part)
            self.assembly.add(part)
        self.plan_text = self.plan_text[size:]
        if not self.plan_text:
            assert self.reader.is_ended
            self.schedule.end_plan()

    def start(self) -> None:
        for launch in self.schedule.start():
            part_id = launch.part.id
            assert not self.is_closed
            assert self.is_pipelined or not self.plan_text
            assert part_id not in self.running | self.ended
            assert self.ended >= set(launch.part.needs)
            assert set(launch.needs_all) | set(launch.lost) == self.ancestors(part_id)
            assert set(launch.lost) == self.ancestors(part_id) & self.failed
            assert (launch.primary in launch.needs_all) if launch.needs_all else (launch.primary is None)
            assert launch.max_new_tokens >= 1
            self.running.add(part_id)
            self.limits[part_id], self.texts[part_id] = launch.max_new_tokens, ""
        assert self.schedule.running == tuple(sorted(self.running))
        assert len(self.running) <= self.max_parallel
        spent = sum(len(self.texts[part_id]) for part_id in self.ended)
        taken = spent + sum(self.limits[part_id] for part_id in self.running)
        assert taken <= self.max_tokens
        if self.is_closed or len(self.running) == self.max_parallel or taken == self.max_tokens:
            return
        if self.is_pipelined or not self.plan_text:
            left = set(self.known) - self.running - self.ended
            assert not [part_id for part_id in left if self.ended >= set(self.known[part_id].needs)]

    def ancestors(self, part_id: int) -> set[int]:
        needs = self.known[part_id].needs
        return set(needs).union(*(self.ancestors(need) for need in needs))

    def write(self, part_id: int) -> None:
        """Write a character of a part, or end it."""
        if len(self.texts[part_id]) == self.limits[part_id]:
            more = self.schedule.extend(part_id) if self.random.random() < 0.5 else 0
            self.limits[part_id] += more
            if not more:
                self.end(part_id, "length")
        elif self.random.random() < 0.05:
            self.end(part_id, "stop")
        else:
            token = self.random.choice(["a", "b", " ", "\n"])
            self.texts[part_id] += token
            self.output += self.assembly.push(part_id, token)

    def end(self, part_id: int, reason: PartEnd) -> None:
        self.running.remove(part_id)
        self.ended.add(part_id)
        if reason == "failed":
            self.failed.add(part_id)
        self.schedule.end(part_id, len(self.texts[part_id]), reason)
        self.output += self.assembly.end(part_id)
