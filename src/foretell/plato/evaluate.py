"""Put the same questions to several arms, and compare them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretell.errors import InputError
from foretell.plato.answers import AnswerFile, AnswerRecord, Arm, Question
from foretell.plato.summary import AnswerMeasures, measure, summarize
from foretell.provenance import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All answers, by question and arm."""

    questions: Sequence[Question]
    arms: Sequence[str]
    records: Mapping[tuple[str, str], AnswerRecord]
    """By id of the question and name of the arm."""
    plain: str
    """The arm that speeds are compared with; where it did not run, there are no speed-ups."""

    def measures(self, arm: str) -> list[AnswerMeasures]:
        """Return an arm's answers in numbers, in the order of the questions."""
        ids = [question.question_id for question in self.questions]
        return [measure(self.records[each, arm], self.records.get((each, self.plain))) for each in ids]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document; texts are in the file of answers alone."""
        by_arm = {arm: self.measures(arm) for arm in self.arms}
        return {
            "arms": [asdict(summarize(arm, answers)) for arm, answers in by_arm.items()],
            "questions": [
                {
                    "question_id": question.question_id,
                    "category": question.category,
                    "arms": {arm: asdict(answers[number]) for arm, answers in by_arm.items()},
                }
                for number, question in enumerate(self.questions)
            ],
            "provenance": provenance(),
        }


def evaluate(
    questions: Sequence[Question],
    arms: Mapping[str, Arm],
    *,
    plain: str = "plain",
    score: Callable[[str, str], float] | None = None,
    file: AnswerFile | None = None,
    warm_up: Callable[[], None] | None = None,
    notify: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Evaluation:
    """Let every arm answer every question, arms in turn within a question, so that a slow minute hits all alike.

    The arm that begins moves on by one from question to question. Answers that `file` has are not asked for again:
    their times are of an earlier run, so a question that was interrupted compares two runs.

    Args:
        questions: what to ask.
        arms: who answers, by name.
        plain: the arm that speeds are compared with.
        score: from question and answer text to the target's mean log-probability of a token; called after each answer,
            outside its time.
        file: where answers are kept.
        warm_up: called once before the first answer, if there is one to ask for.
        notify: called after each answer with how many are there, and how many there will be.
        clock: seconds, monotonic.

    Raises:
        InputError: there is no question, or an id occurs twice.
        ConfigError: the file cannot be written, or has other questions under these ids.
    """
    _check_ids(questions)
    records = _finished(questions, arms, file)
    num_all = len(questions) * len(arms)
    if warm_up is not None and len(records) < num_all:
        warm_up()
    for number, question in enumerate(questions):
        for arm in _rotated(list(arms), number):
            if (question.question_id, arm) in records:
                continue
            record = _ask(question, arm, arms[arm], score, clock)
            if file is not None:
                file.add(record)
            records[question.question_id, arm] = record
            if notify is not None:
                notify(len(records), num_all)
    return Evaluation(questions=questions, arms=list(arms), records=records, plain=plain)


def _check_ids(questions: Sequence[Question]) -> None:
    if not questions:
        raise InputError("there is no question to ask")
    seen: set[str] = set()
    for question in questions:
        if question.question_id in seen:
            raise InputError(f"question id {question.question_id!r} occurs twice: give every question its own")
        seen.add(question.question_id)


def _finished(
    questions: Sequence[Question], arms: Mapping[str, Arm], file: AnswerFile | None
) -> dict[tuple[str, str], AnswerRecord]:
    if file is None:
        return {}
    found = {(question.question_id, arm): file.find(question, arm) for question in questions for arm in arms}
    return {key: record for key, record in found.items() if record is not None}


def _rotated(names: list[str], number: int) -> list[str]:
    place = number % len(names)
    return names[place:] + names[:place]


def _ask(
    question: Question,
    name: str,
    arm: Arm,
    score: Callable[[str, str], float] | None,
    clock: Callable[[], float],
) -> AnswerRecord:
    started_s = clock()
    answer = arm(question.text)
    wall_s = clock() - started_s
    has_score = score is not None and answer.text.strip() != ""
    mean_logprob = score(question.text, answer.text) if score is not None and has_score else None
    return AnswerRecord(question=question, arm=name, answer=answer, wall_s=wall_s, mean_logprob=mean_logprob)
