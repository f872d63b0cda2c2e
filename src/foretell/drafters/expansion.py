"""How a draft tree grows under a draft model: which nodes it reads next, and when reading stops paying."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from foretell.drafters.choices import Choices
from foretell.drafters.draft_engine import DraftEngine
from foretell.drafters.drafter import Proposal
from foretell.drafters.grow import MAX_PROBABILITY, MIN_PATH_PROBABILITY
from foretell.passes.runner import MAX_ROWS
from foretell.tree.merge import merge
from foretell.tree.pack import ancestor_bits
from foretell.tree.shape import best_first, subtree
from foretell.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

DRAFT: Final = "draft"
"""Source of a node that the draft model proposed."""

GUESS: Final = "draft prompts"
"""Source of a node that a prompt token of the draft model guessed."""

_MAX_GUESSED: Final = 4
"""Nodes whose children are guessed at once."""

_LOG_MOST: Final = math.log(MAX_PROBABILITY)
_LOG_LEAST: Final = math.log(MIN_PATH_PROBABILITY)

_MAX_READ: Final = MAX_ROWS - 8
"""Most nodes that are read: the cache has room for `MAX_ROWS` slots after the tip, the last pass's padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """How far a draft may branch."""

    max_children: int = 8
    """Most children of a node; 1 makes the draft a chain."""
    max_width: int = 8
    """Most nodes that one pass reads, the second stage's excluded."""
    max_staged: int = 11
    """Most nodes of a second stage."""
    max_staged_rows: int = 12
    """Most rows of a pass that carries a second stage."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a step is expected to bring."""

    num_tokens: float
    tokens_per_s: float


class Expansion:
    """One proposal's tree while it grows; a node is read once its row has been in a pass, so that it has children.

    Slots are counted from the first one after the tip: each read node has one, and `seen` has a bit for each slot that
    a node's row sees, its own included. `num_confirmed` staged nodes were the draft's own best walk from the tip.

    Args:
        proposal: limits, prices, and the root.
        engine: whose calibration and measured seconds decide.
        shape: how far to branch.
        leaf_ids: tokens below which nothing is drafted (EOS).
        max_read_depth: deepest node that may be read.
        beside: a tree that goes to the target as well; None for none.
        started_s: when drafting began.
    """

    def __init__(
        self,
        proposal: Proposal,
        engine: DraftEngine,
        shape: TreeShape,
        leaf_ids: frozenset[int],
        max_read_depth: int,
        beside: TokenTree | None,
        started_s: float,
    ) -> None:
        self._engine, self._leaf_ids, self._max_read_depth = engine, leaf_ids, max_read_depth
        self._is_sampled = proposal.sampling is not None
        self.learned = engine.learned(is_sampled=self._is_sampled)
        self._max_nodes, self._started_s, self._max_children = proposal.max_nodes, started_s, shape.max_children
        self._widths = [width for width in engine.widths if width < shape.max_width] + [shape.max_width]
        self._num_certain = 1 + len(proposal.ahead)  # tokens that the target's pass emits without a draft
        self._pass_s = proposal.pass_s[: proposal.max_nodes + 1]
        self.tree, self._beside = TokenTree.root(proposal.tip), beside
        self.depths, self.seen = [0], {0: 0}
        self.num_slots = self.num_confirmed = 0
        self._unread: list[int] = []
        self._children: dict[int, range] = {}  # of nodes that were read, the best first
        self._news: list[int] = []  # nodes read since the last estimates
        self._guessed: list[int] = []  # and those whose children were guessed
        self._merged = self._estimates = self.tree
        self._reach = [0.0]  # estimates of the nodes of `tree`; a new one's is its parent's and the draft's own
        self.prompted: dict[int, Tensor] = {}  # of read nodes, the state of the prompt token behind each, [E]
        self._accept: list[float] = []  # of the merged tree's nodes but the root, the largest first
        self._open: list[float] = []  # chance that the text comes to a node and leaves it by none of its children
        self._estimate()

    # Stop or go on

    def promise(self) -> Promise:
        """Return what the step would bring if drafting ended now."""
        if not self._pass_s:
            return Promise(self._num_certain + sum(self._accept), 1.0)
        return self._promise((), self._engine.clock() - self._started_s)

    def next_nodes(self) -> list[int]:
        """Return the nodes that the next pass should read; none where it would not pay.

        The more acceptance a node has that its children do not cover, the sooner it is read. A pass is expected to give
        each a child of average quality, so it pays if the tree with those children brings more tokens a second.
        """
        width = min(self._widths[-1], _MAX_READ - self.num_slots)
        ranked = nlargest(width, self._unread, key=self._open.__getitem__)
        if not ranked or not self._pass_s:
            return ranked[: self._widths[0]] if len(self._merged) <= self._max_nodes else []
        spent_s = self._engine.clock() - self._started_s
        best_rate, best = self._promise((), spent_s).tokens_per_s, 0
        for width in self._widths:
            hoped_for = [self._open[node] for node in ranked[:width]]
            rate = self._promise(hoped_for, spent_s + self._engine.pass_s(width)).tokens_per_s
            if rate > best_rate:
                best_rate, best = rate, width
            if width >= len(ranked):
                break
        return ranked[:best]

    def _promise(self, places: Sequence[float], draft_s: float, child: float | None = None) -> Promise:
        """Return the best that the tree may bring, with a child of average or given quality in these open places.

        Source: the budget's own rule, see `foretell.hardware.budget.buy`.
        """
        child = self.learned.best_child.value if child is None else child
        accept = sorted([*self._accept, *(child * chance for chance in places)], reverse=True)
        num_tokens = list(accumulate(accept, initial=float(self._num_certain)))
        rates = [num / (draft_s + pass_s) for num, pass_s in zip(num_tokens, self._pass_s)]
        best = rates.index(max(rates))
        return Promise(num_tokens[best], rates[best])

    def _estimate(self) -> None:
        """Bring estimates up to date; nodes of `tree` have the same places in the merged one."""
        self._merged = self.tree if self._beside is None else merge([self.tree, self._beside])
        self._estimates = self._engine.calibration.calibrate(self._merged, is_sampled=self._is_sampled)
        log_accept, parents = self._estimates.log_accept, self._merged.parents
        self._reach = log_accept[: len(self.tree)]
        accept = [math.exp(value) for value in log_accept]
        self._open, self._accept = accept.copy(), sorted(accept[1:], reverse=True)
        for node in range(1, len(parents)):
            self._open[parents[node]] -= accept[node]
        for nodes, mean in ((self._news, self.learned.best_child), (self._guessed, self.learned.best_guess)):
            for node in nodes:
                child = self._best_child(node)
                mean.add(0.0 if child is None else accept[child] / accept[node])
            nodes.clear()

    # Read

    def seen_by(self, nodes: Sequence[int]) -> list[int]:
        """Give unread nodes the next slots, and return what each sees."""
        parents = self.tree.parents
        for slot, node in enumerate(nodes, start=self.num_slots):
            self.seen[node] = self.seen[parents[node]] | 1 << slot
        self.num_slots += len(nodes)
        return [self.seen[node] for node in nodes]

    def guessable(self, guess_s: float) -> list[int]:
        """Return unread nodes whose children a prompt token may guess, if that is worth these seconds."""
        parents = self.tree.parents
        nodes = [node for node in self._unread if parents[node] in self.prompted]
        nodes = nlargest(_MAX_GUESSED, nodes, key=self._open.__getitem__)
        if not nodes or not self._pass_s:
            return []
        spent_s, child = self._engine.clock() - self._started_s, self.learned.best_guess.value
        places = [self._open[node] for node in nodes]
        hoped_for = self._promise(places, spent_s + guess_s, child).tokens_per_s
        return nodes if hoped_for > self._promise((), spent_s).tokens_per_s else []

    def guess(self, nodes: Sequence[int], choices: Sequence[Choices]) -> None:
        """Add guessed children of unread nodes, which are not read any more, and bring estimates up to date."""
        for node, found in zip(nodes, choices, strict=True):
            self._add_children(node, found, GUESS)
        self._estimate()

    def take(self, nodes: Sequence[int], choices: Sequence[Choices], prompted: Tensor | None = None) -> None:
        """Add the children of nodes that a pass has read, and bring estimates up to date.

        `prompted`: states of the prompt tokens behind the first of them, [P, E].
        """
        self._add_all(nodes, choices)
        if prompted is not None:
            self.prompted.update(zip(nodes, prompted))
        self._estimate()

    def take_staged(self, staged: TokenTree, choices: Sequence[Choices], prompted: Tensor | None = None) -> None:
        """Do the same for the tip, and for every staged node that is itself among the children added so.

        Args:
            staged: the second stage's tree below the tip, all of it read.
            choices: after each of its nodes.
            prompted: states of the prompt tokens behind the tip and the first of its nodes, [P, E].
        """
        self.num_slots, seen = len(staged) - 1, ancestor_bits(staged.parents)
        self._add_all([0], choices[:1])
        places, walk = {0: 0}, 0
        for node in range(1, len(staged)):
            parent = places.get(staged.parents[node])
            place = None if parent is None else self._child(parent, staged.token_ids[node])
            if parent is None or place is None:
                continue
            if parent == walk and place == self._best_child(parent):
                walk, self.num_confirmed = place, self.num_confirmed + 1
                self.tree.sources[place] = f"{DRAFT}<{staged.sources[node]}"
            places[node], self.seen[place] = place, seen[node] >> 1  # the tip has no slot here
            self._add_all([place], choices[node : node + 1])
        if prompted is not None:
            self.prompted.update((places[node], state) for node, state in enumerate(prompted) if node in places)
        self._estimate()

    def result(self) -> TokenTree:
        """Return the best nodes of all, with the estimates that they came with."""
        if len(self._merged) <= self._max_nodes + 1:
            return self._merged
        return subtree(self._merged, best_first(self._estimates)[: self._max_nodes + 1])

    def _add_all(self, nodes: Sequence[int], choices: Sequence[Choices]) -> None:
        read = set(nodes)
        self._unread = [node for node in self._unread if node not in read]
        for node, found in zip(nodes, choices, strict=True):
            self._add_children(node, found)

    def _add_children(self, node: int, found: Choices, source: str = DRAFT) -> None:
        tree, depth = self.tree, self.depths[node] + 1
        first = len(tree)
        for log_prob, token_id in found[: self._max_children]:
            step = min(log_prob, _LOG_MOST)
            if self._reach[node] + step < _LOG_LEAST:
                break
            child = tree.add(node, token_id, tree.log_accept[node] + step, source)
            self._reach.append(self._reach[node] + step)
            self.depths.append(depth)
            if source == DRAFT and depth <= self._max_read_depth and token_id not in self._leaf_ids:
                self._unread.append(child)
        self._children[node] = range(first, len(tree))
        (self._news if source == DRAFT else self._guessed).append(node)

    def _child(self, parent: int, token_id: int) -> int | None:
        return next((child for child in self._children[parent] if self.tree.token_ids[child] == token_id), None)

    def _best_child(self, parent: int) -> int | None:
        return next(iter(self._children[parent]), None)


def stage(
    tree: TokenTree,
    readable_ids: Collection[int],
    leaf_ids: frozenset[int],
    max_nodes: int,
    max_read_depth: int,
    is_chain: bool,
) -> TokenTree:
    """Return the best nodes of a second stage's tree that the draft model could choose and should then read.

    Parents come first, a likelier node before a less likely one; a chain is the first of all.
    """
    staged = TokenTree.root(tree.token_ids[0])
    places, depths = {0: 0}, [0]
    for node in best_first(tree)[1:]:
        parent, token_id = places.get(tree.parents[node]), tree.token_ids[node]
        if parent is None or depths[parent] == max_read_depth or token_id not in readable_ids or token_id in leaf_ids:
            continue
        if is_chain and parent != len(staged) - 1:
            continue
        if len(staged) > max_nodes:
            break
        places[node] = staged.add(parent, token_id, tree.log_accept[node], tree.sources[node])
        depths.append(depths[parent] + 1)
    return staged
