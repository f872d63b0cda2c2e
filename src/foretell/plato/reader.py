"""Read a plan while it is written, whoever wrote it and however."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from foretell.plato.grammar import MAX_TITLE, TITLE
from foretell.plato.plan import MAX_PARTS, Part, Plan

_MIN_PARTS: Final = 2
_MAX_LINE: Final = 300
"""Twice the characters that the grammar's longest line has, rounded up: a longer one is no line of a plan."""

_MAX_GARBAGE: Final = 2
_NEAR: Final = 0.8
"""Share of words above which two titles mean the same."""

_STRICT: Final = re.compile(rf"(?P<id>[0-9]+)\. (?P<title>{TITLE}) < (?P<needs>-|[0-9]+(?:,[0-9]+)*)")
_NUMBERED: Final = re.compile(
    r"[\s>#*_`•+(-]*(?:(?:step|part|section|point)\s*)?#?(?P<id>[0-9]{1,3})"
    r"(?P<mark>[*_`]*[\s.):\]–—-]+)(?![0-9])(?P<title>.*)",
    re.IGNORECASE,
)
_BULLET: Final = re.compile(r"\s*[-*•+]\s+(?P<title>.*)")
_NEEDS: Final = re.compile(r"[\s0-9,;&-]*")
_ID: Final = re.compile(r"([0-9]+)(?:\s*[-–]\s*([0-9]+))?")
_WORD: Final = re.compile(r"\w+")
_CONCLUSION: Final = re.compile(
    r"\b(?:conclu\w+|summary|summing up|recap|takeaways?|wrap(?:ping)?[- ]?up|final (?:thoughts?|words?|answer))\b",
    re.IGNORECASE,
)
_EDGES: Final = "*_`:. -"


class PlanReader:
    """Takes a plan's text piece by piece and gives its parts, each as soon as its line is complete.

    Nothing that it reads makes it raise, and how the text is cut into pieces does not matter. What is wrong with the
    plan is put right where it can be, with a line in `repairs`; where it cannot, the question is answered directly.

    What may be wrong with any plan, and is put right in both ways of reading:
        * A title that repeats an earlier one (more than 0.8 of their words in common) is left out, and who needs it
          needs the earlier part. Parts after it move up: ids are places.
        * A part that is called like a conclusion (in English) and needs nothing needs all parts before it.
        * Reading ends after `max_parts` lines.

    What a plan written without a grammar may have besides, and a strict reader takes for garbage:
        * Fences, bullets, bold print, `Step 3:`, an announcement that ends in a colon, details below a part: ignored.
        * Ids with gaps or twice: ids are places, and needs mean the nearest line above with that number.
        * Needs that no line above has: left out. A line that does not say what it needs needs the part before it.
        * Titles of up to twice the length: cut. A longer one is prose.
        * One line of prose in a row: ignored. After an empty line below two parts or more it ends the plan.

    Two lines of prose in a row, one very long line, or fewer than two parts mean that the question is answered
    directly; so does, for a strict reader, one line that does not fit the grammar.

    Args:
        max_parts: most lines of parts.
        is_strict: whether a grammar kept the model to the format.
    """

    def __init__(self, max_parts: int = MAX_PARTS, *, is_strict: bool = False) -> None:
        assert _MIN_PARTS <= max_parts <= MAX_PARTS
        self._max_parts = max_parts
        self._is_strict = is_strict
        self._parts: list[Part] = []
        self._places: dict[int, int] = {}
        """Id of the part that a written number means."""
        self._repairs: list[str] = []
        self._rest = ""
        self._num_lines = 0
        self._num_garbage = 0
        self._has_gap = False
        self._has_end = False
        self._is_direct = False

    @property
    def is_direct(self) -> bool:
        """Whether the question is to be answered without a plan. May come true after parts were given."""
        return self._is_direct

    @property
    def is_ended(self) -> bool:
        """Whether no more parts will come, so that the model need not go on writing."""
        return self._is_direct or self._has_end or self._num_lines == self._max_parts

    @property
    def repairs(self) -> tuple[str, ...]:
        """What was wrong, in one line each."""
        return tuple(self._repairs)

    def push(self, text: str) -> list[Part]:
        """Read more text and return the parts that it completes."""
        num_known = len(self._parts)
        *lines, rest = (self._rest + text).split("\n")
        for line in lines:
            self._read(line)
        if len(rest) > _MAX_LINE or (self._is_strict and rest.startswith(("END", "DIRECT"))):
            self._read(rest)  # what follows on the line changes nothing
        self._rest = "" if self._is_direct or self._has_end else rest
        return self._parts[num_known:]

    def close(self, *, is_cut: bool = False) -> Plan | None:
        """Return the plan, or None if the question is to be answered directly.

        The last line may be without its newline: then its part is in the plan though `push` did not give it.

        Args:
            is_cut: whether the model was stopped while it wrote, so that an unfinished last line is left out.
        """
        if is_cut and not self.is_ended:
            self._note(f"cut off after {len(self._parts)} parts")
        elif self._rest:
            self._read(self._rest)
        self._rest = ""
        self._has_end = True
        self._is_direct = self._is_direct or len(self._parts) < _MIN_PARTS
        return None if self._is_direct else Plan(tuple(self._parts))

    def _read(self, line: str) -> None:
        if self._is_direct or self._has_end:
            return
        is_long = len(line) > _MAX_LINE
        written = None if is_long else (_strict_line if self._is_strict else _tolerant_line)(line)
        if self.is_ended:
            self._has_end = bool(line.strip())
            if written is not None:
                self._note(f"more than {self._max_parts} parts: the others are left out")
        elif written is not None:
            self._take(written)
        elif is_long:
            self._skip(line, weight=_MAX_GARBAGE)
        elif self._is_strict:
            self._has_end = line.startswith("END")
            self._is_direct = not self._has_end and line != ""
        else:
            self._read_between(line)

    def _read_between(self, line: str) -> None:
        """Read a line that is no part, as a tolerant reader."""
        text = line.strip().strip(_EDGES)
        if re.match(r"END\b", text):
            self._has_end = True
        elif re.match(r"DIRECT\b", text) and not self._parts:
            self._is_direct = True
        elif not text or line.lstrip().startswith("```"):
            self._has_gap = bool(self._parts)
        elif not (_BULLET.match(line) if self._parts else line.rstrip().strip("*_`").endswith(":")):
            self._skip(line, weight=1)

    def _skip(self, line: str, weight: int) -> None:
        if self._has_gap and len(self._parts) >= _MIN_PARTS:
            self._has_end = True
            return
        self._note(f'not a part: "{" ".join(line[:40].split())}"')
        self._num_garbage += weight
        self._is_direct = self._num_garbage >= _MAX_GARBAGE

    def _take(self, written: _Line) -> None:
        self._num_lines += 1
        self._num_garbage, self._has_gap = 0, False
        part = next((each for each in self._parts if _are_near(each.title, written.title)), None)
        if part is None:
            part = Part(len(self._parts) + 1, written.title, self._needs(written))
            self._parts.append(part)
            if written.id not in (None, part.id):
                self._note(f"part {part.id} was written as {written.id}")
        else:
            self._note(f'"{written.title}" repeats part {part.id}')
        if written.id is not None:
            self._places[written.id] = part.id

    def _needs(self, written: _Line) -> tuple[int, ...]:
        part_id = len(self._parts) + 1
        unknown = [need for need in written.needs or () if need not in self._places]
        if unknown:
            self._note(f"part {part_id} needs {', '.join(map(str, unknown))}, which is no part above it")
        needs = {self._places[need] for need in written.needs or () if need in self._places}
        if not needs and part_id > 1 and _CONCLUSION.search(written.title):
            self._note(f'part {part_id}, "{written.title}", needs all parts before it')
            return tuple(range(1, part_id))
        if written.needs is None and part_id > 1:
            self._note(f"part {part_id} does not say what it needs: the part before it")
            return (part_id - 1,)
        return tuple(sorted(needs))

    def _note(self, repair: str) -> None:
        self._repairs.append(repair)


@dataclass(frozen=True, slots=True)
class _Line:
    """A part as written."""

    id: int | None
    title: str
    needs: tuple[int, ...] | None
    """None where the line does not say."""


def _strict_line(line: str) -> _Line | None:
    match = _STRICT.fullmatch(line)
    if match is None:
        return None
    needs = match["needs"].replace("-", "")
    return _Line(int(match["id"]), match["title"], tuple(map(int, needs.split(","))) if needs else ())


def _tolerant_line(line: str) -> _Line | None:
    head, arrow, tail = line.rpartition("<")
    numbered = _NUMBERED.match(head if arrow else line)
    bullet = _BULLET.match(head)
    if numbered is not None and (arrow or numbered["mark"].strip("*_` \t\r")):
        number, title = int(numbered["id"]), _title(numbered["title"])
    elif bullet is not None and _NEEDS.fullmatch(tail):
        number, title = None, _title(bullet["title"])
    else:
        return None
    return _Line(number, title, _written_needs(tail) if arrow else None) if title else None


def _title(text: str) -> str:
    """Return a title as the grammar has them, at most `MAX_TITLE` characters with blanks; "" if the text is none."""
    title = " ".join(re.sub(r"[|<]", " ", text).split()).strip(_EDGES)
    if len(title) > 2 * MAX_TITLE or not any(map(str.isalnum, title)):
        return ""
    if len(title) > MAX_TITLE:
        title = title[: MAX_TITLE + 1].rpartition(" ")[0] or title[:MAX_TITLE]
    return title.strip(_EDGES)


def _written_needs(text: str) -> tuple[int, ...] | None:
    ids: list[int] = []
    for first, last in _ID.findall(text):
        ids += range(int(first), min(int(last), int(first) + MAX_PARTS) + 1) if last else [int(first)]
    if not ids and re.search(r"\w", re.sub(r"(?i)\bnone\b", "", text)):
        return None
    return tuple(ids)


def _are_near(title: str, other: str) -> bool:
    """Return whether two titles have more than `_NEAR` of their words in common (Jaccard index)."""
    words, others = ({word.casefold() for word in _WORD.findall(each)} for each in (title, other))
    if not words or not others:
        return title == other
    return len(words & others) > _NEAR * len(words | others)
