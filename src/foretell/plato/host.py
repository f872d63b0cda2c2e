"""What planned answers need of the engine that writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from foretell.cache.kv_cache import Region
    from foretell.engine.engine import Engine
    from foretell.engine.prefixes import PrefixCache
    from foretell.job import Job
    from foretell.params import SamplingParams
    from foretell.text.tokenizer import Tokenizer


class Host(Protocol):
    """What runs the sequences; `foretell.LLM` does."""

    tokenizer: Tokenizer
    engine: Engine

    @property
    def prefixes(self) -> PrefixCache:
        """Keys and values of prompt beginnings that answers share."""

    def start(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        drafter: str | None = None,
        sample: int = 0,
        reuse: Region | None = None,
        is_eager: bool = False,
        priority: int = 0,
    ) -> Job:
        """Prefill a prompt."""

    def step(self, jobs: Sequence[Job], *, max_rows: int | None = None) -> list[Job]:
        """Run one step of all these jobs, of at most so many rows."""

    def finish(self, job: Job) -> None:
        """Give back a job's slots."""
