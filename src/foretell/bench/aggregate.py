"""From timed runs to rows: medians over repeats, sums over prompts, ratios of sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, median_low
from typing import Any, Final

from foretell.bench.arms import PLAIN, PLAIN_AGAIN
from foretell.bench.measurement import Measurement, Round
from foretell.bench.suites import ALL_CATEGORIES
from foretell.result import Stats

WITHOUT_SECOND_STAGE: Final = {"staged": "draft", "staged-chain": "draft-chain"}
"""For each arm with a second stage the arm that differs from it by that alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One arm on one category; `category` is "all" for the whole suite. None: not reported by this arm."""

    name: str
    category: str
    num_prompts: int
    tokens_per_s: float
    """Tokens after the first ÷ seconds after the first, both summed over prompts. Tokens that the first pass emitted
    together all count as the first."""
    ttft_s: float
    prefill_s: float | None
    end_to_end_tokens_per_s: float
    speedup_vs_plain: float
    """Plain seconds per decoded token ÷ this arm's, over the same prompts; 1.0 for `none`."""
    noise: float
    """How far a second plain arm was from the first: |ratio of their speeds - 1| in this category."""
    tokens_per_pass: float | None
    acceptance_rate: float | None
    identical: float
    """Share of outputs whose token ids equal plain foretell's."""
    first_divergence_gap: float | None
    """Largest logit gap between plain's two best tokens where an output first differs; None when none does."""
    peak_rss_bytes: int | None
    """Most memory of a process with this arm alone."""
    drafter_memory_bytes: int
    """The most that the drafter held at the end of a request."""
    draft_passes_per_token: float | None
    """Passes of a draft model per emitted token; 0 where none runs."""
    draft_share: float | None
    """Share of the time after prefill that drafting took."""
    e2: float | None
    """Tokens of the draft model's own choice per draft pass, 1 without a second stage."""
    relative_bytes: float | None
    """Bytes that passes after prefill read per token ÷ plain's, over the same prompts."""
    second_stage_gain: float | None
    """Speed ÷ that of the arm without the second stage; None where there is no such arm."""
    second_stage_bound: float | None
    """What that gain cannot exceed while both arms emit as many tokens per target pass: drafting, a share s of the
    time of the arm without it, takes 1 / E₂ of its passes, so that 1 / (1 - s (1 - 1 / E₂)) is left."""
    accepted_by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each source of drafts how many tokens it drafted, and how many were accepted."""

    def to_json(self) -> dict[str, Any]:
        """Return the row of the JSON document."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSummary:
    """One arm on one prompt: medians over repeats."""

    num_tokens: int
    num_decode_tokens: int
    decode_s: float
    ttft_s: float
    prefill_s: float | None
    wall_s: float
    num_identical: int
    runs: Sequence[Measurement]
    """The repeats in order."""


Summaries = Mapping[str, Sequence[PromptSummary]]
"""By arm key; one summary per prompt, in the suite's order."""


def summarise_prompts(rounds: Sequence[Round]) -> dict[str, list[PromptSummary]]:
    """Take medians over the repeats of every (arm, prompt), and compare outputs with plain's first."""
    runs: dict[str, dict[int, list[Measurement]]] = {}
    for finished in sorted(rounds, key=lambda each: (each.prompt, each.repeat)):
        for key, measurement in finished.measurements.items():
            runs.setdefault(key, {}).setdefault(finished.prompt, []).append(measurement)
    reference = {prompt: repeats[0].token_ids for prompt, repeats in runs[PLAIN].items()}
    return {
        key: [_summarise(repeats, reference[prompt]) for prompt, repeats in by_prompt.items()]
        for key, by_prompt in runs.items()
    }


def result_rows(
    summaries: Summaries,
    categories: Sequence[str],
    *,
    memory: Mapping[str, int | None] | None = None,
    gaps: Mapping[str, Mapping[int, float | None]] | None = None,
) -> list[BenchResult]:
    """Return, for each arm, its row over everything and one row per category.

    Args:
        summaries: see `summarise_prompts`.
        categories: each prompt's category.
        memory: bytes at the peak, by arm key.
        gaps: for each arm the prompts on which its output differs, with the logit gap there.
    """
    groups = {ALL_CATEGORIES: list(range(len(categories)))}
    for prompt, category in enumerate(categories):
        groups.setdefault(category, []).append(prompt)
    return [
        _row(key, category, prompts, summaries, (memory or {}).get(key), (gaps or {}).get(key, {}))
        for key in (PLAIN, *(key for key in summaries if key not in (PLAIN, PLAIN_AGAIN)))
        for category, prompts in groups.items()
    ]


def pass_counts(summaries: Sequence[PromptSummary]) -> Counter[int]:
    """Return the number of passes by the number of tokens that they emitted, over all runs of an arm."""
    counts: Counter[int] = Counter()
    for run in _runs(summaries):
        counts.update(run.tokens_per_pass_counts)
    return counts


def forward_share(summaries: Sequence[PromptSummary]) -> float | None:
    """Return the share of the time after prefill that target passes took; None where an arm does not report it."""
    runs = [run for run in _runs(summaries) if run.forward_s is not None]
    total_s = sum(run.ttft_s - (run.prefill_s or 0.0) + run.decode_s for run in runs)
    return sum(run.forward_s or 0.0 for run in runs) / total_s if total_s > 0 else None


def rows_per_pass(summaries: Sequence[PromptSummary]) -> float | None:
    """Return the mean number of rows of a pass; None where an arm does not report it."""
    runs = [run for run in _runs(summaries) if run.num_rows is not None and run.num_passes]
    num_passes = sum(run.num_passes or 0 for run in runs)
    return sum(run.num_rows or 0 for run in runs) / num_passes if num_passes else None


def counted(summaries: Sequence[PromptSummary]) -> Stats | None:
    """Return the sums over all runs of an arm of what it counts of bytes and drafting; None where it does not."""
    runs = list(_runs(summaries))
    if not runs or any(run.target_bytes is None for run in runs):
        return None
    return Stats(
        num_output_tokens=sum(len(run.token_ids) for run in runs),
        prefill_s=sum(run.prefill_s or 0.0 for run in runs),
        first_token_s=sum(run.ttft_s for run in runs),
        decode_s=sum(run.decode_s for run in runs),
        draft_s=sum(run.draft_s or 0.0 for run in runs),
        num_draft_passes=sum(run.num_draft_passes or 0 for run in runs),
        num_confirmed=sum(run.num_confirmed or 0 for run in runs),
        target_bytes=sum(run.target_bytes or 0 for run in runs),
        draft_bytes=sum(run.draft_bytes or 0 for run in runs),
    )


def _summarise(repeats: Sequence[Measurement], reference: tuple[int, ...]) -> PromptSummary:
    prefills_s = [run.prefill_s for run in repeats if run.prefill_s is not None]
    return PromptSummary(
        num_tokens=median_low(len(run.token_ids) for run in repeats),
        num_decode_tokens=median_low(run.num_decode_tokens for run in repeats),
        decode_s=median(run.decode_s for run in repeats),
        ttft_s=median(run.ttft_s for run in repeats),
        prefill_s=median(prefills_s) if prefills_s else None,
        wall_s=median(run.wall_s for run in repeats),
        num_identical=sum(run.token_ids == reference for run in repeats),
        runs=repeats,
    )


def _row(
    key: str,
    category: str,
    prompts: Sequence[int],
    summaries: Summaries,
    peak_rss_bytes: int | None,
    gaps: Mapping[int, float | None],
) -> BenchResult:
    own, plain, plain_again = ([summaries[name][prompt] for prompt in prompts] for name in (key, PLAIN, PLAIN_AGAIN))
    without = [summaries[name][prompt] for name in _without_second_stage(key, summaries) for prompt in prompts]
    stats, plain_stats, without_stats = counted(own), counted(plain), counted(without)
    return BenchResult(
        name=key,
        category=category,
        num_prompts=len(prompts),
        tokens_per_s=_decode_tokens_per_s(own),
        ttft_s=median(each.ttft_s for each in own),
        prefill_s=_median_prefill_s(own),
        end_to_end_tokens_per_s=_end_to_end_tokens_per_s(own),
        speedup_vs_plain=1.0 if key == PLAIN else _speedup(own, plain),
        noise=abs(_speedup(plain_again, plain) - 1.0),
        tokens_per_pass=_tokens_per_pass(own),
        acceptance_rate=_acceptance_rate(own),
        identical=sum(each.num_identical for each in own) / sum(len(each.runs) for each in own),
        first_divergence_gap=max((gap for prompt in prompts if (gap := gaps.get(prompt)) is not None), default=None),
        peak_rss_bytes=peak_rss_bytes,
        drafter_memory_bytes=max(run.drafter_memory_bytes for run in _runs(own)),
        draft_passes_per_token=stats.draft_passes_per_token if stats else None,
        draft_share=stats.draft_share if stats else None,
        e2=stats.e2 if stats else None,
        relative_bytes=_relative_bytes(stats, plain_stats),
        second_stage_gain=_speedup(own, without) if without else None,
        second_stage_bound=_second_stage_bound(stats, without_stats),
        accepted_by_source=_by_source(own),
    )


def _without_second_stage(key: str, summaries: Summaries) -> list[str]:
    """Return the arm that lacks this one's second stage, in a list that is empty where there is none."""
    return [without for name, without in WITHOUT_SECOND_STAGE.items() if name == key and without in summaries]


def _median_prefill_s(summaries: Sequence[PromptSummary]) -> float | None:
    prefills_s = [each.prefill_s for each in summaries if each.prefill_s is not None]
    return median(prefills_s) if prefills_s else None


def _relative_bytes(stats: Stats | None, plain: Stats | None) -> float | None:
    if stats is None or plain is None or plain.bytes_per_token == 0:
        return None
    return stats.bytes_per_token / plain.bytes_per_token


def _second_stage_bound(stats: Stats | None, without: Stats | None) -> float | None:
    return None if stats is None or without is None else 1.0 / (1.0 - without.draft_share * (1.0 - 1.0 / stats.e2))


def _speedup(own: Sequence[PromptSummary], plain: Sequence[PromptSummary]) -> float:
    """Return the ratio of decode speeds; of end-to-end speeds where an arm never emitted a second token."""
    own_per_s, plain_per_s = _decode_tokens_per_s(own), _decode_tokens_per_s(plain)
    if own_per_s == 0.0 or plain_per_s == 0.0:
        own_per_s, plain_per_s = _end_to_end_tokens_per_s(own), _end_to_end_tokens_per_s(plain)
    return own_per_s / plain_per_s if plain_per_s > 0.0 else 1.0


def _decode_tokens_per_s(summaries: Sequence[PromptSummary]) -> float:
    num_tokens = sum(each.num_decode_tokens for each in summaries)
    decode_s = sum(each.decode_s for each in summaries if each.num_decode_tokens)
    return num_tokens / decode_s if decode_s > 0 else 0.0


def _end_to_end_tokens_per_s(summaries: Sequence[PromptSummary]) -> float:
    wall_s = sum(each.wall_s for each in summaries)
    return sum(each.num_tokens for each in summaries) / wall_s if wall_s > 0 else 0.0


def _tokens_per_pass(summaries: Sequence[PromptSummary]) -> float | None:
    counts = pass_counts(summaries)
    num_passes = sum(counts.values())
    return sum(num_tokens * times for num_tokens, times in counts.items()) / num_passes if num_passes else None


def _acceptance_rate(summaries: Sequence[PromptSummary]) -> float | None:
    by_source = _by_source(summaries).values()
    num_drafted = sum(counts["drafted"] for counts in by_source)
    return sum(counts["accepted"] for counts in by_source) / num_drafted if num_drafted else None


def _by_source(summaries: Sequence[PromptSummary]) -> dict[str, dict[str, int]]:
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for run in _runs(summaries):
        drafted.update(run.drafted or {})
        accepted.update(run.accepted or {})
    return {source: {"drafted": drafted[source], "accepted": accepted[source]} for source in sorted(drafted)}


def _runs(summaries: Sequence[PromptSummary]) -> Iterable[Measurement]:
    return (run for each in summaries for run in each.runs)
