"""Pairwise judging of two arms' answers, each pair in both orders."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from foretell.errors import InputError
from foretell.plato.answers import AnswerRecord
from foretell.plato.chat_client import PromptRefusedError
from foretell.plato.measures import bootstrap_interval
from foretell.provenance import provenance

Verdict = Literal["A", "B", "tie"]
Outcome = Literal["win", "loss", "tie", "unparsable"]

SYSTEM: Final = (
    "You compare two answers to the same question. Judge whether they are correct, answer what was asked, cover it "
    "well, hang together and avoid repetition. Neither length nor the order in which you see them matters. Give your "
    "reasons in at most three sentences, then a last line that is one of: VERDICT: A, VERDICT: B, VERDICT: TIE"
)
SIMILAR_LENGTH: Final = 0.2
"""Answers are of similar length where the shorter lacks at most this share of the longer."""

_PATTERNS: Final = (
    r"verdict\W*(?:is\W+)?(?:(?:answer|assistant)\W+)?"
    r"((?:an? )?(?:tie|draw|equal|both|neither)|(?-i:[ABC])\b(?! (?:and|or) )|[abc]\W*$)",
    r"\[\[([abc]|tie)\]\]",
    r"\A\W*(?:answer\W+)?([abc]|tie)\W*\Z",
)
"""Ways to give a verdict, the one that was asked for first; a group holds its word."""
_VERDICTS: Final[dict[str, Verdict]] = {"a": "A", "b": "B"}
_POINTS: Final = {"win": 1.0, "tie": 0.0, "loss": -1.0}
_RIDGE: Final = 0.01
_NEWTON_STEPS: Final = 50
_MIN_PAIRS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PairJudgement:
    """One question."""

    question_id: str
    category: str
    outcome: Outcome
    """Of the arm: both orders must agree on its win or loss; where they do not, it is a tie."""
    verdicts: tuple[Verdict | None, Verdict | None]
    """As given with the arm as A, then with the arm as B; None where none could be read. Ties for equal texts."""
    refusal: str | None
    """What the judge's server says of a pair that it refuses, one too long for example."""
    is_identical: bool
    length: int
    """Characters of the arm's answer."""
    other_length: int

    @property
    def is_similar_length(self) -> bool:
        """Whether the lengths differ by at most `SIMILAR_LENGTH` of the longer."""
        return abs(self.length - self.other_length) <= SIMILAR_LENGTH * max(self.length, self.other_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetWins:
    """Wins and losses of some pairs; those without a readable verdict are counted apart and in no rate."""

    num_judged: int
    wins: int
    losses: int
    ties: int
    net_win_rate: float | None
    """(wins − losses) ÷ judged; None where none was."""
    interval: tuple[float, float] | None
    """95 % of what questions drawn anew would give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All pairs of two arms."""

    arm: str
    against: str
    pairs: Sequence[PairJudgement]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        judged = [pair for pair in self.pairs if pair.outcome != "unparsable"]
        similar = [pair for pair in judged if pair.is_similar_length]
        return {
            "arm": self.arm,
            "against": self.against,
            "num_questions": len(self.pairs),
            "num_unparsable": len(self.pairs) - len(judged),
            "num_refused": sum(pair.refusal is not None for pair in self.pairs),
            "num_identical": sum(pair.is_identical for pair in self.pairs),
            "num_order_conflicts": sum(pair.verdicts in (("A", "A"), ("B", "B")) for pair in self.pairs),
            **asdict(net_wins(judged)),
            "similar_length": asdict(net_wins(similar)),
            "net_win_rate_at_equal_length": net_win_rate_at_equal_length(judged),
            "mean_length": float(np.mean([pair.length for pair in self.pairs])),
            "mean_other_length": float(np.mean([pair.other_length for pair in self.pairs])),
            "pairs": [asdict(pair) for pair in self.pairs],
            "provenance": provenance(),
        }


def judge(
    records: Sequence[AnswerRecord],
    ask: Callable[[str, str], str],
    *,
    arm: str,
    against: str,
    notify: Callable[[int, int], None] | None = None,
) -> Judgement:
    """Have every question judged that both arms answered, in both orders; equal texts are a tie without being judged.

    A pair that the judge refuses has no verdict; where it refuses all, something else is wrong.

    Args:
        records: answers of these arms, and maybe of others.
        ask: the judge: from a system and a user message to a reply.
        arm: whose wins are counted.
        against: the other arm.
        notify: called after each question with how many are judged, and how many there are.

    Raises:
        InputError: there is no question that both answered.
        PromptRefusedError: `ask` raised it for every pair; and what else `ask` raises.
    """
    theirs = {record.question.question_id: record for record in records if record.arm == against}
    both = [record for record in records if record.arm == arm and record.question.question_id in theirs]
    if not both:
        names = ", ".join(sorted({record.arm for record in records}))
        raise InputError(f"no question was answered by both {arm!r} and {against!r}: there are answers by {names}")
    pairs: list[PairJudgement] = []
    for record in both:
        pairs.append(_judge_pair(record, theirs[record.question.question_id], ask))
        if notify is not None:
            notify(len(pairs), len(both))
    refusals = [pair.refusal for pair in pairs if not pair.is_identical]  # of those that were asked about
    if refusals and None not in refusals:
        raise PromptRefusedError(f"every pair: {refusals[0]}")
    return Judgement(arm=arm, against=against, pairs=pairs)


def read_verdict(reply: str) -> Verdict | None:
    """Return the last verdict of a reply: `VERDICT: A`, else `[[A]]`, else a bare letter; C is a tie; None without one.

    What stands in a think block does not count.
    """
    reply = re.sub(r"<think>.*?(</think>|\Z)", "", reply, flags=re.DOTALL)
    for pattern in _PATTERNS:
        words = re.findall(pattern, reply, re.IGNORECASE | re.MULTILINE)
        if words:
            return _VERDICTS.get(re.findall("[a-z]+", words[-1].lower())[-1], "tie")
    return None


def net_wins(judged: Sequence[PairJudgement]) -> NetWins:
    """Return wins and losses of pairs whose verdicts could be read."""
    points = [_POINTS[pair.outcome] for pair in judged]
    return NetWins(
        num_judged=len(points),
        wins=points.count(1.0),
        losses=points.count(-1.0),
        ties=points.count(0.0),
        net_win_rate=sum(points) / len(points) if points else None,
        interval=bootstrap_interval(points) if points else None,
    )


def net_win_rate_at_equal_length(judged: Sequence[PairJudgement]) -> float | None:
    """Return the net win rate that a logistic regression on lengths predicts for answers of equal length.

    P(win) = σ(b₀ + b₁ x), x = (length − other) ÷ the longer; a tie is half a win. None for fewer than ten pairs.

    Source: after arXiv:2404.04475 (length-controlled AlpacaEval), without its terms for models and questions.
    """
    if len(judged) < _MIN_PAIRS:
        return None
    longer = [max(pair.length, pair.other_length, 1) for pair in judged]
    differences = [(pair.length - pair.other_length) / size for pair, size in zip(judged, longer, strict=True)]
    inputs = np.stack([np.ones(len(judged)), differences], axis=1)  # [Q, 2]
    wins = np.array([(_POINTS[pair.outcome] + 1) / 2 for pair in judged])  # [Q]
    weights = np.zeros(2)  # [2]
    for _ in range(_NEWTON_STEPS):
        predicted = 1 / (1 + np.exp(-inputs @ weights))  # [Q]
        gradient = inputs.T @ (wins - predicted) - _RIDGE * weights  # [2]
        curvature = (inputs.T * (predicted * (1 - predicted))) @ inputs + _RIDGE * np.eye(2)  # [2, 2]
        weights = weights + np.linalg.solve(curvature, gradient)  # [2]
    return float(2 / (1 + np.exp(-weights[0])) - 1)


def _judge_pair(ours: AnswerRecord, theirs: AnswerRecord, ask: Callable[[str, str], str]) -> PairJudgement:
    question, text, other_text = ours.question, ours.answer.text, theirs.answer.text
    is_identical = text == other_text
    verdicts: tuple[Verdict | None, Verdict | None] = ("tie", "tie")
    refusal = None
    if not is_identical:
        try:
            verdicts = (
                read_verdict(ask(SYSTEM, _pair_text(question.text, text, other_text))),
                read_verdict(ask(SYSTEM, _pair_text(question.text, other_text, text))),
            )
        except PromptRefusedError as error:
            verdicts, refusal = (None, None), str(error)
    return PairJudgement(
        question_id=question.question_id,
        category=question.category,
        outcome=_outcome(verdicts),
        verdicts=verdicts,
        refusal=refusal,
        is_identical=is_identical,
        length=len(text),
        other_length=len(other_text),
    )


def _outcome(verdicts: tuple[Verdict | None, Verdict | None]) -> Outcome:
    if None in verdicts:
        return "unparsable"
    if verdicts == ("A", "B"):
        return "win"
    return "loss" if verdicts == ("B", "A") else "tie"


def _pair_text(question: str, first: str, second: str) -> str:
    return (
        f"QUESTION\n{question}\n\nANSWER A\n{first}\nEND OF ANSWER A\n\nANSWER B\n{second}\nEND OF ANSWER B\n\n"
        "Which answer is better?"
    )
