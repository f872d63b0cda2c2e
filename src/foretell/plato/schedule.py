"""Decide which parts are written when, and how many tokens each may take: events in, launches out, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from foretell.plato.events import PartEnd
from foretell.plato.plan import MAX_PARTS, Part, Plan

MIN_PART_TOKENS: Final = 48
"""Tokens of a paragraph of three short sentences: with less a part cannot say anything."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A part to be started now."""

    part: Part
    max_new_tokens: int
    needs_all: tuple[int, ...]
    """Written parts that it builds on, directly or through others, ascending."""
    lost: tuple[int, ...]
    """Parts that it builds on and that failed, ascending."""
    primary: int | None
    """The one of these whose sequence it goes on from; those that this sequence does not hold are quoted."""
    chain: int
    """Parts of the longest chain of known ones that begins with it."""


class Schedule:
    """The state of a planned answer's parts: waiting, running or ended.

    Call `start` after every event, or `next` and `take`; whatever can run then runs. A part can run when all that it
    needs has ended, with whatever reason: a part that failed holds up nobody. Of those that can run, the one with the
    longest chain of parts waiting for it comes first, then the smaller id; all are estimated equally long, so chains
    are counted in parts.

    Tokens: what is left is shared equally by the parts not started yet, each getting at least 48 tokens as long as so
    many are left for every other, and at most `max_share` equal shares of the whole. What a part leaves over goes back.
    While the plan is being written it is taken to have `max_parts` parts, so that none still to be planned runs short.
    Where that makes early parts too short, `extend` gives them more once it is known how many parts there are.

    Args:
        max_parallel: most parts that run at once.
        max_answer_tokens: of all parts together. Once they are used up, no further part starts.
        max_parts: most parts of the plan.
        is_pipelined: whether parts start while the plan is being written.
        max_share: most equal shares that a part may take. With 1 none is written alone after all others; with more, one
            that starts early can take what it needs at once.
    """

    def __init__(
        self,
        *,
        max_parallel: int,
        max_answer_tokens: int,
        max_parts: int = MAX_PARTS,
        is_pipelined: bool = True,
        max_share: int = 1,
    ) -> None:
        assert max_parallel >= 1
        assert max_answer_tokens >= 1
        self._max_parallel, self._max_share = max_parallel, max_share
        self._max_answer_tokens = max_answer_tokens
        self._num_parts = max_parts
        self._can_start = is_pipelined
        self._parts: list[Part] = []
        self._granted: dict[int, int] = {}
        """Tokens that each running part may take."""
        self._written: dict[int, int] = {}
        """Tokens that each ended part took."""
        self._lost: set[int] = set()
        self._held: dict[int, tuple[int, ...]] = {}
        """Parts whose text each started part's sequence holds, its own included."""
        self._num_left = max_answer_tokens
        self._is_plan_ended = False
        self._is_closed = False

    @property
    def running(self) -> tuple[int, ...]:
        """Ids of the parts being written, ascending."""
        return tuple(sorted(self._granted))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of the parts not started, ascending; after `expire` or `cancel` they stay so."""
        return tuple(part.id for part in self._parts if part.id not in self._held)

    @property
    def is_done(self) -> bool:
        """Whether nothing runs and nothing will."""
        is_short = self._is_closed or not self._num_left
        return not self._granted and (is_short or (self._is_plan_ended and not self.waiting))

    def add(self, part: Part) -> None:
        """Take a part of the plan; ids ascend without gaps."""
        assert part.id == len(self._parts) + 1 <= self._num_parts
        assert not self._is_plan_ended
        self._parts.append(part)

    def end_plan(self) -> None:
        """Learn that no more parts will come."""
        self._is_plan_ended = self._can_start = True
        self._num_parts = len(self._parts)

    def start(self) -> list[Launch]:
        """Return what is to be started now, most urgent first; from here on it counts as running."""
        launches = []
        while launch := self.next():
            self.take(launch)
            launches.append(launch)
        return launches

    def next(self) -> Launch | None:
        """Return the most urgent part that can start now, for `take`; None if there is none."""
        if self._is_closed or not self._can_start or not self._num_left or len(self._granted) == self._max_parallel:
            return None
        ready = [part for part in self._parts if part.id not in self._held and self._written.keys() >= set(part.needs)]
        if not ready:
            return None
        chains = self._chains()
        part = min(ready, key=lambda part: (-chains[part.id], part.id))
        needs = Plan(tuple(self._parts)).ancestors(part.id)
        written = tuple(need for need in needs if need not in self._lost)
        lost = tuple(need for need in needs if need in self._lost)
        return Launch(part, self._grant(), written, lost, self._primary(written), chains[part.id])

    def take(self, launch: Launch) -> None:
        """Learn that this part starts; from here on it counts as running."""
        part_id = launch.part.id
        self._granted[part_id] = launch.max_new_tokens
        self._num_left -= launch.max_new_tokens
        self._held[part_id] = (*launch.needs_all, part_id)

    def extend(self, part_id: int) -> int:
        """Return how many more tokens a running part that took all it was given may take; 0 if it must end."""
        if self._is_closed:
            return 0
        more = min(self._cap - self._granted[part_id], self._num_left // (self._num_unstarted + 1))
        self._granted[part_id] += more
        self._num_left -= more
        return more

    def end(self, part_id: int, num_tokens: int, reason: PartEnd) -> None:
        """Learn that a part has ended, and how many tokens it took: at most what it was given counts.

        Once cancelled, ends are ignored: they may be on their way already.
        """
        if part_id not in self._granted:
            assert self._is_closed
            return
        granted = self._granted.pop(part_id)
        self._written[part_id] = min(num_tokens, granted)
        self._num_left += granted - self._written[part_id]
        if reason == "failed":
            self._lost.add(part_id)

    def expire(self) -> None:
        """Start nothing from now on; what runs may end."""
        self._is_closed = True

    def cancel(self) -> tuple[int, ...]:
        """Start nothing from now on, and return the running parts, which the caller stops; none counts as running."""
        stopped = self.running
        self._granted.clear()
        self._is_closed = True
        return stopped

    def is_awaited(self, part_id: int | None) -> bool:
        """Whether a part that is still to start may go on from this one's sequence; None: from the plan's."""
        if self._is_closed or not self._is_plan_ended:
            return not self._is_closed
        plan = Plan(tuple(self._parts))
        needs = [plan.ancestors(waiting) for waiting in self.waiting]
        return any(not each if part_id is None else part_id in each for each in needs)

    @property
    def _num_unstarted(self) -> int:
        return self._num_parts - len(self._held)

    @property
    def _cap(self) -> int:
        return max(MIN_PART_TOKENS, self._max_share * self._max_answer_tokens // self._num_parts)

    def _chains(self) -> dict[int, int]:
        """Return for each part the length of the longest chain of known parts that begins with it."""
        chains = {part.id: 1 for part in self._parts}
        for part in reversed(self._parts):
            for need in part.needs:
                chains[need] = max(chains[need], chains[part.id] + 1)
        return chains

    def _grant(self) -> int:
        share = self._num_left // self._num_unstarted
        num_kept = (self._num_unstarted - 1) * min(MIN_PART_TOKENS, share)
        return min(max(share, MIN_PART_TOKENS), self._cap, self._num_left - num_kept)

    def _primary(self, written: Sequence[int]) -> int | None:
        """Return the part whose sequence saves most: of all that is needed, it holds the most tokens."""

        def num_held(part_id: int) -> int:
            return sum(self._written[held] for held in self._held[part_id])

        return max(written, key=lambda part_id: (num_held(part_id), -part_id), default=None)
