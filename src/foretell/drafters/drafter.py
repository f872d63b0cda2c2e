"""The protocol behind which every drafter stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from foretell.result import DraftWork
from foretell.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from foretell.params import SamplingParams
    from foretell.verify.draws import DrawPlan


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the target samples, as far as a drafter with probabilities can follow it cheaply."""

    seed: int
    sequence_key: int
    """With the seed the key of the noise, see `foretell.verify.noise`."""
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, sampling: SamplingParams, seed: int, sequence_key: int) -> DraftSampling:
        """Return what drafters may know of a request's sampling."""
        return cls(seed, sequence_key, sampling.temperature, sampling.top_k, sampling.top_p)


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
    sampling: DraftSampling | None = None
    """None when greedy."""
    pass_s: Sequence[float] = ()
    """Seconds that the target's pass is expected to take with 0, 1, 2, … of the draft's nodes; empty: not known."""

    @property
    def tip(self) -> int:
        """The token at the draft's root."""
        return self.ahead[-1] if self.ahead else self.root


@dataclass(frozen=True, slots=True)
class Guesses:
    """Rows of prompt tokens: slot j's guess the token j + 1 places after the row that they stand behind."""

    hidden: Tensor
    """The target's final hidden states, [C, m, E]."""
    logits: Tensor
    """[C, m, V]."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one sequence: only what a drafter declared in `needs` is filled in."""

    token_ids: Sequence[int]
    """Tokens that the step emitted, in order."""
    hidden: Tensor | None = None
    """The target's final hidden states that these tokens were chosen from, [A, E]: those of the tokens before them."""
    ahead_hidden: Tensor | None = None
    """The same for the tokens that the next proposal has as `ahead`, [K, E]; computed elsewhere in the pass, so that
    they may differ in the last bits from what the next pass will find."""
    top_ids: Sequence[Sequence[int]] | None = None
    """For each committed row, the target's most likely next ids, best first."""
    guesses: Guesses | None = None
    """What the prompt tokens behind the last accepted row computed: guesses of what follows the next proposal's tip.
    None where there were none, or none is wanted."""


class Drafter(Protocol):
    """Proposes continuations of one sequence. Never accepts, never touches the target's cache."""

    name: str
    needs: frozenset[str]
    """Names of `Outcome` fields that the drafter wants besides `token_ids`."""

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        """Forget everything learned from a sequence and start another.

        Args:
            prompt_ids: may be of length 1.
            hidden: the target's final hidden states of the prompt's tokens but the last, [P - 1, E], or of the last of
                them where earlier ones were not computed; only if the drafter `needs` "hidden".
        """

    def propose(self, proposal: Proposal) -> TokenTree:
        """Return a tree rooted at `proposal.root`; may be the root alone."""

    def observe(self, outcome: Outcome) -> None:
        """Take in what was emitted."""

    def fork(self) -> Drafter:
        """Return an independent copy, for a sequence forked from this one."""

    def close(self) -> None:
        """Give back what the drafter holds; it is not used any more."""

    @property
    def work(self) -> DraftWork:
        """Counters since `begin`."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held by tables, weights and caches of this drafter."""


@runtime_checkable
class DrawingDrafter(Drafter, Protocol):
    """A drafter that can draw children from a law of its own, for the rules that test draws."""

    def draw(self, proposal: Proposal, plan: DrawPlan) -> TokenTree:
        """Return a tree of the plan's shape rooted at `proposal.root`, see `foretell.drafters.drawn`.

        What is drawn must follow from the text and the plan alone, without a clock, so that a seed repeats it.
        """


class TableDrafter:
    """What all drafters share that run no model."""

    def close(self) -> None: ...

    @property
    def work(self) -> DraftWork:
        return DraftWork()


@dataclass
class NoDrafter(TableDrafter):
    """Plain decoding: proposes nothing."""

    name: str = "none"
    needs: frozenset[str] = field(default_factory=frozenset)
    memory_bytes: int = 0

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None: ...

    def propose(self, proposal: Proposal) -> TokenTree:
        return TokenTree.root(proposal.tip)

    def draw(self, proposal: Proposal, plan: DrawPlan) -> TokenTree:
        return TokenTree.root(proposal.tip)

    def observe(self, outcome: Outcome) -> None: ...

    def fork(self) -> NoDrafter:
        return NoDrafter()
