"""Keys and values of prompt beginnings that many requests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from foretell.cache.kv_cache import KVCache, Region
from foretell.engine.sequence import DecodingSequence

MIN_SHARED: Final = 16
"""Fewer shared tokens are computed again: copying and looking up is hardly cheaper."""


@dataclass(eq=False, slots=True)
class _Prefix:
    token_ids: list[int]
    region: Region
    is_pinned: bool


class PrefixCache:
    """Looks up the longest known beginning of a prompt, token by token.

    Args:
        cache: holds the slots.
        max_prefixes: beyond so many, the one that was not used for the longest time goes; pinned ones stay.
    """

    def __init__(self, cache: KVCache, max_prefixes: int = 8) -> None:
        assert max_prefixes > 0
        self._cache, self._max_prefixes = cache, max_prefixes
        self._prefixes: list[_Prefix] = []  # the last used one is last
        self.num_reused = self.num_computed = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def take(self, prompt_ids: Sequence[int]) -> Region | None:
        """Return a copy of the slots that a prompt can begin with; the prompt's last token is always computed.

        Whoever takes it passes it on to `Engine.start`, or frees it.
        """
        limit = len(prompt_ids) - 1
        shared = {prefix: num_shared_tokens(prefix.token_ids, prompt_ids[:limit]) for prefix in self._prefixes}
        best = max(shared, key=shared.__getitem__, default=None)
        num_shared = 0 if best is None else shared[best]
        if best is None or num_shared < MIN_SHARED:
            self.num_computed += limit
            return None
        self._prefixes.remove(best)
        self._prefixes.append(best)
        self.num_reused += num_shared
        self.num_computed += limit - num_shared
        return self._cache.fork(best.region, num_shared, len(prompt_ids))

    def keep(self, sequence: DecodingSequence, num_tokens: int, *, is_pinned: bool = False) -> None:
        """Keep a copy of the slots of a sequence's first tokens, unless they are known."""
        num_tokens = min(num_tokens, sequence.region.length)
        token_ids = sequence.token_ids[:num_tokens]
        if num_tokens < MIN_SHARED or any(prefix.token_ids[:num_tokens] == token_ids for prefix in self._prefixes):
            return
        region = self._cache.fork(sequence.region, num_tokens, num_tokens)
        self._prefixes.append(_Prefix(token_ids, region, is_pinned))
        while len(self._prefixes) > self._max_prefixes:
            oldest = next((prefix for prefix in self._prefixes if not prefix.is_pinned), None)
            if oldest is None:
                return
            self._prefixes.remove(oldest)
            self._cache.free(oldest.region)

    def close(self) -> None:
        """Give all slots back."""
        for prefix in self._prefixes:
            self._cache.free(prefix.region)
        self._prefixes.clear()


def num_shared_tokens(known: Sequence[int], wanted: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with together."""
    for place, (left, right) in enumerate(zip(known, wanted, strict=False)):
        if left != right:
            return place
    return min(len(known), len(wanted))
