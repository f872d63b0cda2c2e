"""The drafter that asks nobody else: prompt tokens in the target's own pass guess what follows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from foretell.drafters.choices import Choices, NoiseMemory, filter_scores, rank
from foretell.drafters.drafter import Guesses, Outcome, Proposal, TableDrafter
from foretell.drafters.grow import grow
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.tree.token_tree import TokenTree

_LEAST_READ: Final = 0.15
"""Less likely tokens are not asked through the sampler what follows them: a call costs as much as 2 % of a pass."""

_SIBLINGS: Final = 4
"""Tokens that a call of the sampler asks for at once: those that may be asked next."""

_ANY: Final = -1
"""In place of the token before a guess, where the guess does not depend on it."""

_State = tuple[int, int, tuple[int, ...]]
"""Slot of the next guess, the token before it, and that token's likeliest siblings."""


class PromptsDrafter(TableDrafter):
    """Grows a tree from the guesses of the prompt tokens behind the last accepted row.

    There are as many levels as that row had prompt tokens, none at first: the engine decides which rows have some.

    Args:
        tokens: the prompt tokens; shared.
        vocab_size: of the target.
        eos_ids: tokens below which nothing is drafted.

    Cost: 0.5 ms a call of the sampler (135M model, two cores), one or two a step; without it 0.15 ms a slot.
    Source: parallel prompt decoding, arXiv:2405.18628 §3; trees from this step's own probabilities, arXiv:2603.17942.
    """

    name = "prompts"
    needs: frozenset[str] = frozenset({"guesses"})

    def __init__(self, tokens: PromptTokens, vocab_size: int, *, eos_ids: frozenset[int]) -> None:
        self._tokens, self._vocab_size, self._eos_ids = tokens, vocab_size, eos_ids
        self._kept_ids = np.arange(vocab_size) if tokens.sampler is None else tokens.sampler.kept_ids  # [K]
        self._noise = NoiseMemory(self._kept_ids)
        self._guesses: Guesses | None = None
        self._num_tokens = 0

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        self._guesses, self._num_tokens = None, len(prompt_ids)

    def observe(self, outcome: Outcome) -> None:
        self._guesses = outcome.guesses
        self._num_tokens += len(outcome.token_ids)

    @torch.inference_mode()
    def propose(self, proposal: Proposal) -> TokenTree:
        guesses = self._guesses
        if guesses is None or proposal.max_nodes <= 0 or proposal.max_depth <= 0:
            return TokenTree.root(proposal.tip)
        step = GuessStep(self._tokens, guesses, self._vocab_size)
        known: dict[tuple[int, int], Choices] = {}

        def expand(state: _State, path_probability: float) -> Iterable[tuple[float, int, _State]]:
            slot, token_id, siblings = state
            if slot == step.num_slots:
                return ()
            if not step.has_sampler:
                token_id, siblings = _ANY, (_ANY,)
            if (slot, token_id) not in known:
                if slot and step.has_sampler and path_probability < _LEAST_READ:
                    return ()
                scores = step.scores(slot, siblings)  # [S, K]
                ranked = self._rank(scores, proposal, slot)
                known.update(((slot, sibling), choices) for sibling, choices in zip(siblings, ranked, strict=True))
            choices = known[slot, token_id]
            best = tuple(each for _, each in choices[:_SIBLINGS])
            return [(math.exp(log_prob), each, (slot + 1, each, _with(best, each))) for log_prob, each in choices]

        limits = replace(proposal, max_depth=min(proposal.max_depth, step.num_slots))
        start: _State = (0, proposal.tip, (proposal.tip,))
        return grow(limits, start, expand, self.name, self._eos_ids)

    def fork(self) -> PromptsDrafter:
        twin = PromptsDrafter(self._tokens, self._vocab_size, eos_ids=self._eos_ids)
        twin._guesses, twin._num_tokens = self._guesses, self._num_tokens
        return twin

    @property
    def memory_bytes(self) -> int:
        """Prompt tokens and sampler count in full, though they are shared."""
        return self._tokens.num_bytes

    def _rank(self, scores: Tensor, proposal: Proposal, slot: int) -> list[Choices]:
        """Return what may follow, best first; when sampling, with the target's noise."""
        sampling = proposal.sampling
        if sampling is not None:
            position = self._num_tokens + len(proposal.ahead) + slot
            noise = self._noise.rows(sampling, [position] * len(scores))  # [S, K]
            scores = filter_scores(scores, sampling) + noise.to(scores.device)  # [S, K]
        return rank(scores, self._kept_ids)


class GuessStep:
    """One step's guesses as scores over the ids that can be guessed."""

    def __init__(self, tokens: PromptTokens, guesses: Guesses, vocab_size: int) -> None:
        self._sampler, self._guesses, self._vocab_size = tokens.sampler, guesses, vocab_size
        self.num_slots = guesses.hidden.shape[1]
        self.has_sampler = tokens.sampler is not None
        self._states = guesses.hidden.mean(0)  # [m, E]

    def scores(self, slot: int, before: Sequence[int]) -> Tensor:
        """Return unnormalised log-probabilities of a slot's guess after each of these tokens, [S, K]."""
        if self._sampler is None:
            logits = self._guesses.logits[:, slot, : self._vocab_size].float().mean(0)  # [V]
            return logits.expand(len(before), -1)  # [S, V]
        return self._sampler(self._states[slot].expand(len(before), -1), before)


def _with(best: tuple[int, ...], token_id: int) -> tuple[int, ...]:
    """Return the best tokens, this one among them."""
    return best if token_id in best else (token_id,)
