"""A language model that takes exactly as long as it is told to, on a clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.hardware.profile import LatencyProfile
from foretell.params import SamplingParams
from foretell.result import Completion, DraftWork, Stats, TokenLogprobs

TTFT_S, PREFILL_S, PASS_S, DRAFT_PASS_S = 0.5, 0.4, 0.02, 0.005
PASS_BYTES = 1000


@dataclass
class FakeLLM:
    """Answers with the prompt's ids plus 1, 2, …; a drafter with k tokens per pass needs 1/k of the passes.

    Args:
        tokens_per_pass: by drafter.
        changes: (drafter, first prompt id) → (index, token id): where an output differs from plain's.
        factors: one per call, by which its decode time is multiplied; 1 after the last.
    """

    tokens_per_pass: Mapping[str, int] = field(default_factory=lambda: {"none": 1, "lookup": 2, "all": 4})
    changes: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    factors: Sequence[float] = ()
    work: Mapping[str, DraftWork] = field(default_factory=dict)
    """By drafter what a request counts of its draft model; each of its passes takes `DRAFT_PASS_S`."""
    has_chat_template: bool = True
    profile: LatencyProfile | None = None
    draft: str = "none"
    now_s: float = 0.0
    calls: list[tuple[str, tuple[int, ...], SamplingParams]] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        return {"dtype": "float32", "device": "cpu", "threads": 2, "draft": self.draft}

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(
            has_chat_template=self.has_chat_template,
            encode=lambda text: [len(text)],
            encode_chat=lambda messages: [1000 + len(messages[0]["content"]), 7],
        )

    def clock(self) -> float:
        return self.now_s

    def generate(
        self, prompts: list[int], sampling: SamplingParams | None = None, *, drafter: str | None = None
    ) -> list[Completion]:
        assert sampling is not None
        assert drafter is not None
        factor = self.factors[len(self.calls)] if len(self.calls) < len(self.factors) else 1.0
        self.calls.append((drafter, tuple(prompts), sampling))
        token_ids = [prompts[0] + nth for nth in range(1, sampling.max_new_tokens + 1)]
        index, token_id = self.changes.get((drafter, prompts[0]), (0, token_ids[0]))
        if index < len(token_ids):
            token_ids[index] = token_id
        stats = self._stats(len(token_ids), self.tokens_per_pass[drafter], drafter, factor)
        self.now_s += stats.first_token_s + stats.decode_s + 0.1  # 0.1 s that no inner counter sees
        return [
            Completion(
                text="",
                token_ids=token_ids,
                finish_reason="length",
                sources=["target"] * len(token_ids),
                stats=stats,
                logprobs=_logprobs(token_ids) if sampling.logprobs else None,
            )
        ]

    def _stats(self, num_tokens: int, per_pass: int, drafter: str, factor: float) -> Stats:
        num_full, rest = divmod(num_tokens - 1, per_pass)
        counts = Counter({per_pass: num_full}) + Counter({rest: 1} if rest else {})
        num_passes = counts.total()
        work = self.work.get(drafter, DraftWork())
        stats = Stats(
            num_output_tokens=num_tokens,
            num_passes=num_passes,
            num_rows=2 * num_passes * per_pass,
            drafted=Counter({drafter: 2 * num_passes * (per_pass - 1)}) if per_pass > 1 else Counter(),
            accepted=Counter({drafter: num_tokens - 1 - num_passes}) if per_pass > 1 else Counter(),
            tokens_per_pass_counts=counts,
            prefill_s=PREFILL_S,
            first_token_s=TTFT_S,
            decode_s=num_passes * PASS_S * factor + work.num_passes * DRAFT_PASS_S,
            forward_s=num_passes * PASS_S * factor * 0.75,
            draft_s=work.num_passes * DRAFT_PASS_S,
            target_bytes=num_passes * PASS_BYTES,
        )
        stats.take_draft_work(work)
        return stats


def _logprobs(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """Return logits whose two best are 0.25 apart at the first token, 0.5 at the second, and so on."""
    return [
        TokenLogprobs(token_id, -0.1, ((token_id, -0.1), (0, -0.1 - 0.25 * (index + 1))))
        for index, token_id in enumerate(token_ids)
    ]


@pytest.fixture
def fake_llm() -> Callable[..., FakeLLM]:
    return FakeLLM


@pytest.fixture
def profile() -> LatencyProfile:
    return LatencyProfile(
        key={"model": "fake"},
        contexts=(256, 1024),
        num_rows=(1, 2, 4, 8, 16, 32),
        pass_s=((0.0125, 0.013, 0.0135, 0.0164, 0.0197, 0.0295), (0.015, 0.016, 0.017, 0.02, 0.025, 0.037)),
    )
