"""One sample while it is decoded: its sequence, its text, and what was released of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.engine.engine import Engine
from foretell.engine.sequence import DecodingSequence
from foretell.output import OutputText
from foretell.params import SamplingParams
from foretell.result import Chunk, Completion


@dataclass(eq=False, slots=True)
class Job:
    """A sequence and its text; jobs join and leave between steps."""

    sequence: DecodingSequence
    output: OutputText
    seed: int | None
    chunks: list[Chunk] = field(default_factory=list)

    def completion(self) -> Completion:
        """Return the result of a job that has ended."""
        sequence, chunks = self.sequence, self.chunks
        assert sequence.finish_reason is not None
        sequence.stats.drafter_memory_bytes = sequence.request.drafter.memory_bytes
        sequence.stats.take_draft_work(sequence.request.drafter.work)
        has_logprobs = sequence.request.num_logprobs is not None
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[chunk.token_id for chunk in chunks],
            finish_reason=sequence.finish_reason,
            sources=[chunk.source for chunk in chunks],
            stats=sequence.stats,
            seed=self.seed,
            logprobs=[chunk.logprobs for chunk in chunks if chunk.logprobs is not None] if has_logprobs else None,
            prompt_token_ids=list(sequence.request.prompt_ids),
        )


def step(engine: Engine, jobs: Sequence[Job], max_rows: int | None = None) -> list[Job]:
    """Run one step of all these jobs, of at most so many rows; returns those that ended in it."""
    emissions = engine.step([job.sequence for job in jobs], max_rows=max_rows)
    for job, emitted in zip(jobs, emissions, strict=True):
        job.chunks.extend(job.output.release(emitted, is_last=job.sequence.is_finished))
    return [job for job in jobs if job.sequence.is_finished]


def noise_seed(sampling: SamplingParams) -> int | None:
    """Return the key of a request's noise, drawn where none is asked for; None when greedy."""
    if sampling.is_greedy:
        return None
    return secrets.randbelow(2**31) if sampling.seed is None else sampling.seed
