"""Make the table of trigrams that drafts for a draft model: sample, estimate, prune, measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretell.drafters.katz import (
    MAX_ORDER,
    Context,
    KatzLevel,
    KatzTable,
    encode,
    encode_backoff,
    level_dtypes,
    read_katz,
    write_katz,
)
from foretell.models.draft import DraftModel
from foretell.train.examples import Examples
from foretell.train.katz_model import KatzModel, Level, fit_katz
from foretell.train.sample import Sampler, SampleSettings, sample_text
from foretell.train.text import CHAT, RAW, Documents

NUM_TOKENS: Final = 10_000_000
"""To sample: half an hour on one core."""

MAX_BYTES: Final = 8_000_000
"""Of the file."""

MAX_FOLLOWERS: Final = 8
"""Continuations kept of one context."""

_TESTED_DOCUMENTS: Final = 48
_TIMED_LOOKUPS: Final = 2000

_HEADER_BYTES: Final = 4096
"""Room for names, shapes and facts in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramReport:
    """What training a table gave."""

    num_sampled: int
    """Tokens that the draft sampled for it."""
    num_trigram_contexts: int
    num_bigram_contexts: int
    file_bytes: int
    num_tested: int
    """Tokens that the draft chose greedily after texts that were held out."""
    agreement: dict[int, float]
    """How often they were among the table's best, by how many of those: 1 and 4."""
    lookup_us: float
    """A lookup of a context for the first time."""
    cached_lookup_us: float
    sampling_s: float
    estimating_s: float


def train_ngram(
    draft: DraftModel,
    examples: Examples,
    out: Path,
    folder: Path,
    facts: Mapping[str, str],
    *,
    num_tokens: int = NUM_TOKENS,
    max_bytes: int = MAX_BYTES,
    settings: SampleSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> NgramReport:
    """Make a draft's table: let it sample, estimate, prune, write, and measure what came out.

    Args:
        draft: the model that the table will draft for.
        examples: texts by its target.
        out: the table's file.
        folder: where samples are kept, so that an interrupted run goes on.
        facts: for the file, `fingerprint` of the target's tokenizer and embeddings among them.
        num_tokens: to sample.
        max_bytes: of the file.
        settings: of the sampling.
        progress: called with the tokens sampled so far and `num_tokens`.
        clock: seconds.

    Raises:
        InputError: no text is held out or long enough, or a shard of samples is damaged.
        ConfigError: the table cannot be written.
    """
    settings = settings or SampleSettings()
    numbers = np.concatenate([examples.held_out(kind) for kind in (CHAT, RAW)])
    greedy = replace(settings, temperature=0.0)
    tested = Sampler(draft, examples, greedy).continue_all(numbers[:: max(1, len(numbers) // _TESTED_DOCUMENTS)], 0)
    started_s = clock()
    sampled = sample_text(draft, examples, folder, num_tokens, settings=settings, progress=progress)
    sampled_s = clock()
    table = estimate_katz(
        sampled.documents, vocab_size=draft.config.vocab_size, max_bytes=max_bytes, counted=sampled.choices
    )
    write_katz(out, table, {**facts, "num_tokens": str(len(sampled)), "sampling": str(settings)})
    estimated_s = clock()
    table = read_katz(out, facts["fingerprint"], draft.config.vocab_size)
    test = _test(table, tested.documents, clock)
    return NgramReport(
        num_sampled=len(sampled),
        num_trigram_contexts=len(table.levels[2].contexts),
        num_bigram_contexts=len(table.levels[1].contexts),
        file_bytes=out.stat().st_size,
        num_tested=len(tested),
        agreement=test.agreement,
        lookup_us=test.lookup_us,
        cached_lookup_us=test.cached_lookup_us,
        sampling_s=sampled_s - started_s,
        estimating_s=estimated_s - sampled_s,
    )


def estimate_katz(
    documents: Documents,
    *,
    vocab_size: int,
    max_bytes: int = MAX_BYTES,
    max_followers: int = MAX_FOLLOWERS,
    counted: NDArray[np.int32] | None = None,
) -> KatzTable:
    """Return the table of a Katz-backoff trigram of these texts, at most `max_bytes` large; see `fit_katz`.

    Raises:
        InputError: there is nothing to count.
    """
    model = fit_katz(documents, vocab_size, counted=counted)
    return pack_katz(prune_katz(model, max_bytes=max_bytes, max_followers=max_followers))


def prune_katz(model: KatzModel, *, max_bytes: int, max_followers: int = MAX_FOLLOWERS) -> KatzModel:
    """Return the model with the continuations that tell most, in a table of at most `max_bytes`.

    A continuation tells how much more probable it is than after the shorter context, times how often its context was
    seen. Those are kept that tell at least so much a byte, and contexts whose continuations together pay for their own
    bytes as well; what is dropped falls to the shorter context, so that probabilities still sum to 1. Continuations
    that are less probable than after the shorter context go in any case: few counts speak against many there.

    Cost: 0.5 s for a million continuations.
    """
    gains = [_gains(model, level, max_followers) for level in model.levels]
    least = 0.0
    if _num_bytes(model, gains, least) > max_bytes:
        low, least = 1e-9, max(float(gain.max(initial=1.0)) for gain in gains[1:])
        while least / low > 1.001:
            middle = (low * least) ** 0.5
            low, least = (low, middle) if _num_bytes(model, gains, middle) <= max_bytes else (middle, least)
    pruned = KatzModel((), model.vocab_size)
    for level, gain in zip(model.levels, gains, strict=True):
        is_kept = _kept(model, level, gain, least)  # [F]
        totals = level.totals[np.bincount(level.places[is_kept], minlength=len(level.totals)) > 0]
        pruned = pruned.extended(level.keys[is_kept], level.probabilities[is_kept], totals)
    return pruned


def pack_katz(model: KatzModel) -> KatzTable:
    """Return a model as a table: continuations ranked, probabilities rounded."""
    levels = []
    for level in model.levels:
        order = np.lexsort((-level.probabilities, level.places))  # [F]
        arrays: dict[str, NDArray[Any]] = {
            "contexts": level.contexts,
            "starts": level.starts,
            "ids": level.keys[order] % model.vocab_size,
            "codes": encode(level.probabilities[order]),
            "backoff_codes": encode_backoff(level.backoffs),
        }
        dtypes = level_dtypes(level.order, model.vocab_size)
        levels.append(KatzLevel(**{name: array.astype(dtypes[name]) for name, array in arrays.items()}))
    return KatzTable(levels, model.vocab_size)


@dataclass(frozen=True, slots=True)
class _Test:
    agreement: dict[int, float]
    lookup_us: float
    cached_lookup_us: float


def _test(table: KatzTable, documents: Documents, clock: Callable[[], float]) -> _Test:
    """Return how the table ranks what comes after each two tokens of these documents, and what looking it up takes."""
    contexts: list[Context] = []
    choices: list[int] = []
    for number in range(len(documents)):
        text = documents[number].tolist()
        contexts.extend(pairwise(text[:-1]))
        choices.extend(text[MAX_ORDER:])
    distinct = list(dict.fromkeys(contexts))
    seconds = []
    for batch in (distinct[:_TIMED_LOOKUPS], distinct[:_TIMED_LOOKUPS]):
        started_s = clock()
        for context in batch:
            table.ranked(context)
        seconds.append((clock() - started_s) / len(batch))
    ranks = [_rank(table, context, choice) for context, choice in zip(contexts, choices, strict=True)]
    agreement = {best: sum(rank < best for rank in ranks) / len(ranks) for best in (1, 4)}
    return _Test(agreement, 1e6 * seconds[0], 1e6 * seconds[1])


def _rank(table: KatzTable, context: Context, token_id: int) -> int:
    """Return how many ids the table puts before this one."""
    ranked = [each for _, each in table.ranked(context)]
    return ranked.index(token_id) if token_id in ranked else table.vocab_size


def _gains(model: KatzModel, level: Level, max_followers: int) -> NDArray[np.float64]:
    """Return what each continuation tells, [F]; -1 for those beyond the best `max_followers` of their context."""
    more = level.probabilities - model.without_last(level.order, level.keys)  # [F]
    gains: NDArray[np.float64] = np.maximum(more, 0.0) * level.totals[level.places].astype(np.float64)  # [F]
    order = np.lexsort((-level.probabilities, level.places))  # [F]
    ranks = np.arange(len(order)) - level.starts[:-1][level.places]  # [F], of those in order
    gains[order[ranks >= max_followers]] = -1
    return gains


def _kept(model: KatzModel, level: Level, gains: NDArray[np.float64], least: float) -> NDArray[np.bool_]:
    """Return which continuations stay when each byte must pay at least so much, [F]; of unigrams all do."""
    if level.order == 0:
        return gains >= 0
    size = _Size.of(level, model.vocab_size)
    is_worth = (gains > 0) & (gains >= least * size.entry_bytes)  # [F]
    surplus = np.where(is_worth, gains - least * size.entry_bytes, 0.0)  # [F]
    pays = np.add.reduceat(surplus, level.starts[:-1]) >= least * size.context_bytes  # [C]
    return is_worth & pays[level.places]


def _num_bytes(model: KatzModel, gains: Sequence[NDArray[np.float64]], least: float) -> int:
    """Return the size of the table when each byte must pay at least so much."""
    total = _HEADER_BYTES
    for level, gain in zip(model.levels, gains, strict=True):
        is_kept, size = _kept(model, level, gain, least), _Size.of(level, model.vocab_size)
        num_contexts = np.count_nonzero(np.diff(level.places[is_kept], prepend=-1))
        total += int(is_kept.sum()) * size.entry_bytes + int(num_contexts) * size.context_bytes
    return total


@dataclass(frozen=True, slots=True)
class _Size:
    entry_bytes: int
    """Of one continuation."""
    context_bytes: int

    @classmethod
    def of(cls, level: Level, vocab_size: int) -> _Size:
        sizes = {name: dtype.itemsize for name, dtype in level_dtypes(level.order, vocab_size).items()}
        return cls(sizes["ids"] + sizes["codes"], sizes["contexts"] + sizes["starts"] + sizes["backoff_codes"])
