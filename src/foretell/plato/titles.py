"""Titles of a plan that differ from their first token on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from foretell.text.tokenizer import Tokenizer

_TITLE_COMES: Final = re.compile(r"(^|\n)[0-9]+\. ?$")


class DistinctTitles:
    """As a logits processor of a plan's sequence, lets no title begin with the token that an earlier one begins with.

    Small models repeat a title to the end of the plan: repeated parts are merged, and nothing is left to write at once.

    Args:
        tokenizer: the model's.
        num_prompt_tokens: of the planning prompt.
    """

    def __init__(self, tokenizer: Tokenizer, num_prompt_tokens: int) -> None:
        self._tokenizer, self._num_prompt_tokens = tokenizer, num_prompt_tokens

    def __call__(self, token_ids: Any, scores: Any) -> Any:
        """Forbid the beginnings of earlier titles where a title begins; `token_ids` [1, T], `scores` [1, V]."""
        written = token_ids[0, self._num_prompt_tokens :].tolist()
        if not self._does_title_come(written):
            return scores
        begun = [written[at] for at in range(1, len(written)) if self._does_title_come(written[:at])]
        begun = [token_id for token_id in begun if self._tokenizer.token_text(token_id).strip()]  # but for blanks
        scores = scores.clone()
        scores[0, begun] = -float("inf")
        return scores

    def _does_title_come(self, written: Sequence[int]) -> bool:
        if not written or self._tokenizer.token_text(written[-1]).strip() not in ("", "."):
            return False
        return _TITLE_COMES.search(self._tokenizer.decode(written)) is not None
