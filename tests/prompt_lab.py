"""A drafter of prompt tokens that keeps what it was told."""

from __future__ import annotations

from typing import Any

from foretell.drafters.prompts import PromptsDrafter


class Watcher(PromptsDrafter):
    """Keeps what it was told, and how long the text was then."""

    def begin(self, prompt_ids: Any, hidden: Any = None) -> None:
        super().begin(prompt_ids, hidden)
        self.told: list[tuple[int, Any]] = []

    def observe(self, outcome: Any) -> None:
        super().observe(outcome)
        self.told.append((self._num_tokens, outcome.guesses))
