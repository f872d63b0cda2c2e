"""What `foretell tune` finds out about prompt tokens: how many rows they should take here, predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from foretell.cli.terminal import Count
    from foretell.engine.prompting import Prompting
    from foretell.hardware.profile import LatencyProfile
    from foretell.hardware.prompt_policy import PromptPolicy
    from foretell.llm import LLM
    from foretell.params import SamplingParams
    from foretell.result import Stats
    from foretell.train.guess_ranks import Text

_PRIOR_PLACES: Final = 200

_LEAST_GAIN: Final = 1.005
"""Limits that promise less than this times the speed of a smaller one buy the same, or what no sweep tells apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedBytes:
    """What drafting holds in memory besides the target."""

    prompt_parameter_bytes: int
    """Prompt tokens, their sampler and their prefix."""
    prompt_kv_bytes: int
    """Slots of prompt rows and prefix in the largest pass."""
    draft_bytes: int
    """The draft model's weights and its keys and values so far; 0 without one."""
    target_bytes: int

    def sentence(self) -> str:
        """Return it in words."""
        added = self.prompt_parameter_bytes + self.prompt_kv_bytes
        words = (
            f"prompt tokens add {self.prompt_parameter_bytes / 1e6:.2f} MB of parameters and "
            f"{self.prompt_kv_bytes / 1e6:.2f} MB of keys and values, {added / self.target_bytes:.2%} of the model's "
            f"{self.target_bytes / 1e6:.0f} MB"
        )
        return words + (f"; the draft model {self.draft_bytes / 1e6:.1f} MB" if self.draft_bytes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRun:
    """Decoding with prompt tokens where a pass may have so many rows; plain decoding where it may have one."""

    max_rows: int
    predicted_tokens_per_pass: float
    """By the policy's trees, from how good guesses are on the same texts."""
    predicted_tokens_per_s: float
    """The same, by measured T(N) and the host time that drafting took."""
    tokens_per_pass: float
    tokens_per_s: float
    rows_per_pass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptVerdict:
    """What prompt tokens alone bring, in the rows that the policy buys."""

    speedup: float
    """Measured, ÷ plain decoding."""
    predicted_speedup: float
    predicted_pass_ratio: float
    """Seconds of a step ÷ a plain one's, by T(N): those passes took turns, plain and drafted answers did not."""
    tokens_per_pass: float
    rows_per_pass: float

    @classmethod
    def of(cls, runs: Sequence[SizedRun]) -> PromptVerdict:
        """Return the verdict on a sweep: its last limit against its first, plain decoding."""
        plain, best = runs[0], runs[-1]
        predicted_speedup = best.predicted_tokens_per_s / plain.predicted_tokens_per_s
        return cls(
            speedup=best.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s > 0 else 1.0,
            predicted_speedup=predicted_speedup,
            predicted_pass_ratio=best.predicted_tokens_per_pass / predicted_speedup,
            tokens_per_pass=best.tokens_per_pass,
            rows_per_pass=best.rows_per_pass,
        )

    def sentence(self) -> str:
        """Return the verdict in words."""
        if self.rows_per_pass == 1.0:
            return "prompt tokens do not pay here: their rows are predicted to cost more than they bring; none are used"
        figures = (
            f"alone {self.speedup:.2f} × plain decoding ({self.predicted_speedup:.2f} × predicted), "
            f"{self.tokens_per_pass:.2f} tokens from passes of {self.rows_per_pass:.1f} rows on average, which by T(N) "
            f"take {self.predicted_pass_ratio:.2f} × as long as plain ones"
        )
        if self.speedup > 1.0:
            return f"prompt tokens pay here: {figures}"
        return f"prompt tokens do not pay here: {figures}; use --prompts none"


def sweep_sizes(
    llm: LLM,
    profile: LatencyProfile,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    by_text: Sequence[NDArray[np.int64]],
    plain: Sequence[Stats],
    count: Count,
) -> list[SizedRun]:
    """Decode prompts with prompt tokens under limits of rows; limits take turns.

    Limits that buy what a smaller one does are left out: equal purchases have equal speed. Every fourth prompt is
    decoded once before, to teach the acceptance estimates, which all limits share.

    Args:
        llm: its engine knows how good guesses are here, see `learn_ranks`.
        profile: measured T(N).
        prompts: what to answer.
        sampling: how.
        by_text: ranks of what the target said to these prompts.
        plain: what plain decoding of them took, the first of the runs that are returned.
        count: told the answers done, and all of them.
    """
    from foretell.engine.engine import Engine

    before = llm.engine
    prompting = before.prompting
    assert prompting is not None
    context = sum(map(len, prompts)) // len(prompts) + sampling.max_new_tokens // 2
    limits = _limits(profile, prompting, context)
    engines = [
        Engine(before.runner, limited, before.calibration, before.commit_policy, prompting) for limited in limits[1:]
    ]
    taken: list[list[Stats]] = [list(plain), *([] for _ in engines)]
    turns: list[tuple[Engine, list[Stats], list[int]]] = []
    if engines:
        turns = [(before, [], prompt) for prompt in prompts[::4]]  # counted nowhere
    turns += [(engine, stats, prompt) for prompt in prompts for engine, stats in zip(engines, taken[1:], strict=True)]
    try:
        for done, (engine, stats, prompt) in enumerate(turns, 1):
            llm.engine = engine
            stats.append(llm.generate(prompt, sampling, drafter="prompts")[0].stats)
            count(done, len(turns))
    finally:
        llm.engine = before
    runs = []
    for limited, stats in zip(limits, taken, strict=True):
        curve = limited.curve(context)
        policy = prompting.policy(curve)
        runs.append(_sized_run(limited.max_rows, policy, policy.replay(prompting.ranks, by_text), curve, stats))
    return runs


@dataclass(frozen=True, slots=True)
class LearnedRanks:
    """How good guesses are on what the target said here."""

    by_text: list[NDArray[np.int64]]
    """For every place the ranks of what followed, [A, m]."""
    kept: dict[str, Any]
    """What the profile keeps."""


def learn_ranks(llm: LLM, texts: Sequence[Text], count: Count) -> LearnedRanks:
    """Rank what the target said among the guesses, and let the engine decide by it.

    What held-out text said after training counts as much as `_PRIOR_PLACES` of these places. `count` is told the texts
    done, and all of them.
    """
    from foretell.engine.engine import Engine
    from foretell.engine.prompting import Prompting, known_ranks
    from foretell.train.guess_ranks import count_ranks, rank_texts

    prompting, model = llm.engine.prompting, llm.engine.runner.model
    assert prompting is not None
    tokens = prompting.tokens
    before = tokens.ranks.counts
    prior = before * (_PRIOR_PLACES / max(1, int(before.sum())))
    by_text = []
    for done, text in enumerate(texts, 1):
        by_text += rank_texts(tokens, model, [text])
        count(done, len(texts))
    counts = count_ranks(by_text, tokens.num_slots) + prior.round().astype(int)
    kept = {"digest": tokens.digest, "counts": counts.tolist()}
    ranks = known_ranks(kept, tokens)
    engine = llm.engine
    llm.engine = Engine(
        engine.runner,
        engine.profile,
        engine.calibration,
        engine.commit_policy,
        Prompting(tokens, model.config.vocab_size, ranks),
    )
    return LearnedRanks(by_text, kept)


def added_bytes(llm: LLM) -> AddedBytes:
    """Return what prompt tokens and the draft model hold."""
    assert llm.engine.prompting is not None
    tokens, runner = llm.engine.prompting.tokens, llm.engine.runner
    policy = llm.engine.prompting.policy(llm.engine.drafting.curve(0))
    num_rows = max(purchase.num_rows - len(purchase.num_prompts) for purchase in policy.purchases)
    return AddedBytes(
        prompt_parameter_bytes=tokens.num_bytes,
        prompt_kv_bytes=(num_rows + tokens.num_prefix) * runner.cache.shape.slot_bytes,
        draft_bytes=0 if llm.draft is None else llm.draft.engine.num_bytes,
        target_bytes=runner.weight_bytes,
    )


def sizes_table(runs: Sequence[SizedRun]) -> Table:
    """Return the sweep as a table."""
    from rich.table import Table

    table = Table(title="prompt tokens, by rows of a pass", title_justify="left", title_style="default")
    for heading in (
        "at most",
        "on average",
        "tokens per pass",
        "predicted tokens per pass",
        "tokens/s",
        "predicted tokens/s",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            str(run.max_rows),
            f"{run.rows_per_pass:.1f}",
            f"{run.tokens_per_pass:.2f}",
            f"{run.predicted_tokens_per_pass:.2f}",
            f"{run.tokens_per_s:.1f}",
            f"{run.predicted_tokens_per_s:.1f}",
        )
    return table


def draw_sizes(runs: Sequence[SizedRun], file: Path) -> None:
    """Draw predicted and measured speed against the rows of a pass.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    from foretell.errors import ConfigError

    try:
        from foretell.bench.plots import sizes_figure

        sizes_figure(
            [(run.max_rows, run.tokens_per_s) for run in runs],
            [(run.max_rows, run.predicted_tokens_per_s) for run in runs],
        ).savefig(file)
    except ImportError:
        raise ConfigError("`--plot-prompts` needs matplotlib, which is not installed: pip install matplotlib") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw to {str(file)!r}: {error}; name another .png, .svg or .pdf file") from None


def _limits(profile: LatencyProfile, prompting: Prompting, context: int) -> list[LatencyProfile]:
    """Return the profile limited to one row, which is plain decoding, and to more wherever that promises more."""
    limits: list[LatencyProfile] = []
    promised_tokens_per_s = 0.0
    for num_sizes in range(1, len(profile.num_rows) + 1):
        limited = _limited(profile, num_sizes)
        tokens_per_s = prompting.policy(limited.curve(context)).worth.tokens_per_s
        if tokens_per_s > promised_tokens_per_s * _LEAST_GAIN:
            limits.append(limited)
            promised_tokens_per_s = tokens_per_s
    return limits


def _limited(profile: LatencyProfile, num_sizes: int) -> LatencyProfile:
    """Return a profile that knows the first row counts only, so that no pass has more rows."""
    return replace(
        profile, num_rows=profile.num_rows[:num_sizes], pass_s=tuple(row[:num_sizes] for row in profile.pass_s)
    )


def _sized_run(
    max_rows: int, policy: PromptPolicy, tokens_per_pass: float, curve: Sequence[float], stats: Sequence[Stats]
) -> SizedRun:
    num_passes = sum(each.num_passes for each in stats)
    num_tokens = sum(each.num_output_tokens - each.num_first_tokens for each in stats)
    decode_s = sum(each.decode_s for each in stats)
    draft_s = sum(each.draft_s for each in stats) / num_passes
    pass_s = sum(
        share * curve[purchase.num_rows - 1] for share, purchase in zip(policy.visits, policy.purchases, strict=True)
    )
    return SizedRun(
        max_rows=max_rows,
        predicted_tokens_per_pass=tokens_per_pass,
        predicted_tokens_per_s=tokens_per_pass / (pass_s + draft_s),
        tokens_per_pass=sum(each.num_output_tokens for each in stats) / num_passes,
        tokens_per_s=num_tokens / decode_s if decode_s > 0 else 0.0,
        rows_per_pass=sum(each.num_rows for each in stats) / num_passes,
    )
