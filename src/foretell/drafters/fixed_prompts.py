"""Prompt tokens with trees that were settled before decoding: the baselines of the drafter that looks each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from foretell.drafters.drafter import Outcome, Proposal, TableDrafter
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.drafters.prompts import GuessStep
from foretell.hardware.fixed_trees import FixedTrees, equal_trees, policy_trees, published_trees, random_trees
from foretell.tree.token_tree import TokenTree

TreeRule = Callable[[PromptTokens, Sequence[float]], FixedTrees]
"""Settles the trees of all states from prompt tokens and T(1), T(2), …"""


def _rows(tokens: PromptTokens, pass_s: Sequence[float]) -> int:
    """Return the rows of a pass under the best policy: what the other rules may spend as well."""
    trees = policy_trees(tokens.ranks, pass_s, tokens.num_chains)
    return max(len(tree.paths) + tokens.num_chains * sum(tree.num_prompts) for tree in trees)


RULES: Final[Mapping[str, TreeRule]] = {
    "prompts-static": lambda tokens, pass_s: policy_trees(tokens.ranks, pass_s, tokens.num_chains),
    "prompts-published": lambda tokens, pass_s: published_trees(tokens.ranks, _rows(tokens, pass_s), tokens.num_chains),
    "prompts-equal": lambda tokens, pass_s: equal_trees(tokens.ranks, _rows(tokens, pass_s), tokens.num_chains),
    "prompts-random": lambda tokens, pass_s: random_trees(tokens.ranks, _rows(tokens, pass_s), tokens.num_chains),
}
"""By the drafter's name."""


class FixedPromptsDrafter(TableDrafter):
    """Fills the tree of its state with guesses by rank; the engine buys it whole.

    Args:
        tokens: the prompt tokens; shared.
        trees: by state.
        vocab_size: of the target.
        name: of the drafter and of its nodes' source.
        eos_ids: tokens below which nothing is drafted.
    """

    needs: frozenset[str] = frozenset({"guesses"})

    def __init__(
        self, tokens: PromptTokens, trees: FixedTrees, vocab_size: int, name: str, *, eos_ids: frozenset[int]
    ) -> None:
        self.name = name
        self._tokens, self._trees, self._vocab_size, self._eos_ids = tokens, trees, vocab_size, eos_ids
        self._kept_ids = np.arange(vocab_size) if tokens.sampler is None else tokens.sampler.kept_ids  # [K]
        self._step: GuessStep | None = None

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        self._step = None

    def observe(self, outcome: Outcome) -> None:
        guesses = outcome.guesses
        self._step = None if guesses is None else GuessStep(self._tokens, guesses, self._vocab_size)

    @torch.inference_mode()
    def propose(self, proposal: Proposal) -> TokenTree:
        fixed = self._trees[0 if self._step is None else self._step.num_slots]
        tree = TokenTree.root(proposal.tip)
        num_left = max(len(proposal.pass_s) - 1, proposal.max_nodes)  # rows; of an ensemble even the root's may be more
        num_prompts = [min(fixed.num_prompts[0], num_left // self._tokens.num_chains)]
        nodes: dict[tuple[int, ...], int] = {(): 0}
        ranked: dict[int, list[tuple[float, int]]] = {}
        num_rows = 1 + self._tokens.num_chains * num_prompts[0]
        for path, size in zip(fixed.paths[1:], fixed.num_prompts[1:], strict=True):
            parent = nodes.get(path[:-1])
            rows = 1 + self._tokens.num_chains * size
            if parent is None or len(path) > proposal.max_depth or num_rows + rows > proposal.max_nodes + 1:
                continue
            if parent and tree.token_ids[parent] in self._eos_ids:
                continue
            if parent not in ranked:
                ranked[parent] = self._best(len(path) - 1, tree.token_ids[parent])
            log_prob, token_id = ranked[parent][path[-1]]
            nodes[path] = tree.add(parent, token_id, tree.log_accept[parent] + log_prob, self.name)
            num_prompts.append(size)
            num_rows += rows
        tree.num_prompts = num_prompts
        return tree

    def fork(self) -> FixedPromptsDrafter:
        twin = FixedPromptsDrafter(self._tokens, self._trees, self._vocab_size, self.name, eos_ids=self._eos_ids)
        twin._step = self._step
        return twin

    @property
    def memory_bytes(self) -> int:
        return self._tokens.num_bytes

    def _best(self, slot: int, before: int) -> list[tuple[float, int]]:
        """Return the best guesses of a slot after a token, with log-probabilities."""
        assert self._step is not None
        scores = torch.log_softmax(self._step.scores(slot, [before])[0].float(), -1)  # [K]
        best = scores.topk(min(10, len(scores)))
        values = [max(value, math.log(1e-6)) for value in best.values.tolist()]
        return list(zip(values, self._kept_ids[best.indices.cpu().numpy()].tolist(), strict=True))
