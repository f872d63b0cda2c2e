"""`foretell tune`: measure what a pass costs here, learn what drafts are worth, and say whether they pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from foretell.cli.next_ids import Wish, provide_next_ids
from foretell.cli.options import EngineOptions, JsonOption, spread
from foretell.cli.tune_prompts import (
    AddedBytes,
    LearnedRanks,
    PromptVerdict,
    SizedRun,
    added_bytes,
    draw_sizes,
    learn_ranks,
    sizes_table,
    sweep_sizes,
)
from foretell.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from foretell.cli.terminal import Count
    from foretell.engine.measure import Exactness
    from foretell.hardware.profile import LatencyProfile
    from foretell.llm import LLM
    from foretell.params import SamplingParams
    from foretell.result import Completion, Stats
    from foretell.train.guess_ranks import Text

CONTEXTS: Final = (128, 512, 1024, 2048, 4096, 8192)
MAX_PROMPT_TOKENS: Final = 1024
NUM_NEW_TOKENS: Final = 64
TEST_TOKENS: Final = (384, 640)
"""Where in a text draft rows are compared with plain rows: on both sides of the border of a block of 512 slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What drafting brought on the built-in prompts."""

    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    tokens_per_pass: float
    rows_per_pass: float
    num_different_outputs: int
    without_draft_tokens_per_s: float | None = None
    """Drafted as well, but without the draft model; None where there is none."""
    draft_pass_s: float | None = None
    target_pass_s: float | None = None

    @property
    def speedup(self) -> float:
        """Drafted ÷ plain decode speed."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s > 0 else 1.0

    def sentence(self) -> str:
        """Return the verdict in words."""
        figures = f"{self.speedup:.2f} × plain decoding, with {self.rows_per_pass:.1f} rows a pass on average"
        if self.speedup > 1.0:
            return f"speculation pays here: {figures}"
        return f"speculation does not pay here: {figures}; use --drafter none"

    def draft_sentence(self) -> str | None:
        """Return what the draft model brought, in words; None where there is none."""
        without = self.without_draft_tokens_per_s
        if without is None or self.draft_pass_s is None or self.target_pass_s is None:
            return None
        gain = self.drafted_tokens_per_s / without if without > 0 else 1.0
        prices = (
            f"a pass of it takes {self.draft_pass_s * 1e3:.1f} ms, one of the model {self.target_pass_s * 1e3:.1f} ms"
        )
        if gain > 1.0:
            return f"the draft model pays here: {gain:.2f} × the speed without it; {prices}"
        return f"the draft model does not pay here: {gain:.2f} × the speed without it, {prices}; use --draft none"


@spread
def tune(
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this file (.png, .svg or .pdf).")] = None,
    plot_prompts: Annotated[
        Path | None, typer.Option(help="Draw the speed with prompt tokens against rows into this file.")
    ] = None,
    next_ids: Annotated[
        Wish, typer.Option(help="Build the table of likely next ids: where it is missing, always, or never.")
    ] = "missing",
    as_json: JsonOption = False,
    *,
    options: EngineOptions,
) -> None:
    """Measure T(N), test bit-exactness, calibrate acceptance, and keep it all for this model on this machine.

    The default model takes about three minutes on one thread, two and a quarter once compiled. Ctrl-C in the last
    stage, where prompt tokens get more and more rows, loses nothing that was measured before.
    """
    from foretell.cli.documents import print_document
    from foretell.cli.terminal import counted_between, note_settings
    from foretell.engine.measure import compare_rows, measure_profile
    from foretell.passes.compiled import CompiledPasses
    from foretell.provenance import provenance

    llm = options.load()
    if plot_prompts is not None and llm.prompts is None:
        raise ConfigError("`plot_prompts` draws what prompt tokens bring, this model has none: leave it out")
    if options.verbose:
        note_settings(llm.settings)
    runner = llm.engine.runner
    prompts = _prompts(llm)
    with counted_between("measuring passes") as count:
        profile = measure_profile(runner, llm.profile_key, contexts=CONTEXTS, progress=count)
    with counted_between("comparing draft rows with plain rows") as count:
        text = _test_text(llm, prompts)
        num_prefilled = max(0, len(text) - TEST_TOKENS[1] + TEST_TOKENS[0])
        exactness = compare_rows(runner, text, num_prefilled=num_prefilled, progress=count)
    table = provide_next_ids(llm, next_ids)
    with counted_between("decoding the built-in prompts plainly and with drafts") as count:
        answers = _calibrate(llm, profile, prompts, count)
    learned = None
    if llm.prompts is not None:
        with counted_between("ranking the guesses of prompt tokens") as count:
            learned = learn_ranks(llm, answers.texts, count)
    profile = replace(
        profile,
        is_bit_exact=exactness.is_bit_exact,
        largest_gap=exactness.largest_gap,
        calibration=llm.engine.calibration.to_json(),
        guess_ranks={} if learned is None else learned.kept,
    )
    file = llm.profile_store.save(profile)
    runs, added = [], None
    if learned is not None:
        added = added_bytes(llm)
        runs = _sweep(llm, profile, prompts, learned, answers.plain, file)
        profile = replace(profile, calibration=llm.engine.calibration.to_json())
        file = llm.profile_store.save(profile)
    verdict = answers.verdict
    compiled = runner.compiled
    compiled_bytes = compiled.num_bytes if isinstance(compiled, CompiledPasses) else 0
    if plot is not None:
        _draw(profile, plot)
    if plot_prompts is not None:
        draw_sizes(runs, plot_prompts)
    if as_json:
        print_document(
            {
                "profile": profile.to_json(),
                "exactness": asdict(exactness),
                "verdict": asdict(verdict) | {"speedup": verdict.speedup},
                "prompts": [asdict(run) for run in runs],
                "prompt_verdict": asdict(PromptVerdict.of(runs)) if runs else None,
                "added_bytes": None if added is None else asdict(added),
                "next_ids": asdict(table),
                "compiled_bytes": compiled_bytes,
                "file": str(file),
                "provenance": provenance(),
            }
        )
    else:
        _print_report(profile, exactness, verdict)
        if added is not None:
            _print_sizes(runs, added)
        print(table.sentence())
        if compiled_bytes:
            print(f"compiled passes take {compiled_bytes / 1e6:.0f} MB on disk, and about as much more memory")
        print(f"kept in {file}")


def _prompts(llm: LLM) -> list[list[int]]:
    """Return the built-in suite's prompts, those that leave room for an answer."""
    from foretell.bench.engine import encode_prompt
    from foretell.bench.suites import load_suite

    room = min(MAX_PROMPT_TOKENS, llm.engine.runner.context_tokens - NUM_NEW_TOKENS)
    prompts = [encode_prompt(llm, prompt) for prompt in load_suite("builtin")]
    return [prompt for prompt in prompts if len(prompt) <= room] or [prompts[0][: max(1, room)]]


def _test_text(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[int]:
    text = [token_id for prompt in prompts for token_id in prompt]
    return text[: min(TEST_TOKENS[1], llm.engine.runner.context_tokens)]


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of decoding the built-in prompts."""

    verdict: Verdict
    texts: list[Text]
    """What the target said."""
    plain: list[Stats]
    """What saying it plainly took."""


def _calibrate(llm: LLM, profile: LatencyProfile, prompts: Sequence[list[int]], count: Count) -> Answers:
    """Decode each prompt with and without drafts under the measured profile; the engine learns as it goes."""
    from foretell.drafters.calibration import Calibration
    from foretell.engine.engine import Engine
    from foretell.params import SamplingParams
    from foretell.train.guess_ranks import Text

    calibration = Calibration()
    llm.engine = Engine(llm.engine.runner, profile, calibration, llm.engine.commit_policy, llm.engine.prompting)
    if llm.draft is not None:
        llm.draft.engine.calibration = calibration
    sampling = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    plain, drafted, undrafted, texts, num_different = [], [], [], [], 0
    for done, prompt in enumerate(prompts, 1):
        (expected,) = llm.generate(prompt, sampling, drafter="none")
        (completion,) = llm.generate(prompt, sampling, drafter="all")
        plain.append(expected.stats)
        drafted.append(completion.stats)
        texts.append(Text([*prompt, *expected.token_ids], len(prompt)))
        num_different += completion.token_ids != expected.token_ids
        if llm.draft is not None:
            undrafted.append(_without_draft(llm, prompt, sampling).stats)
        count(done, len(prompts))
    num_passes = sum(stats.num_passes for stats in drafted)
    verdict = Verdict(
        plain_tokens_per_s=_tokens_per_s(plain),
        drafted_tokens_per_s=_tokens_per_s(drafted),
        tokens_per_pass=sum(stats.num_output_tokens for stats in drafted) / num_passes,
        rows_per_pass=sum(stats.num_rows for stats in drafted) / num_passes,
        num_different_outputs=num_different,
        without_draft_tokens_per_s=_tokens_per_s(undrafted) if undrafted else None,
        draft_pass_s=None if llm.draft is None else llm.draft.engine.pass_s(1),
        target_pass_s=None if llm.draft is None else profile.seconds(1, CONTEXTS[0]),
    )
    return Answers(verdict, texts, plain)


def _without_draft(llm: LLM, prompt: list[int], sampling: SamplingParams) -> Completion:
    draft, llm.draft = llm.draft, None
    try:
        return llm.generate(prompt, sampling, drafter="all")[0]
    finally:
        llm.draft = draft


def _sweep(
    llm: LLM,
    profile: LatencyProfile,
    prompts: Sequence[list[int]],
    learned: LearnedRanks,
    plain: Sequence[Stats],
    file: Path,
) -> list[SizedRun]:
    """Sweep limits of rows; who interrupts that is told where the profile is."""
    from foretell.cli.terminal import counted_between, note
    from foretell.params import SamplingParams

    sampling = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    try:
        with counted_between("decoding them with prompt tokens under limits of rows") as count:
            return sweep_sizes(llm, profile, prompts, sampling, learned.by_text, plain, count)
    except KeyboardInterrupt:
        note(f"foretell: interrupted; what was measured before is kept in {file}")
        raise


def _tokens_per_s(all_stats: Sequence[Stats]) -> float:
    decode_s = sum(stats.decode_s for stats in all_stats)
    num_tokens = sum(stats.num_output_tokens - stats.num_first_tokens for stats in all_stats)
    return num_tokens / decode_s if decode_s > 0 else 0.0


def _print_report(profile: LatencyProfile, exactness: Exactness, verdict: Verdict) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(_curve_table(profile))
    if exactness.is_bit_exact:
        console.print(f"draft rows against plain rows: bit-exact ({exactness.num_rows} rows)")
    else:
        console.print(
            f"draft rows against plain rows: {exactness.num_different_rows} of {exactness.num_rows} differ, "
            f"largest logit gap {exactness.largest_gap:.3g}"
        )
    console.print(f"outputs that differ from plain decoding: {verdict.num_different_outputs}")
    console.print(f"{verdict.sentence()} ({verdict.tokens_per_pass:.2f} tokens per pass on the built-in prompts)")
    if (sentence := verdict.draft_sentence()) is not None:
        console.print(sentence)


def _print_sizes(runs: Sequence[SizedRun], added: AddedBytes) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False).print(sizes_table(runs))
    print(PromptVerdict.of(runs).sentence())
    print(added.sentence())


def _curve_table(profile: LatencyProfile) -> Table:
    from rich.table import Table

    table = Table(title="milliseconds of a pass", title_justify="left", title_style="default")
    table.add_column("rows", justify="right")
    for context in profile.contexts:
        table.add_column(f"{context} tokens", justify="right")
    for column, num_rows in enumerate(profile.num_rows):
        table.add_row(str(num_rows), *(f"{row[column] * 1e3:.1f}" for row in profile.pass_s))
    return table


def _draw(profile: LatencyProfile, plot: Path) -> None:
    try:
        from foretell.bench.plots import latency_figure

        curves = {
            context: list(zip(profile.num_rows, row, strict=True))
            for context, row in zip(profile.contexts, profile.pass_s, strict=True)
        }
        latency_figure(curves).savefig(plot)
    except ImportError:
        raise ConfigError("`plot` needs matplotlib, which is not installed: pip install matplotlib") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw to {str(plot)!r}: {error}; name another .png, .svg or .pdf file") from None
