"""From a row of logits and the tokens before it to the target's next-token law, as the sampling parameters shape it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretell.errors import ConfigError
from foretell.params import SamplingParams
from foretell.verify.constraint import Constraint
from foretell.verify.edits import (
    Context,
    add_logit_bias,
    call_logits_processor,
    forbid_end,
    forbid_repeated_ngrams,
    forbid_tokens,
    forbid_words,
    penalize_presence,
    penalize_repetition,
)
from foretell.verify.filters import keep_min_p, keep_top_k, keep_top_p, keep_typical
from foretell.verify.scores import Indices, Scores, apply_temperature, check_scores, normalize, read_scores


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the filters leave of one row."""

    ids: Indices | None
    """[K], distinct; None when no filter applies, and the scores are those of ids 0, 1, 2, …"""
    scores: Scores
    """[K], unnormalised log-probabilities at the request's temperature; -inf for a forbidden id."""


@dataclass(frozen=True, slots=True)
class Law:
    """The next-token distribution of the target at one node: the ids that can be drawn, and nothing of the others."""

    ids: NDArray[np.int64]
    """[K], ascending."""
    log_probs: NDArray[np.float64]
    """[K], finite; their exponentials sum to 1."""

    @classmethod
    def certain(cls, token_id: int) -> Law:
        """Return the distribution that says one token."""
        return cls(ids=np.array([token_id]), log_probs=np.zeros(1))

    def find(self, token_id: int) -> int | None:
        """Return a token's place in `ids`; None where it cannot be drawn."""
        place = int(np.searchsorted(self.ids, token_id))
        return place if place < len(self.ids) and self.ids[place] == token_id else None


class Processors:
    """The sampling parameters of one request, made ready to be applied to one row of logits after another.

    The order is transformers': bias, penalties, bans, the caller's own processors, the constraint; then, when sampling,
    temperature, top-k, top-p, min-p, typical. Every row is processed with its own context, so at a node of a draft tree
    penalties and constraint see the path to that node (vllm#6718). Nothing that decides is kept from one row to the
    next, unless a caller's own processor does so.

    Differs from transformers in two ways, both on purpose: `bad_words_ids` may ban an EOS id, and top-p keeps ties (see
    `filters`).
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        eos_ids: Iterable[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        """Check the ids that `params` names, and gather what there is to do.

        Args:
            params: what to apply.
            num_prompt_tokens: how many of each context's first tokens are the prompt.
            eos_ids: the model's EOS ids; those at or above `vocab_size` can't be chosen and are passed over.
            vocab_size: number of valid ids. Rows may be wider, for alignment; the rest is never looked at.
            constraint: of this sequence, where `params` ask for one.

        Raises:
            ConfigError: an id in `logit_bias`, `bad_words_ids` or `stop_token_ids` is not below `vocab_size`.
        """
        assert vocab_size > 0
        assert params.is_constrained == (constraint is not None)
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        _check_ids("bad_words_ids", (token_id for word in params.bad_words_ids for token_id in word), vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self._num_prompt_tokens = num_prompt_tokens
        self._constraint = constraint
        self._edits = _edits(params, [token_id for token_id in eos_ids if token_id < vocab_size])
        self._filters = _filters(params)

    @property
    def has_edits(self) -> bool:
        """Whether anything but temperature and filters applies: only then can a row's best token change."""
        return bool(self._edits or self.params.logits_processors or self._constraint)

    def edit(self, logits: Tensor, context_ids: Sequence[int]) -> Scores:
        """Return the row after biases, penalties, bans, processors and constraint: float32 [V], on the CPU.

        Args:
            logits: [V] or wider, any float dtype and device; left as it is. May share memory with the result.
            context_ids: all token ids before the one that this row predicts: prompt, output, draft path.

        Raises:
            NumericsError: the row holds NaN or +inf, or everything in it is -inf; before, or because of, processing.
            ConfigError: the constraint has grown beyond limits.
        """
        scores = read_scores(logits, self.vocab_size, is_copy=self.has_edits)  # [V]
        if not self.has_edits:
            return scores
        context = Context(context_ids, self._num_prompt_tokens)
        # A product beyond float32 becomes an infinity, which the check after it reports.
        with np.errstate(over="ignore", invalid="ignore"):
            for edit in self._edits:
                edit(scores, context)
        for processor in self.params.logits_processors:
            scores = call_logits_processor(scores, context, processor, logits.device)  # [V]
        check_scores(scores, "after `logit_bias`, penalties, bans and logits processors")
        # Last, so that no other score brings back what it forbids.
        return scores if self._constraint is None else self._constraint.narrow(scores, context)

    def candidates(self, logits: Tensor, context_ids: Sequence[int]) -> Candidates:
        """Return what the row leaves to draw from, after temperature and filters; greedy, the best id alone.

        Takes and raises what `edit` does.
        """
        scores = self.edit(logits, context_ids)  # [V]
        if self.params.is_greedy:
            best = np.array([scores.argmax()])  # [1], the first among equals
            return Candidates(ids=best, scores=scores[best])
        ids: Indices | None = None
        if self._constraint is not None:  # it often leaves a handful: filters and noise need not look at the others
            possible = np.flatnonzero(scores > -np.inf)  # [K]
            if len(possible) < len(scores) / 4:
                ids, scores = possible, scores[possible]  # [K], [K]
        scores = apply_temperature(scores, self.params.temperature)  # [V] or [K]
        for keep in self._filters:
            kept = keep(scores)  # [K]
            ids, scores = (kept if ids is None else ids[kept]), scores[kept]  # [K], [K]
        return Candidates(ids=ids, scores=scores)

    def law(self, logits: Tensor, context_ids: Sequence[int]) -> Law:
        """Return the distribution from which plain decoding draws the next token; greedy, all of it lies on one id.

        Takes and raises what `edit` does.
        """
        candidates = self.candidates(logits, context_ids)
        possible = np.flatnonzero(candidates.scores > -np.inf)  # [K]
        ids = possible if candidates.ids is None else candidates.ids[possible]  # [K]
        return Law(ids=ids, log_probs=normalize(candidates.scores[possible]))


_Edit = Callable[[Scores, Context], None]
_Filter = Callable[[Scores], Indices]


def _edits(params: SamplingParams, eos_ids: Sequence[int]) -> list[_Edit]:
    """Return the edits that `params` asks for, in transformers' order."""
    edits: list[_Edit] = []
    if params.logit_bias:
        edits.append(lambda scores, _: add_logit_bias(scores, params.logit_bias))
    if params.repetition_penalty != 1.0:
        edits.append(partial(penalize_repetition, penalty=params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        edits.append(partial(penalize_presence, presence=params.presence_penalty, frequency=params.frequency_penalty))
    if params.no_repeat_ngram_size:
        edits.append(partial(forbid_repeated_ngrams, size=params.no_repeat_ngram_size))
    banned_ids = [word[0] for word in params.bad_words_ids if len(word) == 1]
    if banned_ids:
        edits.append(lambda scores, _: forbid_tokens(scores, banned_ids))
    banned_words = [word for word in params.bad_words_ids if len(word) > 1]
    if banned_words:
        edits.append(partial(forbid_words, words=banned_words))
    end_ids = [*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)]
    if params.min_new_tokens and end_ids:
        edits.append(partial(forbid_end, end_ids=end_ids, min_new_tokens=params.min_new_tokens))
    return edits


def _filters(params: SamplingParams) -> list[_Filter]:
    """Return the filters that `params` asks for, in transformers' order."""
    filters: list[_Filter] = []
    if params.top_k:
        filters.append(partial(keep_top_k, top_k=params.top_k))
    if params.top_p < 1.0:
        filters.append(partial(keep_top_p, top_p=params.top_p))
    if params.min_p:
        filters.append(partial(keep_min_p, min_p=params.min_p))
    if params.typical_p < 1.0:
        filters.append(partial(keep_typical, typical_p=params.typical_p))
    return filters


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(
                f"`{name}` holds token id {token_id}, the vocabulary ends at {vocab_size - 1}: "
                "use ids of this model's tokenizer"
            )
