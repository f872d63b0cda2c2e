"""The suffix automaton against counting by hand, and the corpus built on it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from foretell.drafters.automaton import NO_MATCH, Match, SuffixAutomaton
from foretell.drafters.corpus import Corpus

texts = st.lists(st.integers(0, 3), max_size=40)


def occurrences(text: list[int], string: list[int]) -> list[int]:
    """Return where the string's occurrences end."""
    size = len(string)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == string]


def longest_suffix(text: list[int], string: list[int], last_end: int) -> int:
    """Return the length of the string's longest suffix with an occurrence that ends at `last_end` or before."""
    return max(
        size
        for size in range(len(string) + 1)
        if size == 0 or occurrences(text[:last_end], string[len(string) - size :])
    )


def check_match(automaton: SuffixAutomaton, text: list[int], string: list[int], match: Match) -> None:
    for state, length in automaton.suffixes(match):
        ends = occurrences(text, string[len(string) - length :])
        newest_first = [text[end] for end in reversed(ends) if end < len(text)]
        assert list(automaton.followers(state)) == list(Counter(newest_first).items())


@given(texts)
def test_tail_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    match = automaton.tail()
    assert match[1] == (longest_suffix(text, text, len(text) - 1) if text else 0)
    check_match(automaton, text, text, match)
    assert len(automaton) <= max(2, 2 * len(text))


@given(texts, texts)
def test_steps_keep_the_longest_suffix_that_occurs(text: list[int], string: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    match = NO_MATCH
    for end, token_id in enumerate(string, start=1):
        match = automaton.step(match, token_id)
        assert match[1] == longest_suffix(text, string[:end], len(text))
        check_match(automaton, text, string[:end], match)


@given(texts, texts)
def test_copies_are_independent(text: list[int], more: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    twin = automaton.copy()
    for token_id in more:
        twin.extend(token_id)
    check_match(automaton, text, text, automaton.tail())
    check_match(twin, text + more, text + more, twin.tail())


def test_looping_text_costs_no_more_than_other_text() -> None:
    """A period of one has a suffix of every length; the walk over them is bounded."""
    automaton = SuffixAutomaton([1] * 5000)
    assert automaton.tail()[1] == 4999
    level = next(iter(automaton.levels(automaton.tail())))
    assert level.followers == [(1, 1)]


@given(st.lists(texts, max_size=4), texts)
def test_a_corpus_never_quotes_across_texts(corpus_texts: list[list[int]], string: list[int]) -> None:
    corpus = Corpus(corpus_texts)
    match = NO_MATCH
    for end, token_id in enumerate(string, start=1):
        match = corpus.step(match, token_id)
        longest = max((longest_suffix(text, string[:end], len(text)) for text in corpus_texts), default=0)
        assert match[1] == longest
        followers: Counter[int] = Counter()
        for text in corpus_texts:
            followers.update(text[e] for e in occurrences(text, string[end - longest : end]) if e < len(text))
        level = next(iter(corpus.levels(match)), None)
        if longest and followers:
            assert level is not None
            assert dict(level.followers) == followers
            counts = [count for _, count in level.followers]
            assert counts == sorted(counts, reverse=True)


def test_an_empty_corpus_is_false() -> None:
    assert not Corpus([])
    assert not Corpus([[], []])
    assert Corpus([[1]])
