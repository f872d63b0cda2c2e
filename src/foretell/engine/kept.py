"""Keys and values that outlive a request, for the next one that shares a prefix with it."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.cache.kv_cache import Region
from foretell.engine.engine import Engine
from foretell.engine.prefixes import num_shared_tokens
from foretell.engine.sequence import DecodingSequence


class Kept:
    """Keys and values of a conversation so far."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._region: Region | None = None
        self._token_ids: list[int] = []

    def take(self, prompt_ids: Sequence[int]) -> Region | None:
        """Return the kept region cut to what it shares with a prompt; the prompt's last token is always computed."""
        region, self._region = self._region, None
        if region is None:
            return None
        num_shared = num_shared_tokens(self._token_ids[: region.length], prompt_ids[:-1])
        self._engine.runner.cache.truncate(region, num_shared)
        return region

    def keep(self, sequence: DecodingSequence) -> None:
        """Keep a sequence's slots for the next turn, in place of any others."""
        self.close()
        self._region, self._token_ids = sequence.region, sequence.token_ids

    def close(self) -> None:
        """Give the slots back."""
        if self._region is not None:
            self._engine.runner.cache.free(self._region)
            self._region = None
