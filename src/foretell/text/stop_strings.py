"""Stop strings: found wherever they lie in the text, whatever pieces it arrives in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a piece of text brought."""

    text: str
    """Text that is certainly not part of a stop string, to be shown now."""
    is_stopped: bool = False
    """A stop string is complete; neither it nor what follows it is in any `text`."""


class StopStrings:
    """Holds back text that may become a stop string, and cuts at the one that is complete first.

    The cut is where reading the text one character at a time would find it: at the stop string that ends first, the
    longest of those that end together. So it does not depend on how tokens divide the text.

    Args:
        stops: the strings; none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "SamplingParams refuses empty stop strings"
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> Scanned:
        """Take in a piece of text, of any length."""
        assert self.matched is None
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return Scanned(text[:start], is_stopped=True)
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return Scanned(text[:cut])

    def flush(self) -> str:
        """Return the text that was held back, when no more follows."""
        rest, self._held = self._held, ""
        return rest

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
