"""Planned answers on our own engine: the plan and all parts are sequences that share passes, keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from foretell.errors import CapacityError, InputError
from foretell.job import Job
from foretell.params import SamplingParams
from foretell.plato.events import (
    Event,
    FellBack,
    Finished,
    PartEnd,
    PartEnded,
    PartResult,
    PartStarted,
    PartText,
    PlanEnded,
    Routed,
)
from foretell.plato.grammar import plan_grammar
from foretell.plato.host import Host
from foretell.plato.jobs import Jobs
from foretell.plato.options import PlatoOptions
from foretell.plato.plan import Part, Plan
from foretell.plato.prompts import PlanPrompts, QuotedPart
from foretell.plato.reader import PlanReader
from foretell.plato.router import Route, Router, route_by_rule
from foretell.plato.run import AnswerRun
from foretell.plato.schedule import Launch
from foretell.plato.titles import DistinctTitles

_LINE_TOKENS: Final = 40
"""Most tokens of a plan's line, on average; a plan has room for 16 more."""

_PRESENCE_PENALTY: Final = 1.0
"""Of the plan, so that titles do not repeat; the grammar sees to its form."""

_NEAR_END: Final = 8
"""Tokens before a part's limit at which it asks for more."""


@dataclass(eq=False, slots=True)
class _Branch:
    """A part and the sequence that writes it."""

    part: Part
    job: Job
    holds: frozenset[int]
    """Parts whose text the sequence holds, its own included."""
    num_shown: int = 0


@dataclass(eq=False, slots=True)
class _Planning:
    """The plan while it is written."""

    job: Job
    reader: PlanReader
    router: Router
    line_ends: dict[int, int] = field(default_factory=dict)
    """By part, the tokens of the sequence when its line is complete."""
    num_read: int = 0


def answer(
    llm: Host,
    question: str,
    options: PlatoOptions | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Event]:
    """Answer a question part by part, yielding what happens; the last event has the answer.

    Close the iterator to cancel: all slots are given back at once.

    Args:
        llm: a model with a chat template.
        question: what to answer.
        options: how.
        clock: seconds, monotonic.

    Raises:
        InputError: the model has no chat template, or the question is empty.
        CapacityError: the question leaves no room for an answer.

    Source: arXiv:2402.12280 (Plato); Skeleton-of-Thought, arXiv:2307.15337, as a baseline.
    """
    if not question.strip():
        raise InputError("the question is empty: give at least one character")
    options = options or PlatoOptions()
    run = _Run(llm, question, options, clock)
    try:
        yield from run.events()
    finally:
        run.close()


class _Run(AnswerRun):
    """One question, until it is answered."""

    def __init__(self, llm: Host, question: str, options: PlatoOptions, clock: Callable[[], float]) -> None:
        self._llm, self._prompts = llm, PlanPrompts(llm.tokenizer)
        super().__init__(question, options, clock)  # the clock runs from here
        self._jobs = Jobs(llm, options)
        self._running: list[_Branch] = []
        self._branches: dict[int, _Branch] = {}
        self._results: dict[int, PartResult] = {}

    def events(self) -> Iterator[Event]:
        """Yield what happens until the answer is there."""
        if self._options.mode == "sequential":
            yield from self._decode_directly(Route(True, None, "asked for"))
        else:
            yield from self._route_and_answer()
        self._answer.total_s = self._now_s()
        yield Finished(self._answer)

    def close(self) -> None:
        """Give back all slots."""
        self._jobs.close()

    def _route_and_answer(self) -> Iterator[Event]:
        route = route_by_rule(self._question, self._options)
        if route is not None and route.is_direct:
            yield from self._decode_directly(route)
            return
        planning = self._start_plan(is_forced=route is not None)
        router = planning.router
        self._step([planning.job])
        route = route or router.route()
        self._answer.direct_probability = route.direct_probability
        if route.is_direct:
            self._answer.num_plan_tokens = 1
            self.close()
            yield from self._decode_directly(route)
            return
        yield Routed(False, route.direct_probability, route.reason)
        yield from self._write_parts(planning)

    # The question as it is

    def _decode_directly(self, route: Route) -> Iterator[Event]:
        answer = self._answer
        answer.is_direct, answer.direct_probability = True, route.direct_probability
        yield Routed(True, route.direct_probability, route.reason)
        prompt_ids = self._prompts.plain(self._question)
        job, _ = self._jobs.start(prompt_ids, self._sampling(self._options.max_answer_tokens), is_eager=False)
        answer.num_computed += len(prompt_ids) - 1
        num_shown = 0
        while not job.sequence.is_finished:
            self._step([job])
            text = "".join(chunk.text for chunk in job.chunks[num_shown:])
            num_shown = len(job.chunks)
            if text:
                yield self._answer_text(text)
        answer.num_answer_tokens = _num_tokens(job)

    # Planning

    def _start_plan(self, *, is_forced: bool) -> _Planning:
        options, prompt_ids = self._options, self._prompts.planning(self._question)
        router = Router(self._llm.tokenizer, len(prompt_ids))
        titles = DistinctTitles(self._llm.tokenizer, len(prompt_ids))
        sampling = replace(
            self._sampling(16 + _LINE_TOKENS * options.max_parts),
            regex=plan_grammar(options.num_plannable, may_be_direct=not is_forced),
            logits_processors=(titles,) if is_forced else (router, titles),
            presence_penalty=_PRESENCE_PENALTY,
        )
        prefixes = self._llm.prefixes if options.is_reusing else None
        job, num_reused = self._jobs.start(prompt_ids, sampling, prefixes=prefixes, priority=options.max_parts)
        self._answer.num_reused += num_reused
        self._answer.num_computed += len(prompt_ids) - 1 - num_reused
        if options.is_reusing:
            self._llm.prefixes.keep(job.sequence, self._prompts.num_shared, is_pinned=True)
        return _Planning(job, PlanReader(options.max_parts, is_strict=True), router)

    def _read_plan(self, planning: _Planning) -> Iterator[Event]:
        """Take in what was written of the plan; a part may start at the very token that ends its line."""
        job = planning.job
        for chunk in job.chunks[planning.num_read :]:
            planning.num_read += 1
            for part in planning.reader.push(chunk.text):
                planning.line_ends[part.id] = len(job.sequence.request.prompt_ids) + planning.num_read
                yield self._add_part(part)
        if job.sequence.is_finished and self._answer.plan is None:
            plan = planning.reader.close(is_cut=job.sequence.finish_reason != "stop")
            for part in () if plan is None else plan.parts[len(self._parts) :]:
                planning.line_ends[part.id] = len(job.sequence.token_ids)
                yield self._add_part(part)
            yield self._end_plan(planning)

    def _end_plan(self, planning: _Planning) -> PlanEnded:
        """Take the plan as it is."""
        plan, repairs = Plan(tuple(self._parts)), planning.reader.repairs
        self._answer.plan, self._answer.repairs = plan, repairs
        self._answer.num_plan_tokens = planning.num_read
        self._schedule.end_plan()
        return PlanEnded(plan, repairs)

    # Writing

    def _write_parts(self, planning: _Planning) -> Iterator[Event]:
        """Step the plan and all parts that are under way, until all are done."""
        yield from self._read_plan(planning)
        while not self._schedule.is_done or self._answer.plan is None:
            if self._options.deadline_s is not None and self._now_s() > self._options.deadline_s:
                self._schedule.expire()
            yield from self._start_parts(planning)
            for branch in self._running:
                self._extend(branch)
            jobs = [branch.job for branch in self._running]
            if not planning.job.sequence.is_finished:
                jobs.append(planning.job)
            if self._schedule.is_done:  # the deadline came before the plan's end
                break
            if not jobs:  # what was to start has failed: others may be next
                continue
            self._step(jobs)
            yield from self._read_plan(planning)
            for branch in list(self._running):
                yield from self._show(branch)
            self._release(planning)
        if self._answer.plan is None:
            yield self._end_plan(planning)
        reason = "" if self._parts else "the plan has no parts"
        if reason and not planning.job.sequence.is_finished:
            reason = "the deadline came before the plan's first part"
        if self._results and all(result.reason == "failed" for result in self._results.values()):
            reason = "no part fits the context"
        if reason:
            self.close()
            yield FellBack(reason)
            yield from self._decode_directly(Route(True, self._answer.direct_probability, reason))
            return
        for part_id in self._schedule.waiting:
            if fresh := self._assembly.end(part_id):
                yield self._answer_text(fresh)
        answer = self._answer
        answer.parts = [self._results[part_id] for part_id in sorted(self._results)]
        answer.num_answer_tokens = sum(result.num_tokens for result in answer.parts)
        answer.num_computed += sum(result.num_computed for result in answer.parts)
        answer.num_reused += sum(result.num_reused for result in answer.parts)

    def _start_parts(self, planning: _Planning) -> Iterator[Event]:
        """Start all parts that can run and have room."""
        while launch := self._schedule.next():
            prompt_ids, holds = self._part_prompt(planning, launch)
            if not self._jobs.has_room(len(prompt_ids) + launch.max_new_tokens):
                return
            self._schedule.take(launch)
            yield from self._start_part(launch, prompt_ids, holds)

    def _start_part(self, launch: Launch, prompt_ids: list[int], holds: frozenset[int]) -> Iterator[Event]:
        """Start a part; one whose prompt leaves no room for a token has failed."""
        part = launch.part
        result = self._results[part.id] = PartResult(part=part, started_s=self._now_s())
        try:
            job, result.num_reused = self._jobs.start(
                prompt_ids, self._sampling(launch.max_new_tokens), sample=part.id, priority=launch.chain
            )
        except CapacityError:
            yield PartStarted(part.id, 0, 0)
            yield from self._end_part(part.id, 0, "failed")
            return
        result.num_computed = len(prompt_ids) - 1 - result.num_reused
        branch = self._branches[part.id] = _Branch(part, job, holds | {part.id})
        self._running.append(branch)
        yield PartStarted(part.id, result.num_computed, result.num_reused)

    def _part_prompt(self, planning: _Planning, launch: Launch) -> tuple[list[int], frozenset[int]]:
        """Return a part's prompt and the parts in it: the plan's or a parent's sequence, parts that it lacks."""
        part, plan = launch.part, self._answer.plan
        if self._options.mode == "sot":
            assert plan is not None
            titles = [each.title for each in plan]
            return self._prompts.point(self._question, titles, part.id), frozenset()
        is_last = plan is not None and part.id == len(plan)
        if launch.primary is None:
            written = _text_ids(planning.job)
            before = written if self._options.visibility == "full" else written[: planning.line_ends[part.id]]
            return [*before, *self._prompts.part(part, is_last=is_last)], frozenset()
        parent = self._branches[launch.primary]
        before = _text_ids(parent.job)
        quoted = [
            QuotedPart(self._parts[need - 1], self._results[need].text.strip())
            for need in launch.needs_all
            if need not in parent.holds
        ]
        return [*before, *self._prompts.next_part(part, quoted)], parent.holds | {each.part.id for each in quoted}

    def _extend(self, branch: _Branch) -> None:
        """Give a part that is about to be cut what others leave over."""
        sequence = branch.job.sequence
        limit = sequence.request.max_new_tokens
        if sequence.num_new_tokens + _NEAR_END >= limit and (more := self._schedule.extend(branch.part.id)):
            more = min(more, self._jobs.room_for_more(branch.job))
            sequence.request = replace(sequence.request, max_new_tokens=limit + more)

    def _show(self, branch: _Branch) -> Iterator[Event]:
        """Yield what a branch wrote in this step, and its end."""
        part_id = branch.part.id
        text = "".join(chunk.text for chunk in branch.job.chunks[branch.num_shown :])
        branch.num_shown = len(branch.job.chunks)
        if text:
            self._results[part_id].text += text
            yield PartText(part_id, text)
            if fresh := self._assembly.push(part_id, text):
                yield self._answer_text(fresh)
        if branch.job.sequence.is_finished:
            self._running.remove(branch)
            reason: PartEnd = "stop" if branch.job.sequence.finish_reason == "stop" else "length"
            yield from self._end_part(part_id, _num_tokens(branch.job), reason)

    def _end_part(self, part_id: int, num_tokens: int, reason: PartEnd) -> Iterator[Event]:
        result = self._results[part_id]
        result.num_tokens, result.reason, result.ended_s = num_tokens, reason, self._now_s()
        self._schedule.end(part_id, num_tokens, reason)
        yield PartEnded(part_id, reason, num_tokens)
        if fresh := self._assembly.end(part_id):
            yield self._answer_text(fresh)

    def _release(self, planning: _Planning) -> None:
        """Give back the slots of what has ended and what no part will go on from."""
        ended = {None: planning.job} | {part_id: branch.job for part_id, branch in self._branches.items()}
        for part_id, job in ended.items():
            if job.sequence.is_finished and not self._schedule.is_awaited(part_id):
                self._jobs.free(job)

    # What all share

    def _step(self, jobs: list[Job]) -> None:
        self._llm.step(jobs, max_rows=self._options.max_rows)

    def _sampling(self, max_new_tokens: int) -> SamplingParams:
        options = self._options
        return SamplingParams(max_new_tokens=max_new_tokens, temperature=options.temperature, seed=options.seed)


def _text_ids(job: Job) -> list[int]:
    """Return a job's prompt and text, without the token that ended it."""
    return job.sequence.token_ids[: len(job.sequence.request.prompt_ids) + _num_tokens(job)]


def _num_tokens(job: Job) -> int:
    """Return how many tokens of text a job wrote, the one that ended it excluded."""
    token_ids = job.sequence.token_ids[len(job.sequence.request.prompt_ids) :]
    return len(token_ids) - (len(token_ids) > 0 and token_ids[-1] in job.sequence.request.stop_ids)
