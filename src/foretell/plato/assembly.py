"""Parts that are written at the same time become one text that is read from the top."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.plato.plan import Part


class Assembly:
    """Puts parts in the order of their ids, a blank line between them.

    The first part that has not ended streams as it is written, those after it wait. Blank space at both ends of a part
    is dropped, so it is held back until more text follows; a part that is nothing else leaves no trace.

    Args:
        has_headings: whether each part comes below its title in bold print.
    """

    def __init__(self, *, has_headings: bool = False) -> None:
        self._has_headings = has_headings
        self._pieces: dict[int, _Piece] = {}
        self._frontier = 1
        self._text = ""

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return self._text

    def add(self, part: Part) -> None:
        """Take a part of the plan; ids ascend without gaps."""
        assert part.id == len(self._pieces) + 1
        self._pieces[part.id] = _Piece(part.title)

    def push(self, part_id: int, text: str) -> str:
        """Take what a part goes on with, and return what the answer goes on with."""
        piece = self._pieces[part_id]
        assert not piece.is_ended
        piece.waiting += text
        return self._advance() if part_id == self._frontier else ""

    def end(self, part_id: int) -> str:
        """Learn that a part is complete, or will never be written, and return what the answer goes on with."""
        self._pieces[part_id].is_ended = True
        return self._advance()

    def _advance(self) -> str:
        start = len(self._text)
        while piece := self._pieces.get(self._frontier):
            is_begun = piece.is_begun
            text = piece.take()
            if text and not is_begun:
                self._text += ("\n\n" if self._text else "") + (f"**{piece.title}**\n\n" if self._has_headings else "")
            self._text += text
            if not piece.is_ended:
                break
            self._frontier += 1
        return self._text[start:]


@dataclass(slots=True)
class _Piece:
    """A part's text as far as it has not been returned."""

    title: str
    waiting: str = ""
    is_begun: bool = False
    is_ended: bool = False

    def take(self) -> str:
        text = self.waiting if self.is_begun else self.waiting.lstrip()
        ready = text.rstrip()
        self.waiting = text[len(ready) :]
        self.is_begun = self.is_begun or bool(ready)
        return ready
