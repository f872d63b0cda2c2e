"""`foretell eval`: compare planned answers with plain decoding, and have them judged."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from foretell.cli.api_key import ApiKeyEnvOption, read_api_key
from foretell.cli.options import MODEL, SAMPLING, DebugOption, EngineOptions, JsonOption, spread

if TYPE_CHECKING:
    from foretell.cli.terminal import Count
    from foretell.llm import LLM
    from foretell.plato.answers import Question
    from foretell.plato.options import PlatoOptions

evaluate = typer.Typer(name="eval", no_args_is_help=True, help="Compare ways to answer: how fast, and how well.")

_WARM_UP: Final = "What should I look at when I choose a bicycle?"
_WARM_UP_TOKENS: Final = 128
_COLUMNS: Final = {
    "arm": ("name", "{}"),
    "tok/s": ("tokens_per_s", "{:.1f}"),
    "speed-up": ("speedup_vs_plain", "{:.2f} ×"),
    "median": ("speedup_vs_plain_median", "{:.2f} ×"),
    "planned": ("speedup_where_planned", "{:.2f} ×"),
    "first": ("time_to_first_answer_token_s", "{:.2f} s"),
    "computed": ("prefill_rows_computed", "{}"),
    "reused": ("prefill_rows_reused", "{}"),
    "direct": ("direct_share", "{:.0%}"),
    "valid": ("plan_valid_share", "{:.0%}"),
    "logprob": ("mean_logprob", "{:.3f}"),
    "overlap": ("paragraph_overlap", "{:.3f}"),
    "tokens": ("answer_tokens", "{}"),
}
"""Columns of the table: where their values are in the document, and how they are shown."""
_LEGEND: Final = (
    "Tok/s: answer tokens ÷ seconds from request to last token, planning included. Speed-up: ratio of totals; median: "
    "of the questions' ratios; planned: over questions answered in parts. First: time to the answer's first token, the "
    "median. Computed, reused: rows of prompts. Overlap: share of trigrams that another paragraph has."
)


@evaluate.command()
@spread
def plato(
    suite: Annotated[str, typer.Option(help="builtin, or a JSON Lines file with `question_id`, `category`, `turns`.")],
    category: Annotated[str | None, typer.Option(help="Keep these categories, with commas between.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Keep this many questions, spread evenly over the categories.")
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Who answers: plain, sot, plato, plato-nopipeline, plato-noreuse, plato-full.")
    ] = "plain,sot,plato",
    out: Annotated[Path | None, typer.Option(help="Keep answers in this file, and go on from it.")] = None,
    as_json: JsonOption = False,
    max_parallel: Annotated[int, typer.Option(help="Parts that are written at once.")] = 8,
    max_parts: Annotated[int, typer.Option(help="Most parts of a plan.")] = 8,
    force_plan: Annotated[bool, typer.Option("--force-plan", help="Plan whatever the question is.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", rich_help_panel=SAMPLING)] = 512,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above, tokens are drawn.", rich_help_panel=SAMPLING)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Key of the noise.", rich_help_panel=SAMPLING)] = 0,
    drafter: Annotated[str, typer.Option(help="Who proposes, in every arm.", rich_help_panel=MODEL)] = "all",
    *,
    options: EngineOptions,
) -> None:
    """Time plain decoding, Skeleton-of-Thought and planned answers, in turn, on the same questions.

    Speeds are compared within each question. With --out, an interrupted run goes on when the command is repeated.
    """
    from foretell.cli.documents import print_document
    from foretell.cli.terminal import note_settings
    from foretell.plato.arms import check_arms
    from foretell.plato.options import PlatoOptions

    names = [name.strip() for name in arms.split(",")] if arms.strip() else []
    check_arms(names)
    settings = PlatoOptions(
        max_answer_tokens=max_new_tokens,
        max_parallel=max_parallel,
        max_parts=max_parts,
        force_plan=force_plan,
        temperature=temperature,
        seed=seed,
        drafter=drafter,
    )
    questions = _questions(suite, limit, category)
    document = _evaluate(questions, names, settings, options.load(drafter), out)
    if options.verbose:
        note_settings(document["provenance"]["eval"])
    if as_json:
        print_document(document)
    else:
        _print_table(document["arms"])


@evaluate.command()
def judge(
    answers: Annotated[Path, typer.Argument(help="File of answers that `eval plato --out` wrote.")],
    base_url: Annotated[str, typer.Option(help="Address of an OpenAI-compatible server, as http://localhost:8000.")],
    model: Annotated[str, typer.Option(help="The judge, as the server names it.")],
    arm: Annotated[str, typer.Option(help="Whose wins are counted.")] = "plato",
    against: Annotated[str, typer.Option(help="The other arm.")] = "plain",
    api_key_env: ApiKeyEnvOption = None,
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds that a failing request is repeated for.")] = 120.0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Have a model judge the answers of two arms, each pair in both orders.

    Verdicts that differ between the orders are ties.
    """
    from foretell.cli.documents import print_document
    from foretell.plato.answers import read_answers
    from foretell.plato.chat_client import ChatClient
    from foretell.plato.judge import judge as run

    records = read_answers(answers)
    client = ChatClient(base_url, model, api_key=read_api_key(api_key_env), patience_s=patience)
    try:
        document = run(records, client.ask, arm=arm, against=against, notify=_noter("judged", 1)).to_json()
    finally:
        client.close()
    document["provenance"]["judge"] = {"model": model, "answers": answers.name}
    if as_json:
        print_document(document)
    else:
        _print_judgement(document)


def _questions(suite: str, limit: int | None, category: str | None) -> list[Question]:
    from foretell.bench.suites import load_suite
    from foretell.plato.answers import Question

    prompts = load_suite(suite, limit=limit, category=category)
    return [Question(question_id=each.prompt_id, category=each.category, text=each.text) for each in prompts]


def _evaluate(
    questions: Sequence[Question], names: Sequence[str], options: PlatoOptions, llm: LLM, out: Path | None
) -> dict[str, Any]:
    from foretell.plato.answers import AnswerFile
    from foretell.plato.arms import PLAIN, make_arms
    from foretell.plato.evaluate import evaluate as run
    from foretell.plato.score import target_score

    settings = {**llm.settings, "fingerprint": llm.fingerprint, **asdict(options)}

    def warm_up() -> None:
        for arm in make_arms(llm, names, replace(options, max_answer_tokens=_WARM_UP_TOKENS)).values():
            arm(_WARM_UP)

    document = run(
        questions,
        make_arms(llm, names, options),
        plain=PLAIN,
        score=target_score(llm),
        file=None if out is None else AnswerFile(out, settings),
        warm_up=warm_up,
        notify=_noter("answered", len(names)),
    ).to_json()
    document["provenance"]["eval"] = settings
    return document


def _noter(done: str, every: int) -> Count:
    """Return what notes progress in lines: a bar that draws itself would be timed too."""
    from foretell.cli.terminal import note

    def note_progress(num_done: int, num_all: int) -> None:
        if num_done % every == 0:
            note(f"foretell: {done} {num_done} of {num_all}")

    return note_progress


def _print_table(arms: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, justify="left" if title == "arm" else "right")
    for arm in arms:
        table.add_row(*("—" if arm[key] is None else shown.format(arm[key]) for key, shown in _COLUMNS.values()))
    # Where nobody reads the width of a terminal, 80 columns would cut what a file or a pipe can hold.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(_LEGEND, style="dim")


def _print_judgement(document: Mapping[str, Any]) -> None:
    for name, wins in (("all", document), ("of similar length", document["similar_length"])):
        rate, interval = wins["net_win_rate"], wins["interval"]
        shown = "—" if rate is None else f"{rate:+.0%} ({interval[0]:+.0%} to {interval[1]:+.0%})"
        typer.echo(
            f"{name}: {wins['wins']} won, {wins['ties']} tied, {wins['losses']} lost by {document['arm']} against "
            f"{document['against']}; net win rate {shown}"
        )
    if (rate := document["net_win_rate_at_equal_length"]) is not None:
        typer.echo(f"at equal length, by a regression: net win rate {rate:+.0%}")
    typer.echo(
        f"{document['num_unparsable']} without a verdict, of these {document['num_refused']} refused; "
        f"{document['num_order_conflicts']} in which the order decided"
    )
