"""From what followed a context, longest context first, to how likely each token is next.

The constants were fitted once, by log-likelihood, to greedy answers of a 135M chat model (4,500 tokens, twelve kinds of
prompts); `calibration` corrects the result for the model at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MAX_FOLLOWERS: Final = 8
"""Followers of one context that are worth ranking; the rest share too little probability."""

_SEEN_ONCE: Final = (1.0, 0.72, 0.44, 0.31, 0.30, 0.29, 0.24, 0.17, 0.15, 0.14, 0.12, 0.09, 0.055)
"""Chance that a context of so many tokens, seen once, goes on differently this time."""

_AGREED: Final[tuple[tuple[float, ...], ...]] = tuple(
    tuple(escape ** (count**0.87) for count in range(17)) for escape in _SEEN_ONCE
)
"""The same, `[order][count]`, after `count` occurrences that all went on alike."""

_NEWEST_AGAIN, _NEWEST_NEW = 0.42, 0.60
"""Chance of something new where followers differ: whether the newest of them was seen more than once."""

_ONE_TOKEN_FEW, _ONE_TOKEN_SOME, _ONE_TOKEN_MANY = 0.71, 0.56, 0.39
"""The same for contexts of one token that were seen twice, up to eleven times, and more."""


@dataclass(slots=True)
class Level:
    """What followed one context."""

    order: int
    """Tokens of the context; 0 when none is known, which ranks below all others."""
    followers: list[tuple[int, int]]
    """`(token id, count)`, most recent first, at most `MAX_FOLLOWERS`, at least one."""


def back_off(levels: Iterable[Level], floor: float) -> list[tuple[float, int]]:
    """Return `(probability, token id)` for every named token, in no particular order.

    Each context claims a share of what longer ones left over, and divides it among the followers that those did not
    name.

    Args:
        levels: longest context first; read only as far as there is probability left.
        floor: stop once less than this is left.

    Source: prediction by partial matching with exclusion, Cleary & Witten 1984; the escape probabilities are measured.
    """
    found: list[tuple[float, int]] = []
    named: set[int] = set()
    left = 1.0
    for level in levels:
        followers, escape = level.followers, _escape(level)
        if named:
            fresh = [follower for follower in followers if follower[0] not in named]
            if not fresh:
                continue
            # Longer contexts spoke against this one: it deserves less trust than on its own.
            escape = min(0.99, 1.23 * (escape if len(fresh) == len(followers) else max(escape, 0.38)))
            followers = fresh
        share = left * (1.0 - escape)
        if len(followers) == 1:
            found.append((share, followers[0][0]))
            named.add(followers[0][0])
        else:
            weights = _weights(level.order, followers)
            share /= sum(weights)
            found.extend([(share * weight, token_id) for weight, (token_id, _) in zip(weights, followers)])
            named.update([token_id for token_id, _ in followers])
        left *= escape
        if left < floor:
            break
    return found


def _escape(level: Level) -> float:
    order, followers = level.order, level.followers
    if len(followers) == 1:
        return _AGREED[min(order, 12)][min(followers[0][1], 16)]
    if order > 1:
        return _NEWEST_AGAIN if followers[0][1] > 1 else _NEWEST_NEW
    total = sum([count for _, count in followers])
    if total < 3:
        return _ONE_TOKEN_FEW
    return _ONE_TOKEN_SOME if total < 12 else _ONE_TOKEN_MANY


def _weights(order: int, followers: list[tuple[int, int]]) -> list[float]:
    """Long contexts go by recency, single tokens by frequency."""
    if order > 1:
        return [0.5**rank for rank in range(len(followers))]
    return [count**0.6 * 0.93**rank for rank, (_, count) in enumerate(followers)]
