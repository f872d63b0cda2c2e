"""Suffix drafter: quote what followed the longest earlier occurrence of the last tokens, in this text or a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from foretell.drafters.automaton import NO_MATCH, Match, SuffixAutomaton
from foretell.drafters.backoff import Level, back_off
from foretell.drafters.corpus import Corpus
from foretell.drafters.drafter import Outcome, Proposal, TableDrafter
from foretell.drafters.grow import MIN_PATH_PROBABILITY, grow
from foretell.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

Matches = tuple[Match, Match]
"""In the text and in the corpus."""


class SuffixDrafter(TableDrafter):
    """Backs off from the longest match of any length to the last token, in the sequence's own text and in a corpus.

    Args:
        eos_ids: tokens below which nothing is drafted.
        corpus: texts to quote beside the sequence's own; read only, shared by all forks and drafters that get it.

    Cost: 2 µs a token to learn, 3 µs a node to propose.
    Source: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975; Hu et al. 2024, SAM Decoding, arXiv:2411.10666.
    """

    name = "suffix"
    needs: frozenset[str] = frozenset()

    def __init__(self, *, eos_ids: frozenset[int], corpus: Corpus | None = None) -> None:
        self._eos_ids = eos_ids
        self._corpus = corpus
        self._text = SuffixAutomaton()
        self._quote = NO_MATCH  # the longest suffix of the text that the corpus holds

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        self._text, self._quote = SuffixAutomaton(), NO_MATCH
        self._learn(prompt_ids)

    def propose(self, proposal: Proposal) -> TokenTree:
        text, quote = self._text.tail(), self._quote
        for token_id in proposal.ahead:
            text = self._text.step(text, token_id)
        if self._corpus is None:
            return grow(proposal, text, self._expand_text, self.name, self._eos_ids)
        for token_id in proposal.ahead:
            quote = self._corpus.step(quote, token_id)
        return grow(proposal, (text, quote), self._expand_both, self.name, self._eos_ids)

    def observe(self, outcome: Outcome) -> None:
        self._learn(outcome.token_ids)

    def fork(self) -> SuffixDrafter:
        twin = SuffixDrafter(eos_ids=self._eos_ids, corpus=self._corpus)
        twin._text, twin._quote = self._text.copy(), self._quote
        return twin

    @property
    def memory_bytes(self) -> int:
        """Estimate; the corpus counts in full, though it is shared."""
        return self._text.memory_bytes + (0 if self._corpus is None else self._corpus.memory_bytes)

    def _learn(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._text.extend(token_id)
        if self._corpus is not None:
            for token_id in token_ids:
                self._quote = self._corpus.step(self._quote, token_id)

    def _expand_text(self, match: Match, path_probability: float) -> list[tuple[float, int, Match]]:
        found = back_off(self._text.levels(match), MIN_PATH_PROBABILITY / path_probability)
        return [(probability, token_id, self._text.step(match, token_id)) for probability, token_id in found]

    def _expand_both(self, matches: Matches, path_probability: float) -> list[tuple[float, int, Matches]]:
        assert self._corpus is not None
        text, quote = matches
        levels = _longest_first(self._text.levels(text), self._corpus.levels(quote))
        found = back_off(levels, MIN_PATH_PROBABILITY / path_probability)
        return [
            (probability, token_id, (self._text.step(text, token_id), self._corpus.step(quote, token_id)))
            for probability, token_id in found
        ]


def _longest_first(text: Iterator[Level], corpus: Iterator[Level]) -> Iterator[Level]:
    """Merge two runs of levels; the text's go first where they are equal."""
    waiting = next(corpus, None)
    for level in text:
        while waiting is not None and waiting.order > level.order:
            yield waiting
            waiting = next(corpus, None)
        yield level
    while waiting is not None:
        yield waiting
        waiting = next(corpus, None)
