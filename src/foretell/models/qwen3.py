"""Qwen 3: Llama with normalised queries and keys, and heads whose width the configuration names."""

from __future__ import annotations

from foretell.models.llama import Llama


class Qwen3(Llama):
    """A Qwen 3 decoder."""
