"""Several drafters as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from foretell.drafters.drafter import Drafter, Outcome, Proposal
from foretell.result import DraftWork
from foretell.tree.merge import merge
from foretell.tree.shape import prune
from foretell.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor


class CombinedDrafter:
    """Asks every drafter for the whole budget and keeps the best nodes of the merged trees.

    A node that several propose carries the name of the one most confident of it.

    Args:
        drafters: at least one; they belong to this drafter from now on.
        name: of the combination; nodes keep their own drafter's name.
    """

    def __init__(self, drafters: Sequence[Drafter], name: str) -> None:
        assert drafters
        self.name = name
        self.needs: frozenset[str] = frozenset().union(*(drafter.needs for drafter in drafters))
        self._drafters: Final = tuple(drafters)

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        for drafter in self._drafters:
            drafter.begin(prompt_ids, hidden)

    def propose(self, proposal: Proposal) -> TokenTree:
        trees = [drafter.propose(proposal) for drafter in self._drafters]
        return prune(merge(trees), proposal.max_nodes + 1)

    def observe(self, outcome: Outcome) -> None:
        for drafter in self._drafters:
            drafter.observe(outcome)

    def fork(self) -> CombinedDrafter:
        return CombinedDrafter([drafter.fork() for drafter in self._drafters], self.name)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()

    @property
    def work(self) -> DraftWork:
        works = [drafter.work for drafter in self._drafters]
        return DraftWork(*(sum(getattr(work, name.name) for work in works) for name in fields(DraftWork)))

    @property
    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes for drafter in self._drafters)
