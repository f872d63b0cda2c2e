"""A benchmark from settings to report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from foretell import __version__
from foretell.bench.aggregate import result_rows, summarise_prompts
from foretell.bench.arms import PLAIN, Arm, BenchLLM, Clock, ForetellArm, with_second_plain
from foretell.bench.baselines import check_baselines, open_baselines
from foretell.bench.divergence import divergence_gaps
from foretell.bench.document import BenchReport
from foretell.bench.engine import (
    check_drafters,
    default_drafters,
    draft_files,
    encode_prompt,
    load_llm,
    profile_document,
    resolved_engine,
)
from foretell.bench.journal import Journal
from foretell.bench.memory import measure_memory
from foretell.bench.report import check_report_folder, write_report
from foretell.bench.runner import NoProgress, Progress, measure_rounds
from foretell.bench.settings import BenchSettings, EngineSettings
from foretell.bench.suites import BenchPrompt, load_suite
from foretell.provenance import provenance

OpenLLM = Callable[[EngineSettings, Callable[[str], None]], BenchLLM]
MeasureMemory = Callable[[Sequence[str], EngineSettings, Progress], Mapping[str, int | None]]


def run_bench(
    settings: BenchSettings,
    progress: Progress | None = None,
    *,
    open_llm: OpenLLM = load_llm,
    memory_of: MeasureMemory = measure_memory,
    clock: Clock = time.perf_counter,
) -> BenchReport:
    """Measure, aggregate and, if asked to, write the report.

    What can be refused is refused before a model is loaded.

    Args:
        settings: what to measure.
        progress: told how far it is.
        open_llm: loads the model and says what takes long; one serves all of foretell's arms, so that they share its
            weights.
        memory_of: measures memory.
        clock: seconds since some fixed moment.

    Raises:
        ForetellError: settings, suite or model cannot be used, or an arm failed.
    """
    progress = progress or NoProgress()
    check_drafters(settings.drafters, settings.engine, settings.sampling, progress.note)
    check_baselines(settings.baselines, settings.sampling)
    if settings.report:
        check_report_folder(settings.report)
    prompts = load_suite(settings.suite, limit=settings.limit, category=settings.category)

    progress.note("loading the model")
    llm = open_llm(settings.engine, progress.note)
    engine = resolved_engine(llm, settings.engine)
    prompt_ids = [encode_prompt(llm, prompt) for prompt in prompts]
    arms = _arms(llm, settings, engine, prompt_ids, clock)
    rounds = measure_rounds(
        arms,
        prompt_ids,
        settings.sampling,
        repeats=settings.repeats,
        journal=_journal(settings, engine, arms, prompts),
        progress=progress,
    )
    summaries = summarise_prompts(rounds)
    gaps = divergence_gaps(llm, prompt_ids, settings.sampling, summaries)
    names = [arm.key for arm in arms if not isinstance(arm, ForetellArm) or arm.key == arm.drafter]
    memory = memory_of(names, engine, progress) if settings.has_memory else {}
    report = BenchReport(
        results=result_rows(summaries, [prompt.category for prompt in prompts], memory=memory, gaps=gaps),
        profile=profile_document(llm),
        provenance=provenance() | {"bench": _shown(settings, engine)},
        summaries=summaries,
        suite=settings.suite,
    )
    if settings.report:
        write_report(report, settings.report)
    return report


def _arms(
    llm: BenchLLM, settings: BenchSettings, engine: EngineSettings, prompt_ids: Sequence[Sequence[int]], clock: Clock
) -> list[Arm]:
    drafters = default_drafters(llm) if settings.drafters is None else settings.drafters
    names = dict.fromkeys((PLAIN, *drafters))
    longest = max(map(len, prompt_ids)) + settings.sampling.max_new_tokens
    baselines = open_baselines(settings.baselines, replace(engine, context_tokens=engine.context_tokens or longest))
    own: list[Arm] = [ForetellArm(key=name, drafter=name, llm=llm, clock=clock) for name in names]
    return with_second_plain([*own, *baselines], llm, clock=clock)


def _journal(
    settings: BenchSettings, engine: EngineSettings, arms: Sequence[Arm], prompts: Sequence[BenchPrompt]
) -> Journal | None:
    if settings.resume is None:
        return None
    configuration = {
        "version": __version__,
        "engine": engine.to_json(),
        "draft_files": draft_files(engine),
        "sampling": asdict(settings.sampling),
        "arms": [arm.key for arm in arms],
        "prompts": [asdict(prompt) for prompt in prompts],
    }
    return Journal(settings.resume, configuration)


def _shown(settings: BenchSettings, engine: EngineSettings) -> dict[str, Any]:
    """Return the effective settings, as they stand beside the results."""
    sampling = settings.sampling
    return engine.to_json() | {
        "suite": settings.suite,
        "limit": settings.limit,
        "category": settings.category,
        "repeats": settings.repeats,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "verification": sampling.verification,
    }
