"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and a window where the configuration uses one."""

from __future__ import annotations

from foretell.models.llama import Llama


class Qwen2(Llama):
    """A Qwen 2 decoder; `layer_types`, or `use_sliding_window` and `max_window_layers`, say which layers slide."""
