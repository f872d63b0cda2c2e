"""Arms: what is compared. Every arm runs the same prompts; foretell's own share one set of weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from foretell.bench.measurement import Measurement
from foretell.hardware.profile import LatencyProfile
from foretell.params import SamplingParams
from foretell.result import Completion

Clock = Callable[[], float]
"""Seconds since some fixed moment."""

PLAIN: Final = "none"
"""The drafter whose speed and output everything is compared with."""
PLAIN_AGAIN: Final = "none (again)"
"""Key of the second plain arm: its ratio to the first is the noise. It gets no rows of its own."""


class BenchTokenizer(Protocol):
    """What the benchmark needs of a tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model answers conversations."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins."""


class BenchLLM(Protocol):
    """What the benchmark needs of `foretell.LLM`: the drafter is chosen per request."""

    @property
    def tokenizer(self) -> BenchTokenizer:
        """Turns prompts into ids."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The effective settings: `dtype`, `device` and `threads` among them."""

    @property
    def profile(self) -> LatencyProfile | None:
        """The measured T(N)."""

    def generate(
        self, prompts: list[int], sampling: SamplingParams | None = None, *, drafter: str | None = None
    ) -> list[Completion]:
        """Complete one tokenised prompt."""


class Arm(Protocol):
    """One way to complete a prompt."""

    @property
    def key(self) -> str:
        """Unique within a run; the result's name, but for `PLAIN_AGAIN`."""

    def measure(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Measurement:
        """Complete the prompt and time it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForetellArm:
    """foretell with one drafter."""

    key: str
    drafter: str
    llm: BenchLLM
    clock: Clock = time.perf_counter

    def measure(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Measurement:
        """Complete the prompt; the inner times are the engine's, the wall time is taken here."""
        started_s = self.clock()
        (completion,) = self.llm.generate(list(prompt_ids), sampling, drafter=self.drafter)
        wall_s = self.clock() - started_s
        stats = completion.stats
        return Measurement(
            token_ids=tuple(completion.token_ids),
            wall_s=wall_s,
            ttft_s=stats.first_token_s,
            decode_s=stats.decode_s,
            num_first_tokens=stats.num_first_tokens,
            prefill_s=stats.prefill_s,
            num_passes=stats.num_passes,
            num_rows=stats.num_rows,
            forward_s=stats.forward_s,
            draft_s=stats.draft_s,
            tokens_per_pass_counts=dict(stats.tokens_per_pass_counts),
            drafted=dict(stats.drafted),
            accepted=dict(stats.accepted),
            drafter_memory_bytes=stats.drafter_memory_bytes,
            num_draft_passes=stats.num_draft_passes,
            num_confirmed=stats.num_confirmed,
            target_bytes=stats.target_bytes,
            draft_bytes=stats.draft_bytes,
        )


def with_second_plain(arms: Sequence[Arm], llm: BenchLLM, *, clock: Clock = time.perf_counter) -> list[Arm]:
    """Return the arms, `none` first, with the second `none` half-way down the list.

    Half-way, so that its distance from the first in time is that of a typical pair of arms: next to it, the noise
    would be measured too small.
    """
    assert arms[0].key == PLAIN
    middle = len(arms) // 2 + 1
    again = ForetellArm(key=PLAIN_AGAIN, drafter=PLAIN, llm=llm, clock=clock)
    return [*arms[:middle], again, *arms[middle:]]
