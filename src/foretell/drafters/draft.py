"""The drafter that runs a draft model, which a cheaper drafter may draft for in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.drafters.choices import Choices, NoiseMemory, filter_scores, rank
from foretell.drafters.draft_engine import DraftEngine
from foretell.drafters.draft_reader import DraftReader
from foretell.drafters.drafter import Drafter, Outcome, Proposal
from foretell.drafters.drawn import DraftLaw, draw_tree
from foretell.drafters.expansion import DRAFT, Expansion, TreeShape, stage
from foretell.result import DraftWork
from foretell.tree.merge import merge
from foretell.tree.shape import prune
from foretell.tree.token_tree import TokenTree
from foretell.verify.draws import DrawPlan


class DraftModelDrafter:
    """Grows a tree below the tip, several nodes a pass, for as long as another pass is worth its time.

    The first pass reads what the draft has not read yet, the tip last. With a second stage it also carries a tree from
    a cheaper drafter: where the draft's own choices run along that tree, their children are known without another pass.
    Estimates are the draft's own; the calibrated ones only decide what is read.

    Args:
        engine: the draft model; shared.
        name: of the drafter; its nodes are from "draft", and from "draft<" and another name where the second stage
            foresaw the draft's best choice.
        eos_ids: tokens below which nothing is drafted.
        shape: how far to branch.
        inner: drafts for the draft model only.
        has_prompts: guess by the draft model's own prompt tokens what it does not read, where there are some.
        beside: drafts for the target, under its own names, and for the draft model; where it is sure enough of its
            draft, the draft model is not asked.

    Cost: 0.2 ms of host time a pass, besides the pass.
    Source: Spector & Re 2023, arXiv:2308.04623 (a tree of drafts, a second stage below them); best-first expansion in
        passes, EAGLE-2, arXiv:2406.16858; stopping by measured seconds, Sequoia, arXiv:2402.12374 §3.3.
    """

    def __init__(
        self,
        engine: DraftEngine,
        name: str,
        *,
        eos_ids: frozenset[int],
        shape: TreeShape | None = None,
        inner: Drafter | None = None,
        beside: Drafter | None = None,
        has_prompts: bool = False,
    ) -> None:
        self.name = name
        self._has_prompts = has_prompts and engine.prompts is not None and engine.prompts.sampler is not None
        self._engine, self._eos_ids, self._shape = engine, eos_ids, shape or TreeShape()
        self._inner, self._beside = inner, beside
        self._helpers = [drafter for drafter in (beside, inner) if drafter is not None]
        own_needs = frozenset({"hidden"} if engine.model.kind == "feature" else ())
        self.needs: frozenset[str] = own_needs.union(*(drafter.needs for drafter in self._helpers))
        self._reader = DraftReader(engine)
        self._noise = NoiseMemory(engine.model.kept_ids)

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        for drafter in self._helpers:
            drafter.begin(prompt_ids, hidden)
        self._reader.begin(prompt_ids, hidden)

    def observe(self, outcome: Outcome) -> None:
        for drafter in self._helpers:
            drafter.observe(outcome)
        self._reader.extend(outcome.token_ids, outcome.hidden, outcome.ahead_hidden)

    def propose(self, proposal: Proposal) -> TokenTree:
        started_s = self._engine.clock()
        if proposal.max_nodes <= 0 or proposal.max_depth <= 0:
            return TokenTree.root(proposal.tip)
        num_levels = min(proposal.max_depth, proposal.max_nodes, self._reader.depth_left(len(proposal.ahead)))
        if num_levels == 0:
            return self._without_draft(proposal)
        beside = None if self._beside is None else self._beside.propose(proposal)
        expansion = Expansion(proposal, self._engine, self._shape, self._eos_ids, num_levels - 1, beside, started_s)
        asking, before = expansion.learned.asking, expansion.promise()
        pass_s = proposal.pass_s[0] if proposal.pass_s else 1.0
        if beside is not None and not asking.is_due(before.num_tokens, pass_s):
            return beside
        staged = self._read_tip(expansion, proposal, num_levels - 1, beside)
        num_more = self._read_on(expansion, proposal)
        if self._helpers:
            expansion.learned.stages[self.name].record(staged, expansion.num_confirmed, num_more)
        self._guess(expansion, proposal)
        self._reader.rewind()
        if beside is not None:
            asking.record(before.num_tokens, pass_s, expansion.promise().tokens_per_s / before.tokens_per_s)
        return expansion.result()

    def draw(self, proposal: Proposal, plan: DrawPlan) -> TokenTree:
        """Return a tree of the plan's shape, drawn from the draft model alone, one pass a level."""
        seen = {0: 0}

        def laws_of(tree: TokenTree, nodes: list[int]) -> list[DraftLaw]:
            if nodes == [0]:
                logits = self._reader.read_tip(proposal.ahead, tree).logits  # [1, K]
            else:
                for slot, node in enumerate(nodes, start=len(seen) - 1):
                    seen[node] = seen[tree.parents[node]] | 1 << slot
                depths = tree.depths()
                logits = self._reader.read_nodes(
                    [tree.token_ids[node] for node in nodes],
                    [depths[node] for node in nodes],
                    [seen[node] for node in nodes],
                ).logits  # [N, K]
            scores = logits if proposal.sampling is None else filter_scores(logits, proposal.sampling)  # [N, K]
            probs = scores.double().softmax(-1).nan_to_num(0.0)  # [N, K], a row of NaN is a law without tokens
            return [DraftLaw(self._engine.model.kept_ids, row) for row in probs.cpu().numpy()]

        # What fits the draft's context depends on the text and the shape alone, as drawing requires.
        if plan.shape.depth > self._reader.depth_left(len(proposal.ahead)):
            self._reader.work.num_exhausted_steps += 1
            return TokenTree.root(proposal.tip)
        tree = draw_tree(proposal.tip, plan, laws_of, DRAFT, self._eos_ids)
        self._reader.rewind()
        return tree

    def fork(self) -> DraftModelDrafter:
        """Return an independent copy; its `work` starts at 0."""
        twin = DraftModelDrafter(
            self._engine,
            self.name,
            eos_ids=self._eos_ids,
            shape=self._shape,
            inner=None if self._inner is None else self._inner.fork(),
            beside=None if self._beside is None else self._beside.fork(),
            has_prompts=self._has_prompts,
        )
        twin._reader = self._reader.fork()
        return twin

    def close(self) -> None:
        for drafter in self._helpers:
            drafter.close()
        self._reader.close()

    @property
    def is_exhausted(self) -> bool:
        """Whether the text is longer than the draft's context: then the draft model proposes nothing any more."""
        return self._reader.is_exhausted

    @property
    def work(self) -> DraftWork:
        """Counters of this drafter's own model."""
        return self._reader.work

    @property
    def memory_bytes(self) -> int:
        """Weights and cache count in full, though they are shared."""
        return self._engine.num_bytes + sum(drafter.memory_bytes for drafter in self._helpers)

    def _read_tip(
        self, expansion: Expansion, proposal: Proposal, max_read_depth: int, beside: TokenTree | None
    ) -> TokenTree:
        """Read the tip, and in the same pass as much of a second stage's tree as is expected to pay; returns that."""
        engine, reader = self._engine, self._reader
        num_rows = reader.num_unread(len(proposal.ahead)) + self._has_prompts  # the tip's prompt token comes first
        max_staged = min(self._shape.max_staged, self._shape.max_staged_rows - num_rows)
        payoff = expansion.learned.stages[self.name]
        staged = TokenTree.root(proposal.tip)
        if self._helpers and min(max_read_depth, max_staged) > 0 and payoff.is_due():
            making_began_s = engine.clock()
            made = self._stage(proposal, max_staged, max_read_depth, beside)
            staged = payoff.choose(made, engine.clock() - making_began_s, num_rows, engine.pass_s)
        began_s = engine.clock()
        num_prompted = self._num_prompted(num_rows - self._has_prompts, len(staged))
        read = reader.read_tip(proposal.ahead, staged, num_prompted)
        expansion.take_staged(staged, self._rank(read.logits, proposal, staged.depths()), read.prompted)
        engine.record(num_rows + len(staged) - 1, engine.clock() - began_s)
        reader.work.num_confirmed += expansion.num_confirmed
        reader.work.num_staged_passes += len(staged) > 1
        return staged

    def _read_on(self, expansion: Expansion, proposal: Proposal) -> int:
        """Read nodes until another pass does not pay; returns how many passes did."""
        engine, num_passes = self._engine, 0
        began_s = engine.clock()
        while nodes := expansion.next_nodes():
            depths = [expansion.depths[node] for node in nodes]
            token_ids = [expansion.tree.token_ids[node] for node in nodes]
            num_prompted = self._num_prompted(0, len(nodes))
            read = self._reader.read_nodes(token_ids, depths, expansion.seen_by(nodes), num_prompted)
            expansion.take(nodes, self._rank(read.logits, proposal, depths), read.prompted)
            now_s = engine.clock()
            engine.record(len(nodes), now_s - began_s)
            began_s, num_passes = now_s, num_passes + 1
        return num_passes

    def _num_prompted(self, num_rows: int, num_nodes: int) -> int:
        """Return how many of the nodes that a pass reads may have a prompt token behind them at no row's price."""
        if not self._has_prompts:
            return 0
        num_rows = max(num_rows - 1, 0) + num_nodes
        return min(num_nodes, self._engine.runner.padded(num_rows) - num_rows)

    def _guess(self, expansion: Expansion, proposal: Proposal) -> None:
        """Guess what follows nodes that were not read, by the prompt tokens behind their parents, where that pays."""
        prompts, engine = self._engine.prompts, self._engine
        if not self._has_prompts:
            return
        assert prompts is not None and prompts.sampler is not None  # noqa: PT018  # one promise of `__init__`
        nodes = expansion.guessable(engine.guess_s.value)
        if not nodes:
            return
        began_s, tree = engine.clock(), expansion.tree
        states = torch.stack([expansion.prompted[tree.parents[node]] for node in nodes])  # [N, E]
        scores = prompts.sampler(states, [tree.token_ids[node] for node in nodes])  # [N, K]
        expansion.guess(nodes, self._rank(scores, proposal, [expansion.depths[node] for node in nodes]))
        engine.guess_s.add(engine.clock() - began_s)

    def _rank(self, logits: Tensor, proposal: Proposal, depths: Sequence[int]) -> list[Choices]:
        """Return what may follow nodes of these depths, best first; when sampling, with the target's noise."""
        sampling = proposal.sampling
        if sampling is not None:
            after_tip = len(self._reader.text) + len(proposal.ahead)
            noise = self._noise.rows(sampling, [after_tip + depth for depth in depths])  # [N, K]
            logits = filter_scores(logits, sampling) + noise.to(logits.device)  # [N, K]
        return rank(logits, self._engine.model.kept_ids)

    def _stage(self, proposal: Proposal, max_staged: int, max_read_depth: int, beside: TokenTree | None) -> TokenTree:
        """Return what the draft model itself might choose next, as far as cheaper drafters know."""
        trees = [] if beside is None else [beside]
        if self._inner is not None:
            trees.append(self._inner.propose(replace(proposal, max_nodes=max_staged, max_depth=max_read_depth)))
        tree = merge(trees)
        return stage(tree, self._engine.kept, self._eos_ids, max_staged, max_read_depth, self._shape.max_children == 1)

    def _without_draft(self, proposal: Proposal) -> TokenTree:
        self._reader.work.num_exhausted_steps += 1
        trees = [drafter.propose(proposal) for drafter in self._helpers]
        return prune(merge([TokenTree.root(proposal.tip), *trees]), proposal.max_nodes + 1)
