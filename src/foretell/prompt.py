"""What may be continued: a text or its token ids, one or several."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

from foretell.errors import InputError
from foretell.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts; a text, or a sequence of ids, is one."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if all(isinstance(item, SupportsIndex) for item in items) else items


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return a prompt's token ids.

    Raises:
        InputError: it is neither text nor token ids, or empty text.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InputError("the prompt is empty: give at least one character")
        return tokenizer.encode(prompt)
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError:
        raise InputError(f"a prompt must be text or token ids, got {reprlib.repr(prompt)}") from None
