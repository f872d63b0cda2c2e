"""A plan: the parts of an answer, and which of them need which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

MAX_PARTS: Final = 8
"""Most parts of a plan."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an answer.

    Args:
        id: 1, 2, … in the order of the answer.
        title: what the part is about; one line.
        needs: ids of the parts that it builds on, ascending, all smaller than its own: plans cannot have cycles.
    """

    id: int
    title: str
    needs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert list(self.needs) == sorted({need for need in self.needs if 0 < need < self.id}), self


@dataclass(frozen=True)
class Plan:
    """The parts of an answer, ids ascending from 1 without gaps.

    Source: arXiv:2402.12280 (dependency graph of sub-problems).
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        assert [part.id for part in self.parts] == list(range(1, len(self.parts) + 1)), self.parts

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def part(self, part_id: int) -> Part:
        """Return a part by its id."""
        return self.parts[part_id - 1]

    def ancestors(self, part_id: int) -> tuple[int, ...]:
        """Return all that a part needs, directly or through others, ascending."""
        found: set[int] = set()
        waiting = list(self.part(part_id).needs)
        while waiting:
            need = waiting.pop()
            if need not in found:
                found.add(need)
                waiting.extend(self.part(need).needs)
        return tuple(sorted(found))

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """For each part, how many others must come before it, one after the other."""
        levels: list[int] = []
        for part in self.parts:
            levels.append(1 + max((levels[need - 1] for need in part.needs), default=-1))
        return tuple(levels)

    @property
    def depth(self) -> int:
        """Parts of the longest chain; 0 without parts."""
        return 1 + max(self.levels, default=-1)

    @property
    def width(self) -> int:
        """Most parts of one level: how many can be written at once where all take equally long."""
        return max((self.levels.count(level) for level in range(self.depth)), default=0)
