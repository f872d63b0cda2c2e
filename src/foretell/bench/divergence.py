"""Where an output first differs from plain decoding's, and how close the call was there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretell.bench.aggregate import Summaries
from foretell.bench.arms import PLAIN, PLAIN_AGAIN, BenchLLM
from foretell.params import SamplingParams
from foretell.result import Completion


def first_divergences(summaries: Summaries) -> dict[str, dict[int, int]]:
    """Return, for each arm, the prompts on which some repeat differs from plain's first, and the first such index."""
    references = [each.runs[0].token_ids for each in summaries[PLAIN]]
    found: dict[str, dict[int, int]] = {}
    for key, arm_summaries in summaries.items():
        if key == PLAIN_AGAIN:
            continue
        for prompt, (each, reference) in enumerate(zip(arm_summaries, references, strict=True)):
            indices = [_first_difference(run.token_ids, reference) for run in each.runs if run.token_ids != reference]
            if indices:
                found.setdefault(key, {})[prompt] = min(indices)
    return found


def divergence_gaps(
    llm: BenchLLM,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    summaries: Summaries,
) -> dict[str, dict[int, float | None]]:
    """Return the logit gap between plain's two best tokens at every arm's first divergence, by arm and prompt.

    Each prompt on which some arm differs is decoded once more without drafts, this time with log-probabilities. The
    gap is None where plain's output had ended, and where that extra run did not repeat plain's tokens so far.
    """
    divergences = first_divergences(summaries)
    last: dict[int, int] = {}
    for by_prompt in divergences.values():
        for prompt, index in by_prompt.items():
            last[prompt] = max(index, last.get(prompt, 0))
    gaps: dict[int, Mapping[int, float]] = {
        prompt: _gaps_until(index, llm, prompts[prompt], sampling, summaries[PLAIN][prompt].runs[0].token_ids)
        for prompt, index in last.items()
    }
    return {
        key: {prompt: gaps[prompt].get(index) for prompt, index in by_prompt.items()}
        for key, by_prompt in divergences.items()
    }


def _gaps_until(
    last: int, llm: BenchLLM, prompt_ids: Sequence[int], sampling: SamplingParams, reference: tuple[int, ...]
) -> dict[int, float]:
    """Return the gaps at indices up to `last`, as far as the rerun agrees with the reference before the index."""
    num_tokens = min(last + 1, sampling.max_new_tokens)
    rerun = replace(
        sampling, max_new_tokens=num_tokens, min_new_tokens=min(sampling.min_new_tokens, num_tokens), logprobs=2
    )
    (completion,) = llm.generate(list(prompt_ids), rerun, drafter=PLAIN)
    num_reliable = _first_difference(tuple(completion.token_ids), reference) + 1
    return {index: gap for index, gap in enumerate(_top_gaps(completion)[:num_reliable]) if gap is not None}


def _top_gaps(completion: Completion) -> list[float | None]:
    # A difference of two log-probabilities of one distribution is the difference of the logits.
    return [each.top[0][1] - each.top[1][1] if len(each.top) > 1 else None for each in completion.logprobs or ()]


def _first_difference(tokens: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Return the first index at which two outputs differ; where one continues the other, the shorter one's length."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (token, other) in pairs if token != other), min(len(tokens), len(others)))
