"""Turn emitted tokens into text, and hold back what may become a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.engine.sequence import Emission
from foretell.result import Chunk
from foretell.text.detokenizer import Detokenizer
from foretell.text.stop_strings import StopStrings
from foretell.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Pending:
    """A token whose text was not released yet."""

    token_id: int
    start: int
    """Characters before its text."""
    end: int


class OutputText:
    """The text of one sequence, token by token.

    The engine calls `push` for every token before it commits, so a stop string ends the sequence inside an accepted
    block; `release` pairs the tokens with what the engine knows of them. A token is released once its text is certain
    not to belong to a stop string. Tokens that begin inside a stop string or after it are dropped, ids and all.

    Args:
        tokenizer: decodes ids.
        stop: strings that end the output.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._pending: deque[_Pending] = deque()
        self._emissions: deque[Emission] = deque()
        self._decoded = ""
        self._num_certain = 0
        self.is_stopped = False

    def push(self, token_id: int) -> bool:
        """Take in a token; returns whether it completed a stop string."""
        assert not self.is_stopped
        text = self._detokenizer.push(token_id)
        self._pending.append(_Pending(token_id, len(self._decoded), len(self._decoded) + len(text)))
        self._decoded += text
        found = self._stops.push(text)
        self._num_certain += len(found.text)
        self.is_stopped = found.is_stopped
        return self.is_stopped

    def release(self, emissions: Sequence[Emission], *, is_last: bool) -> list[Chunk]:
        """Return chunks for the tokens whose text is certain; all that remain when the sequence has ended."""
        self._emissions.extend(emissions)
        if is_last:
            self._close()
        chunks = []
        for _ in range(len(self._pending) if is_last else self._num_ready()):
            token, emission = self._pending.popleft(), self._emissions.popleft()
            if self.is_stopped and token.start >= self._num_certain:
                break
            text = self._decoded[token.start : min(token.end, self._num_certain)]
            chunks.append(Chunk(token.token_id, text, emission.source, emission.logprobs))
        return chunks

    def _num_ready(self) -> int:
        """Return how many tokens can go; one without text may begin a character, and waits for one that has some."""
        num_ready = 0
        for number, token in enumerate(self._pending, start=1):
            if token.end > self._num_certain:
                break
            if token.end > token.start:
                num_ready = number
        return num_ready

    def _close(self) -> None:
        """Give the last token what the detokenizer and the stop strings still hold back."""
        if self.is_stopped:
            return
        rest = self._detokenizer.flush()
        if self._pending:
            self._pending[-1].end += len(rest)
        self._decoded += rest
        self._num_certain = len(self._decoded)
