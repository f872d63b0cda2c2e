"""The jobs of one planned answer: what they share, and how many of them may hold slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foretell.engine.prefixes import MIN_SHARED, num_shared_tokens
from foretell.errors import CapacityError
from foretell.passes.runner import MAX_ROWS
from foretell.plato.options import PlatoOptions

if TYPE_CHECKING:
    from foretell.cache.kv_cache import Region
    from foretell.engine.prefixes import PrefixCache
    from foretell.job import Job
    from foretell.params import SamplingParams
    from foretell.plato.host import Host


class Jobs:
    """Those that hold slots; a new one begins with a copy of what it shares with any of them.

    Slots: running jobs share a pass and have regions of one size then, that of the longest; what they will take at most
    counts from their start. Jobs that have ended count too, and make room for new ones.
    """

    def __init__(self, llm: Host, options: PlatoOptions) -> None:
        self._llm, self._options = llm, options
        self._cache = llm.engine.runner.cache
        self._holding: list[Job] = []

    def has_room(self, num_tokens: int) -> bool:
        """Return whether a job of so many tokens, prompt included, may start now. Without others it always may."""
        return not self._running or self._fits(min(num_tokens, self._max_tokens(1)), ())

    def room_for_more(self, job: Job) -> int:
        """Return how many more tokens than it was given a running job may take."""
        return max(0, self._max_tokens(len(self._running)) - _num_tokens(job))

    def start(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        sample: int = 0,
        prefixes: PrefixCache | None = None,
        is_eager: bool = True,
        priority: int = 0,
    ) -> tuple[Job, int]:
        """Prefill a prompt; returns the job, and how many of the prompt's tokens were there already.

        Args:
            prompt_ids: the prompt.
            sampling: how to choose tokens.
            sample: number of the branch, which has noise of its own.
            prefixes: where its beginning may be, in place of other jobs.
            is_eager: share passes with others, see `Request`.
            priority: who goes first where rows are short, see `Request`.

        Raises:
            CapacityError: the prompt leaves no room for a token.
        """
        limit = self._max_tokens(1)
        if (room := limit - len(prompt_ids)) < 1:
            what = "the context holds" if self._options.max_slots is None else "`max_slots` has room for"
            raise CapacityError(f"the prompt has {len(prompt_ids)} tokens, {what} {limit}: shorten it or give more")
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens or room, room))
        if prefixes is not None:
            reuse = prefixes.take(prompt_ids)
        else:
            reuse = self._beginning(prompt_ids, len(prompt_ids) + sampling.max_new_tokens)
        num_reused = 0 if reuse is None else reuse.length
        job = self._llm.start(
            prompt_ids,
            sampling,
            drafter=self._options.drafter,
            sample=sample,
            reuse=reuse,
            is_eager=is_eager,
            priority=priority,
        )
        self._holding.append(job)
        return job, num_reused

    def free(self, job: Job) -> None:
        """Give back a job's slots, unless that was done."""
        if job in self._holding:
            self._holding.remove(job)
            self._llm.finish(job)

    def close(self) -> None:
        """Give back all slots."""
        while self._holding:
            self._llm.finish(self._holding.pop())

    @property
    def _running(self) -> list[Job]:
        return [job for job in self._holding if not job.sequence.is_finished]

    def _max_tokens(self, num_jobs: int) -> int:
        """Return how many tokens each of so many running jobs may have."""
        max_slots, limit = self._options.max_slots, self._llm.engine.runner.context_tokens
        if max_slots is None:
            return limit
        num_slots = 0
        while (larger := self._cache.capacity(num_slots + 1)) > num_slots and larger * num_jobs <= max_slots:
            num_slots = larger
        return max(0, min(limit, num_slots - MAX_ROWS))

    def _beginning(self, prompt_ids: Sequence[int], num_tokens: int) -> Region | None:
        """Return slots with the longest beginning of a prompt that any job has, and make room for its job."""
        known = prompt_ids[:-1]  # the prompt's last token is always computed
        shared = {
            job: num_shared_tokens(job.sequence.token_ids[: job.sequence.region.length], known) for job in self._holding
        }
        source = max(shared, key=shared.__getitem__, default=None)
        region = None
        if source is not None and self._options.is_reusing and shared[source] >= MIN_SHARED:
            region = self._cache.fork(source.sequence.region, shared[source], num_tokens + MAX_ROWS)
        ended = sorted((job for job in shared if job.sequence.is_finished), key=shared.__getitem__, reverse=True)
        while ended and not self._fits(num_tokens, ended):
            self.free(ended.pop())
        return region

    def _fits(self, num_tokens: int, ended: Sequence[Job]) -> bool:
        """Return whether a job of so many tokens fits beside all that run and these that have ended."""
        if self._options.max_slots is None:
            return True
        num_held = sum(job.sequence.region.capacity for job in ended)
        running = self._running
        num_slots = max([self._cache.capacity(num_tokens + MAX_ROWS), *map(self._num_slots, running)])
        return num_slots * (len(running) + 1) + num_held <= self._options.max_slots

    def _num_slots(self, job: Job) -> int:
        """Return the most slots that a running job by itself will hold; once it shared a pass it may hold more."""
        return max(job.sequence.region.capacity, self._cache.capacity(_num_tokens(job) + MAX_ROWS))


def _num_tokens(job: Job) -> int:
    """Return the most tokens that a job may have, prompt included."""
    return len(job.sequence.request.prompt_ids) + job.sequence.request.max_new_tokens
