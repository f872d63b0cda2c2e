"""Mistral: Llama with a window over the last positions, where the configuration sets one."""

from __future__ import annotations

from foretell.models.llama import Llama


class Mistral(Llama):
    """A Mistral decoder: all of its layers slide, or none does (`sliding_window` null)."""
