"""An answer in numbers, and an arm's answers beside those of plain decoding to the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from foretell.plato.answers import AnswerRecord
from foretell.plato.measures import (
    Samples,
    bootstrap_interval,
    is_plan_valid,
    known_mean,
    overlap,
    paragraphs,
    title_coverage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMeasures:
    """One answer. None stands for what it has not: a plan, plain decoding's answer beside it, a score."""

    is_direct: bool
    direct_probability: float | None
    wall_s: float
    """From request to last token, planning included."""
    time_to_first_answer_token_s: float
    answer_tokens: int
    plan_tokens: int
    tokens_per_s: float
    """Answer tokens ÷ wall time."""
    plain_wall_s: float | None
    plain_answer_tokens: int | None
    speedup_vs_plain: float | None
    """Ratio of tokens per second; None where one of the two answers has no token."""
    wall_at_shorter_s: float | None
    """Seconds per answer token × the shorter of both answers' lengths."""
    plain_wall_at_shorter_s: float | None
    """The same of plain decoding."""
    prefill_rows_computed: int
    prefill_rows_reused: int
    is_plan_valid: bool | None
    """None where nothing was planned."""
    plan_repairs: int
    plan_parts: int | None
    plan_depth: int | None
    """Parts of the longest chain."""
    plan_width: int | None
    """Most parts of a level."""
    critical_path: tuple[int, ...]
    """The chain of parts that ended last."""
    title_coverage: float | None
    """Mean over parts."""
    overlap: float | None
    paragraph_overlap: float | None
    """Overlap of paragraphs in place of parts, which answers without a plan have too."""
    mean_logprob: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm over all questions. None stands for what it has not."""

    name: str
    num_questions: int
    direct_share: float
    """Questions answered without parts ÷ all."""
    tokens_per_s: float
    """Answer tokens of all questions ÷ seconds from request to last token, planning included."""
    total_tokens_per_s: float
    """The same with the plans' tokens."""
    num_compared: int
    """Questions to which both this arm and plain decoding wrote something; speed-ups are of these."""
    speedup_vs_plain: float | None
    """Ratio of totals: answer tokens ÷ seconds of all questions, over plain's."""
    speedup_vs_plain_interval: tuple[float, float] | None
    """95 % of what questions drawn anew would give."""
    speedup_vs_plain_median: float | None
    """Median of the questions' own ratios."""
    speedup_where_planned: float | None
    """Ratio of totals over the questions that were answered in parts."""
    wall_s: float
    """Of all questions, as the next two are of all compared questions."""
    wall_at_shorter_s: float | None
    plain_wall_at_shorter_s: float | None
    time_to_first_answer_token_s: float
    """Median."""
    prefill_rows_computed: int
    prefill_rows_reused: int
    plan_valid_share: float | None
    """Plans that could be used as written ÷ plans."""
    plan_depth: float | None
    """Mean over plans, as is the width."""
    plan_width: float | None
    title_coverage: float | None
    """Mean over answers, as are overlaps and score."""
    overlap: float | None
    paragraph_overlap: float | None
    mean_logprob: float | None
    answer_tokens: int
    plan_tokens: int


def measure(record: AnswerRecord, plain: AnswerRecord | None) -> AnswerMeasures:
    """Return an answer's numbers; `plain` is plain decoding's answer to the same question, where it ran."""
    answer, plan = record.answer, record.answer.plan
    num_tokens = answer.num_answer_tokens
    num_plain = None if plain is None else plain.answer.num_answer_tokens
    is_compared = plain is not None and num_tokens > 0 and plain.answer.num_answer_tokens > 0
    shorter = min(num_tokens, num_plain or 0)
    speed, plain_speed = record.tokens_per_s, plain.tokens_per_s if plain is not None else 0.0
    return AnswerMeasures(
        is_direct=answer.is_direct,
        direct_probability=answer.direct_probability,
        wall_s=record.wall_s,
        time_to_first_answer_token_s=answer.first_text_s,
        answer_tokens=num_tokens,
        plan_tokens=answer.num_plan_tokens,
        tokens_per_s=speed,
        plain_wall_s=None if plain is None else plain.wall_s,
        plain_answer_tokens=num_plain,
        speedup_vs_plain=speed / plain_speed if is_compared else None,
        wall_at_shorter_s=shorter / speed if is_compared else None,
        plain_wall_at_shorter_s=shorter / plain_speed if is_compared else None,
        prefill_rows_computed=answer.num_computed,
        prefill_rows_reused=answer.num_reused,
        is_plan_valid=is_plan_valid(plan, answer.repairs) if plan is not None else False if answer.repairs else None,
        plan_repairs=len(answer.repairs),
        plan_parts=None if plan is None else len(plan),
        plan_depth=None if plan is None else plan.depth,
        plan_width=None if plan is None else plan.width,
        critical_path=answer.critical_path,
        title_coverage=known_mean(title_coverage(result.part.title, result.text) for result in answer.parts),
        overlap=overlap([result.text for result in answer.parts]),
        paragraph_overlap=overlap(paragraphs(answer.text)),
        mean_logprob=record.mean_logprob,
    )


def summarize(name: str, answers: Sequence[AnswerMeasures]) -> ArmSummary:
    """Return an arm's row from its answers; there is at least one."""
    wall_s = sum(answer.wall_s for answer in answers)
    num_tokens = sum(answer.answer_tokens for answer in answers)
    num_plan_tokens = sum(answer.plan_tokens for answer in answers)
    compared = [answer for answer in answers if answer.speedup_vs_plain is not None]
    rows = _speed_rows(compared)
    return ArmSummary(
        name=name,
        num_questions=len(answers),
        direct_share=sum(answer.is_direct for answer in answers) / len(answers),
        tokens_per_s=num_tokens / wall_s,
        total_tokens_per_s=(num_tokens + num_plan_tokens) / wall_s,
        num_compared=len(compared),
        speedup_vs_plain=_speedup(compared),
        speedup_vs_plain_interval=bootstrap_interval(rows, _speedups) if rows else None,
        speedup_vs_plain_median=median(answer.speedup_vs_plain or 0.0 for answer in compared) if compared else None,
        speedup_where_planned=_speedup([answer for answer in compared if not answer.is_direct]),
        wall_s=wall_s,
        wall_at_shorter_s=sum(answer.wall_at_shorter_s or 0.0 for answer in compared) if compared else None,
        plain_wall_at_shorter_s=sum(answer.plain_wall_at_shorter_s or 0.0 for answer in compared) if compared else None,
        time_to_first_answer_token_s=median(answer.time_to_first_answer_token_s for answer in answers),
        prefill_rows_computed=sum(answer.prefill_rows_computed for answer in answers),
        prefill_rows_reused=sum(answer.prefill_rows_reused for answer in answers),
        plan_valid_share=known_mean(answer.is_plan_valid for answer in answers),
        plan_depth=known_mean(answer.plan_depth for answer in answers),
        plan_width=known_mean(answer.plan_width for answer in answers),
        title_coverage=known_mean(answer.title_coverage for answer in answers),
        overlap=known_mean(answer.overlap for answer in answers),
        paragraph_overlap=known_mean(answer.paragraph_overlap for answer in answers),
        mean_logprob=known_mean(answer.mean_logprob for answer in answers),
        answer_tokens=num_tokens,
        plan_tokens=num_plan_tokens,
    )


def _speedup(compared: Sequence[AnswerMeasures]) -> float | None:
    rows = _speed_rows(compared)
    return float(_speedups(np.array([rows]))[0]) if rows else None


def _speed_rows(compared: Sequence[AnswerMeasures]) -> list[tuple[float, ...]]:
    """Return tokens and seconds of each answer, then those of plain decoding."""
    return [
        (answer.answer_tokens, answer.wall_s, answer.plain_answer_tokens or 0, answer.plain_wall_s or 0.0)
        for answer in compared
    ]


def _speedups(samples: Samples) -> Samples:
    """Return the ratio of totals of each sample of questions; `samples` [R, Q, 4], returns [R]."""
    tokens, wall_s, plain_tokens, plain_wall_s = samples.sum(axis=1).T  # each [R]
    ratios: Samples = (tokens / wall_s) / (plain_tokens / plain_wall_s)  # [R]
    return ratios
