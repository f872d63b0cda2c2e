"""A conversation that keeps its keys and values between turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from foretell.engine.kept import Kept
from foretell.params import SamplingParams
from foretell.result import Chunk
from foretell.text.tokenizer import Message, Tokenizer

Stream = Callable[[list[int], SamplingParams, str | None, Kept], Iterator[Chunk]]
"""Continues a prompt, given how to choose tokens, who proposes, and the slots that are kept."""


class Conversation:
    """Turns that share a prefix compute it once: keys and values stay in the cache between them.

    Args:
        tokenizer: of the model.
        kept: nothing yet.
        stream: answers a turn.
    """

    def __init__(self, tokenizer: Tokenizer, kept: Kept, stream: Stream) -> None:
        self._tokenizer, self._kept, self._stream = tokenizer, kept, stream

    def stream(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, *, drafter: str | None = None
    ) -> Iterator[Chunk]:
        """Answer the conversation so far; raises as `LLM.stream_chat` does. One answer at a time."""
        return self._stream(self._tokenizer.encode_chat(messages), sampling or SamplingParams(), drafter, self._kept)

    def close(self) -> None:
        """Give back the conversation's slots."""
        self._kept.close()
