"""The protocol behind which every drafter stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from foretell.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the step allows a drafter to propose."""

    root: int
    """The token below which to draft: the last of the sequence as the drafter has observed it."""
    max_nodes: int
    """Most nodes besides the root; 0 means propose nothing."""
    max_depth: int
    """Deepest node's distance from the root."""
    ahead: tuple[int, ...] = ()
    """Tokens after the root that will almost surely follow but were not observed yet. The draft continues after the
    last of them, and its root is that token, or `root` where there are none."""
    seed: int | None = None
    """Key of the noise when sampling, None when greedy."""

    @property
    def tip(self) -> int:
        """The token at the draft's root."""
        return self.ahead[-1] if self.ahead else self.root


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one sequence: only what a drafter declared in `needs` is filled in."""

    token_ids: Sequence[int]
    """Tokens that the step emitted, in order."""
    hidden: Tensor | None = None
    """Final hidden states of the committed rows, [A, E]."""
    top_ids: Sequence[Sequence[int]] | None = None
    """For each committed row, the target's most likely next ids, best first."""


class Drafter(Protocol):
    """Proposes continuations of one sequence. Never accepts, never touches the target's cache."""

    name: str
    needs: frozenset[str]
    """Names of `Outcome` fields that the drafter wants besides `token_ids`."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Forget everything learned from a sequence and start another; `prompt_ids` may be of length 1."""

    def propose(self, proposal: Proposal) -> TokenTree:
        """Return a tree rooted at `proposal.root`; may be the root alone."""

    def observe(self, outcome: Outcome) -> None:
        """Take in what was emitted."""

    def fork(self) -> Drafter:
        """Return an independent copy, for a sequence forked from this one."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held by tables, weights and caches of this drafter."""


@dataclass
class NoDrafter:
    """Plain decoding: proposes nothing."""

    name: str = "none"
    needs: frozenset[str] = field(default_factory=frozenset)
    memory_bytes: int = 0

    def begin(self, prompt_ids: Sequence[int]) -> None: ...

    def propose(self, proposal: Proposal) -> TokenTree:
        return TokenTree.root(proposal.tip)

    def observe(self, outcome: Outcome) -> None: ...

    def fork(self) -> NoDrafter:
        return NoDrafter()
