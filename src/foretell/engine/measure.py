"""Measure T(N) on this machine, and test whether draft rows change a row's bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from foretell.cache.kv_cache import Region
from foretell.hardware.profile import LatencyProfile
from foretell.passes.rows import Rows
from foretell.passes.runner import MAX_ROWS, Runner

ROW_COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
"""Row counts that a full measurement looks at."""

QUICK_CONTEXTS = (256, 1024)
QUICK_ROW_COUNTS = (1, 6, 8, 12, 16)


def measure_profile(
    runner: Runner,
    key: dict[str, str],
    *,
    contexts: Sequence[int],
    row_counts: Sequence[int] = ROW_COUNTS,
    repeats: int = 9,
    statistic: Callable[[list[float]], float] = median,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] | None = None,
) -> LatencyProfile:
    """Return the seconds of passes by context and row count; counts are interleaved, so drift hits all alike.

    Args:
        runner: the target.
        key: what the numbers hold for.
        contexts: tokens before the pass's rows; those beyond the model's context are left out.
        row_counts: rows of a pass.
        repeats: passes per point, after one to warm up.
        statistic: makes one number of them.
        clock: seconds.
        progress: called after each round over the row counts with the rounds done and all of them.
    """
    fitting = [context for context in contexts if context + max(row_counts) <= runner.context_tokens]
    table = []
    counts = [size for size in row_counts if runner.compiled is None or runner.compiled.num_rows(size) is not None]
    num_rounds = repeats + 1
    for place, context in enumerate(fitting or [0]):
        region = _filled(runner, context)
        seconds: dict[int, list[float]] = {size: [] for size in counts}
        for round_ in range(num_rounds):
            for size in counts:
                started_s = clock()
                runner.decode([Rows.chain(region, [1] * size)])
                if round_ > 0:
                    seconds[size].append(clock() - started_s)
            if progress is not None:
                progress(place * num_rounds + round_ + 1, max(1, len(fitting)) * num_rounds)
        runner.cache.free(region)
        table.append(tuple(_monotone([statistic(seconds[size]) for size in counts])))
    return LatencyProfile(key=key, contexts=tuple(fitting or [0]), num_rows=tuple(counts), pass_s=tuple(table))


def quick_profile(runner: Runner, key: dict[str, str]) -> LatencyProfile:
    """Return a profile from about a second of measuring, for a model that was never tuned.

    Two contexts, because attention makes rows dearer as text grows; the least of three passes, because three have no
    median to trust.
    """
    return measure_profile(runner, key, contexts=QUICK_CONTEXTS, row_counts=QUICK_ROW_COUNTS, repeats=3, statistic=min)


def _filled(runner: Runner, context: int) -> Region:
    """Return a region whose committed slots are zeros: latency does not depend on their values."""
    region = runner.cache.allocate(context + max(ROW_COUNTS) + 8)
    runner.cache.commit(region, context)
    return region


def _monotone(seconds: list[float]) -> list[float]:
    """Return the largest non-decreasing sequence below these: more rows never cost less than fewer."""
    for index in reversed(range(len(seconds) - 1)):
        seconds[index] = min(seconds[index], seconds[index + 1])
    return seconds


@dataclass(frozen=True, slots=True)
class Exactness:
    """How chain rows compare with plain rows."""

    is_bit_exact: bool
    num_rows: int
    num_different_rows: int
    largest_gap: float
    """Largest difference between logits; 0 where bit-exact."""


@torch.inference_mode()
def compare_rows(
    runner: Runner,
    token_ids: Sequence[int],
    *,
    num_prefilled: int = 0,
    row_counts: Sequence[int] = (2, 5, 8, 16),
    progress: Callable[[int, int], None] | None = None,
) -> Exactness:
    """Compare the logits of every row of a chain with those of the same token in a pass of its own.

    Args:
        runner: the target.
        token_ids: a text of at least 40 tokens; more reach across blocks of slots.
        num_prefilled: tokens at the start that are not compared, so that a long context costs one prefill.
        row_counts: lengths of the chains that are tried in turn.
        progress: called after each chain with the rows done and all of them.
    """
    fits = [size for size in row_counts if runner.compiled is None or runner.compiled.num_rows(size) is not None]
    num_slots = len(token_ids) + MAX_ROWS
    plain, chained = runner.cache.allocate(num_slots), runner.cache.allocate(num_slots)
    if num_prefilled > 0:
        for region in (plain, chained):
            runner.prefill(Rows.chain(region, token_ids[:num_prefilled]))
    num_rows = num_different = 0
    largest_gap = 0.0
    position, turn = num_prefilled, 0
    while position < len(token_ids):
        chain = list(token_ids[position : position + fits[turn % len(fits)]])
        reference = []
        for token_id in chain:
            reference.append(runner.decode([Rows.chain(plain, [token_id])]).logits[0][0])
            runner.cache.commit(plain, 1)
        logits = runner.decode([Rows.chain(chained, chain)]).logits[0][: len(chain)]  # [N, V]
        runner.cache.commit(chained, len(chain))
        gaps = (logits.float() - torch.stack(reference).float()).abs().amax(-1)  # [N]
        num_rows += len(chain)
        num_different += int((gaps != 0).sum())  # NaN is a difference too
        largest_gap = max(largest_gap, float(gaps.max()))
        position, turn = position + len(chain), turn + 1
        if progress is not None:
            progress(num_rows, len(token_ids) - num_prefilled)
    runner.cache.free(plain)
    runner.cache.free(chained)
    return Exactness(num_different == 0, num_rows, num_different, largest_gap)
