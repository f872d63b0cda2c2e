"""What can be said of an answer without a judge."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretell.plato.plan import MAX_PARTS, Plan

Samples = NDArray[np.float64]

_FUNCTION_WORDS: Final = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be by can do does for from how if in into is it its of on one or that the their them "
        "these this those to was what when where which who why will with you your",
    )
)
_STEM_LETTERS: Final = 6
_OF_MEANING: Final = re.compile("repeats part|was written as|needs all parts before it")
"""Repairs of a plan that a grammar cannot prevent, as `PlanReader` words them."""


def overlap(parts: Sequence[str]) -> float | None:
    """Return the share of word trigrams that occur in another part too; None where fewer than two parts have one.

    Words are runs of letters, digits and apostrophes, in lower case; a trigram is three words in a row of one part,
    whatever stands between them. Every occurrence counts: (occurrences, over all parts, of trigrams that at least one
    other part holds) ÷ (occurrences of all trigrams). What a part repeats of itself does not count.
    """
    trigrams = [Counter(zip(words, words[1:], words[2:], strict=False)) for words in map(_words, parts)]
    if sum(map(bool, trigrams)) < 2:
        return None
    num_parts = Counter(trigram for counts in trigrams for trigram in counts)
    shared = sum(count for counts in trigrams for trigram, count in counts.items() if num_parts[trigram] > 1)
    return shared / sum(counts.total() for counts in trigrams)


def paragraphs(text: str) -> list[str]:
    """Return what blank lines divide a text into; blank paragraphs are left out."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def title_coverage(title: str, text: str) -> float | None:
    """Return the share of a title's content words that its part holds; None where the title has none.

    Content words are the title's different words without function words (English ones). A word is held where the part
    has one with the same first six letters, an s at the end left out: `bicycles` is held by `bicycle`. For languages
    that put spaces between words.
    """
    wanted = {_stem(word) for word in _words(title) if word not in _FUNCTION_WORDS}
    held = {_stem(word) for word in _words(text)}
    return len(wanted & held) / len(wanted) if wanted else None


def is_plan_valid(plan: Plan, repairs: Sequence[str] = ()) -> bool:
    """Return whether a plan could be used as it was written: 2 to `MAX_PARTS` parts, and nothing wrong with its form.

    Repeated titles, which were merged, and conclusions that needed nothing are no matter of form.
    """
    return 2 <= len(plan) <= MAX_PARTS and all(map(_OF_MEANING.search, repairs))


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def bootstrap_interval(
    rows: Sequence[float] | Sequence[Sequence[float]],
    statistic: Callable[[Samples], Samples] | None = None,
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the bounds between which a statistic lies in this share of resamples of the questions.

    Args:
        rows: one number, or C numbers, per question; at least one question.
        statistic: from R samples [R, Q], or [R, Q, C], to R numbers; None is the mean.
        level: share of resamples between the bounds.
        num_resamples: R; questions are drawn with replacement.
        seed: of the draws.

    Source: Efron and Tibshirani 1993, chapter 13 (percentile intervals).
    """
    values: NDArray[Any] = np.asarray(rows, dtype=np.float64)  # [Q] or [Q, C]
    assert len(values) > 0
    drawn = np.random.default_rng(seed).integers(len(values), size=(num_resamples, len(values)))  # [R, Q]
    samples = values[drawn]  # [R, Q] or [R, Q, C]
    results = samples.mean(axis=1) if statistic is None else statistic(samples)  # [R]
    low, high = np.quantile(results, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['’][^\W_]+)*", text.casefold())


def _stem(word: str) -> str:
    return word.removesuffix("'s").removesuffix("’s").removesuffix("s")[:_STEM_LETTERS]
