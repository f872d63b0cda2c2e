"""Questions, what arms answered to them, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.errors import ConfigError, InputError
from foretell.plato.events import Answer, PartResult
from foretell.plato.plan import Part, Plan

Arm = Callable[[str], Answer]
"""Answers a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question of a suite."""

    question_id: str
    category: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRecord:
    """One arm's answer to one question."""

    question: Question
    arm: str
    answer: Answer
    wall_s: float
    """From the request to the return of the whole answer, planning included."""
    mean_logprob: float | None
    """What the target gives to a token of the answer, on average; None where it was not asked."""

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens ÷ wall time."""
        return self.answer.num_answer_tokens / self.wall_s

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> AnswerRecord:
        """Build from what `asdict` made, after a round trip through JSON.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is not a record.
        """
        answer = dict(record["answer"])
        answer["plan"] = answer["plan"] and Plan(tuple(map(_part, answer["plan"]["parts"])))
        answer["parts"] = [PartResult(**{**part, "part": _part(part["part"])}) for part in answer["parts"]]
        answer["repairs"] = tuple(answer["repairs"])
        return cls(
            question=Question(**record["question"]),
            arm=record["arm"],
            answer=Answer(**answer),
            wall_s=float(record["wall_s"]),
            mean_logprob=record["mean_logprob"],
        )


class AnswerFile:
    """A JSON Lines file of answers under the same settings, to which finished ones are added.

    Args:
        path: the file; created with its first answer.
        settings: what answers depend on beside question and arm, as JSON types.

    Raises:
        ConfigError: the file cannot be read, or holds answers under other settings.
        InputError: it holds something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._records: dict[tuple[str, str], AnswerRecord] = {}
        for number, record, kept in _read(path) if path.exists() else ():
            self._check(number, kept)
            self._records[record.question.question_id, record.arm] = record

    def find(self, question: Question, arm: str) -> AnswerRecord | None:
        """Return the finished answer, or None.

        Raises:
            ConfigError: the file has another question under this id.
        """
        record = self._records.get((question.question_id, arm))
        if record is not None and record.question.text != question.text:
            raise ConfigError(
                f"{self._path} holds answers to another question {question.question_id!r}: name another file"
            )
        return record

    def add(self, record: AnswerRecord) -> None:
        """Append an answer as one line.

        Raises:
            ConfigError: the file cannot be written.
        """
        # The leading newline ends a line that an interrupted run left torn.
        line = "\n" + json.dumps({"settings": self._settings, **asdict(record)}, ensure_ascii=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(f"cannot write answers to {self._path}: {error.strerror}; name another file") from error
        self._records[record.question.question_id, record.arm] = record

    def _check(self, number: int, kept: Mapping[str, Any]) -> None:
        for name in [*self._settings, *kept]:
            if kept.get(name) != self._settings.get(name):
                raise ConfigError(
                    f"{self._path}:{number} was answered with `{name}` {kept.get(name)!r}, not "
                    f"{self._settings.get(name)!r}: name another file, or use the same settings"
                )


def read_answers(path: Path) -> list[AnswerRecord]:
    """Return the answers of a file; the last one counts where an arm answered a question twice.

    Raises:
        ConfigError: the file cannot be read.
        InputError: it holds no answer.
    """
    records = {(record.question.question_id, record.arm): record for _, record, _ in _read(path)}
    if not records:
        raise InputError(f"{path} holds no answer: give a file that `foretell eval plato --out` wrote")
    return list(records.values())


def _read(path: Path) -> Iterator[tuple[int, AnswerRecord, Mapping[str, Any]]]:
    """Yield line number, answer and settings; lines that an interrupted run left torn are passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read answers from {path}: {error.strerror}; name another file") from error
    has_answers = False
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
            record, settings = AnswerRecord.from_json(document), dict(document["settings"])
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            continue
        has_answers = True
        yield number, record, settings
    if any(map(str.strip, lines)) and not has_answers:
        raise InputError(f"{path} holds something else than answers of `foretell eval plato`: name another file")


def _part(fields: Mapping[str, Any]) -> Part:
    return Part(fields["id"], fields["title"], tuple(fields["needs"]))
