"""A suffix automaton over token ids that grows by one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from foretell.drafters.backoff import MAX_FOLLOWERS, Level

_MAX_WALK: Final = 64
"""Suffixes whose counts one token updates: looping text has as many as tokens, and the longest ones matter."""


Match = tuple[int, int]
"""A string that occurs in a text: its state, and its number of tokens."""

NO_MATCH: Final[Match] = (0, 0)


class SuffixAutomaton:
    """Every substring of a text, how often it occurred, and what followed it.

    A state stands for the substrings that end at the same places; its link leads to the state of its longest suffix
    that also ends elsewhere. State 0 is the empty string.

    Cost: amortised O(1) a token, about 2 µs; at most two states a token.
    Source: Blumer et al. 1985; for drafting, Hu et al. 2024, SAM Decoding, arXiv:2411.10666.
    """

    __slots__ = ("_counts", "_last", "_lengths", "_links", "_nexts")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._nexts: list[dict[int, int]] = [{}]  # per state {token: state}, the most recent token last
        self._links = [-1]
        self._lengths = [0]
        self._counts = [0]
        self._last = 0
        for token_id in token_ids:
            self.extend(token_id)

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._links)

    @property
    def memory_bytes(self) -> int:
        """Estimate: a small dictionary and four list entries a state."""
        return 330 * len(self._links)

    def copy(self) -> SuffixAutomaton:
        """Return an independent copy."""
        twin = SuffixAutomaton()
        twin._nexts = [followers.copy() for followers in self._nexts]
        twin._links, twin._lengths, twin._counts = self._links.copy(), self._lengths.copy(), self._counts.copy()
        twin._last = self._last
        return twin

    def start_text(self) -> None:
        """Begin another text: no substring spans both."""
        self._last = 0

    def extend(self, token_id: int) -> None:
        """Append a token."""
        nexts, links, lengths = self._nexts, self._links, self._lengths
        new, state = len(links), self._last
        nexts.append({})
        links.append(0)
        lengths.append(lengths[state] + 1)
        self._counts.append(1)
        self._last = new
        while state >= 0 and token_id not in nexts[state]:
            nexts[state][token_id] = new
            state = links[state]
        if state < 0:
            return
        target = nexts[state][token_id]
        if lengths[state] + 1 != lengths[target]:
            target = self._split(state, token_id, target)
        links[new] = target
        self._count_again(state, token_id, target)

    def tail(self) -> Match:
        """Return the text's longest suffix that occurred before."""
        state = max(self._links[self._last], 0)
        return state, self._lengths[state]

    def step(self, match: Match, token_id: int) -> Match:
        """Return the longest suffix of the match and the token that occurs."""
        nexts, (state, length) = self._nexts, match
        while token_id not in nexts[state]:
            if state == 0:
                return NO_MATCH
            state = self._links[state]
            length = self._lengths[state]
        return nexts[state][token_id], length + 1

    def suffixes(self, match: Match) -> Iterator[Match]:
        """Yield the match and ever shorter suffixes of it, one a state, the empty string excluded."""
        state, length = match
        while state > 0:
            yield state, length
            state = self._links[state]
            length = self._lengths[state]

    def followers(self, state: int) -> Iterator[tuple[int, int]]:
        """Yield `(token id, count)` of what followed a state, the most recent first."""
        counts = self._counts
        for token_id, target in reversed(self._nexts[state].items()):
            yield token_id, counts[target]

    def levels(self, match: Match) -> Iterator[Level]:
        """Yield what followed the match and ever shorter suffixes of it, longest first."""
        for state, length in self.suffixes(match):
            recent = list(islice(self.followers(state), MAX_FOLLOWERS))
            if recent:
                yield Level(length, recent)

    def _split(self, state: int, token_id: int, target: int) -> int:
        """Give the strings of `target` that end other than its longest a state of their own, and return it."""
        clone = len(self._links)
        self._nexts.append(self._nexts[target].copy())
        self._links.append(self._links[target])
        self._lengths.append(self._lengths[state] + 1)
        self._counts.append(self._counts[target])
        self._links[target] = clone
        while state >= 0 and self._nexts[state].get(token_id) == target:
            self._nexts[state][token_id] = clone
            state = self._links[state]
        return clone

    def _count_again(self, state: int, token_id: int, target: int) -> None:
        """Count one more occurrence of the token after `state` and its suffixes, and make it their newest follower."""
        nexts, links, counts = self._nexts, self._links, self._counts
        for _ in range(_MAX_WALK):
            followers = nexts[state]
            followers[token_id] = followers.pop(token_id)
            state = links[state]
            if state < 0:
                break
        for _ in range(_MAX_WALK):
            if target <= 0:
                break
            counts[target] += 1
            target = links[target]
