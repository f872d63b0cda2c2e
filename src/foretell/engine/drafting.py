"""What a sequence puts into a step: drafts are proposed, and those rows bought that are worth their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from foretell.drafters.calibration import Calibration
from foretell.drafters.drafter import DrawingDrafter, Proposal
from foretell.engine.prompting import Prompting, use_of
from foretell.engine.sequence import DecodingSequence
from foretell.hardware.budget import buy
from foretell.hardware.profile import LatencyProfile
from foretell.hardware.prompt_rows import PromptWorth, RowPurchase, buy_rows
from foretell.passes.runner import MAX_ROWS, Runner
from foretell.tree.merge import graft
from foretell.tree.pack import PackedTree, pack
from foretell.tree.shape import best_first, prune, subtree
from foretell.tree.token_tree import TokenTree
from foretell.verify.draws import DrawPlan

MAX_DRAFT_NODES: Final = 24
"""Most nodes that a drafter is asked for; more cost host time and hardly ever get bought."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What one sequence puts into a step."""

    tree: PackedTree
    num_provisional: int
    expected_s: float
    """What drafting took and the pass is expected to take."""
    plain_s: float
    """What a pass of the root alone is expected to take."""
    proposed: TokenTree | None
    """What the drafter proposed below the provisional tokens, as it estimated it; None when it was not asked."""


class Drafting:
    """Asks drafters, and buys rows.

    Args:
        runner: the target; how many rows its passes take.
        profile: measured T(N).
        calibration: acceptance estimates.
        prompting: prompt tokens that drafters may have guess for them.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        profile: LatencyProfile,
        calibration: Calibration,
        prompting: Prompting | None,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._calibration = runner, calibration
        self._prompting, self._clock = prompting, clock
        self.profile = profile

    @property
    def profile(self) -> LatencyProfile:
        """Measured T(N)."""
        return self._profile

    @profile.setter
    def profile(self, profile: LatencyProfile) -> None:
        self._profile = profile
        self._curves: dict[tuple[int, int, bool], list[float]] = {}

    def draft(self, sequence: DecodingSequence, num_sharing: int, max_rows: int | None = None) -> Draft:
        """Return the rows to verify: the root, tokens to compute again, and the drafts worth their time.

        Args:
            sequence: whose.
            num_sharing: sequences that share the pass.
            max_rows: that this sequence may have in it, beside what its request says.
        """
        started_s = self._clock()
        # Where the draft decides what a seed gives, neither a clock nor other sequences may decide the draft.
        is_free = sequence.request.rule is None
        curve = self.curve(sequence.region.length, num_sharing if is_free else 1, is_eager=sequence.request.is_eager)
        curve = curve[: sequence.request.max_rows][: max_rows if is_free else None]
        certain = _provisional_tree(sequence)
        num_certain = len(certain)
        max_depth = self._max_depth(sequence)
        proposed = None
        if max_depth >= num_certain and len(curve) > num_certain and sequence.gate.is_open():
            proposed = self._propose(sequence, num_certain - 1, max_depth, curve)
            tree = self._buy(sequence, certain, proposed, curve, started_s)
        else:
            tree = pack(prune(certain, min(max_depth + 1, len(curve))))
        draft_s = self._clock() - started_s
        sequence.stats.draft_s += draft_s
        return Draft(
            tree=tree,
            num_provisional=min(num_certain, tree.num_nodes) - 1,
            expected_s=(draft_s if is_free else 0.0) + curve[len(tree) - 1],
            plain_s=curve[0],
            proposed=proposed,
        )

    def curve(self, context: int, num_sharing: int = 1, *, is_eager: bool = False) -> list[float]:
        """Return T(N) near a context length for the rows that each of `num_sharing` sequences may have in a pass.

        Sequences that share a pass are expected to buy alike, so N rows of one stand for N rows of each; of the pass's
        seconds each bears its share, beside those of its own drafting.
        """
        bucket = context // 256
        key = (bucket, num_sharing, is_eager)
        if key not in self._curves:
            compiled = None if is_eager else self._runner.compiled
            num_prefix = 0 if self._prompting is None else self._prompting.tokens.num_prefix  # lies behind the rows
            sizes = list(range(1, min(self._profile.max_rows, MAX_ROWS - num_prefix) + 1))
            if compiled is not None:
                sizes = [size for size in sizes if compiled.num_rows(size) is not None]
            self._curves[key] = [
                self._profile.seconds(size * num_sharing, bucket * 256) / num_sharing for size in sizes
            ]
        return self._curves[key]

    def _propose(self, sequence: DecodingSequence, num_ahead: int, max_depth: int, curve: Sequence[float]) -> TokenTree:
        """Return what the drafter proposes below the root and `num_ahead` provisional tokens."""
        request = sequence.request
        proposal = Proposal(
            root=sequence.token_ids[-1],
            ahead=tuple(sequence.provisional[:num_ahead]),
            max_nodes=min(len(curve) - 1 - num_ahead, MAX_DRAFT_NODES),
            max_depth=max_depth - num_ahead,
            sampling=request.draft_sampling,
            pass_s=curve[num_ahead:],
        )
        if request.rule is None or not request.rule.needs_draws:
            return request.drafter.propose(proposal)
        assert isinstance(request.drafter, DrawingDrafter)
        shape = sequence.drawn.plan(curve, proposal.max_nodes, proposal.max_depth)
        if len(shape) == 1:
            return TokenTree.root(proposal.tip)
        return request.drafter.draw(proposal, DrawPlan(shape, request.rule.draft_chance(len(sequence.token_ids))))

    def _buy(
        self,
        sequence: DecodingSequence,
        certain: TokenTree,
        proposed: TokenTree,
        curve: Sequence[float],
        started_s: float,
    ) -> PackedTree:
        """Return the certain tokens and, below them, the proposed nodes and prompt tokens that are worth their rows."""
        rule = sequence.request.rule
        if rule is not None and rule.needs_draws:
            return pack(graft(certain, proposed))  # a draw that is dropped for what it is would bias the output
        if proposed.num_prompts is not None and self._prompting is not None:
            num_prompts = [0] * (len(certain) - 1) + proposed.num_prompts
            return self._pack(self._prompting, sequence, graft(certain, proposed), num_prompts)
        if rule is None:
            is_sampled = sequence.request.draft_sampling is not None
            proposed = self._calibration.calibrate(proposed, is_sampled=is_sampled)
        tree = graft(certain, proposed)
        draft_s = self._clock() - started_s if rule is None else 0.0
        if self._prompting is not None and "guesses" in sequence.request.drafter.needs:
            return self._buy_prompts(self._prompting, sequence, tree, len(certain), curve, draft_s)
        if len(tree) == len(certain):
            return pack(tree)
        log_accept = [tree.log_accept[node] for node in best_first(tree)]
        return pack(prune(tree, buy(log_accept, curve, draft_s, len(certain)).num_nodes))

    def _buy_prompts(
        self,
        prompting: Prompting,
        sequence: DecodingSequence,
        tree: TokenTree,
        num_certain: int,
        curve: Sequence[float],
        draft_s: float,
    ) -> PackedTree:
        """Return the nodes that are worth their rows, and behind them prompt tokens for the next step."""
        is_free = sequence.request.rule is None
        worth = prompting.worth(curve, use_of(sequence)) if is_free else prompting.policy(curve).worth
        order = best_first(tree)
        purchase = _purchase(tree, order, curve, draft_s, worth, num_certain)
        nodes = sorted(range(len(purchase.num_prompts)), key=order.__getitem__)
        kept = subtree(tree, order[: len(purchase.num_prompts)])
        return self._pack(prompting, sequence, kept, [purchase.num_prompts[place] for place in nodes])

    def _pack(
        self, prompting: Prompting, sequence: DecodingSequence, tree: TokenTree, num_prompts: Sequence[int]
    ) -> PackedTree:
        """Return a tree's rows with those prompt tokens behind each node whose guesses may still be asked for."""
        last_depth = self._max_depth(sequence) - 1
        sizes = [max(0, min(size, last_depth - depth)) for size, depth in zip(num_prompts, tree.depths(), strict=True)]
        return pack(tree, sizes, prompting.ids if any(sizes) else None)

    def _max_depth(self, sequence: DecodingSequence) -> int:
        """Return how deep a node may lie: neither more tokens nor more positions than are left."""
        tokens_left = sequence.request.max_new_tokens - sequence.num_new_tokens
        positions_left = self._runner.context_tokens - len(sequence.token_ids)
        return max(0, min(tokens_left, positions_left) - 1)  # the last token needs no row of its own


def _purchase(
    tree: TokenTree,
    order: Sequence[int],
    curve: Sequence[float],
    draft_s: float,
    worth: PromptWorth,
    num_certain: int,
) -> RowPurchase:
    """Return what to buy of a tree, given its nodes best first."""
    places = {node: place for place, node in enumerate(order)}
    log_accept = [tree.log_accept[node] for node in order]
    parents = [-1, *(places[tree.parents[node]] for node in order[1:])]
    return buy_rows(log_accept, parents, curve, draft_s, worth, num_certain)


def _provisional_tree(sequence: DecodingSequence) -> TokenTree:
    """Return the chain that is certain: the root, and accepted tokens that must be computed again."""
    tree = TokenTree.root(sequence.token_ids[-1])
    for token_id, source in zip(sequence.provisional, sequence.provisional_sources, strict=True):
        tree.add(len(tree) - 1, token_id, 0.0, source)
    return tree
