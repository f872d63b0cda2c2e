"""`foretell demo`: one answer, coloured by what proposed each token, and what that was worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Final

import typer

from foretell.cli.options import DecodingOptions, single_answer, spread
from foretell.cli.terminal import ended_line, source_style

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from foretell.llm import LLM
    from foretell.params import SamplingParams
    from foretell.result import Chunk, Completion
    from foretell.text.tokenizer import Message

# Rewriting shares names and phrases with its prompt, as much everyday work does: neither the best case nor the worst.
QUESTION: Final = (
    "Rewrite this text for a ten-year-old child.\n\n"
    "The lighthouse on the northern cape was built in 1871. Its lamp burned oil until 1923, when the keeper's family "
    "brought electricity over the hills. Today nobody lives there: a small computer turns the lamp on at dusk and off "
    "at dawn, and once a month an engineer walks up with a bag of tools. On clear nights, fishermen can still see its "
    "light from forty kilometres away."
)
NUM_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """The same answer, decoded in turn plainly and with drafts, by one engine in one process."""

    plain: Sequence[Completion]
    drafted: Sequence[Completion]

    @property
    def is_identical(self) -> bool:
        """Whether every round of both arms gave the same token ids."""
        expected = self.plain[0].token_ids
        return all(completion.token_ids == expected for completion in [*self.plain, *self.drafted])


@spread
def demo(
    prompt: Annotated[
        str, typer.Argument(help="A question of your own.", show_default="to rewrite a short text")
    ] = QUESTION,
    *,
    options: DecodingOptions,
) -> None:
    """Answer a question, show who proposed each token, and compare with plain decoding in the same run."""
    from rich.console import Console

    from foretell.cli.prompt import read_prompt
    from foretell.cli.terminal import announce, note_settings

    sampling = single_answer(options.sampling(), "demo")
    messages: list[Message] = [{"role": "user", "content": read_prompt(prompt, None, is_raw=False)}]
    llm = options.load(options.drafter)
    if options.verbose:
        note_settings(llm.settings)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{prompt}\n", style="dim")
    answer = _show_answer(console, llm.stream_chat(messages, sampling, drafter=options.drafter))
    announce("decoding the same answer plainly and with drafts, in turn")
    arms = _measure(llm, messages, replace(sampling, seed=answer.seed), options.drafter)
    console.print(_speed_table(arms))
    console.print(_source_table(arms.drafted[0]))
    console.print(f"identical: {'yes' if arms.is_identical else 'no'}")


def _show_answer(console: Console, chunks: Iterable[Chunk]) -> Completion:
    from rich.text import Text

    completion = None
    with ended_line():
        for chunk in chunks:
            console.print(Text(chunk.text, style=source_style(chunk.source)), end="", soft_wrap=True)
            completion = chunk.completion
    assert completion is not None
    console.print("\n")
    if console.color_system is not None and not console.no_color:
        counts = Counter(completion.sources)
        console.print("proposed by: ", *(Text(source, style=source_style(source)) for source in counts), "\n")
    return completion


def _measure(llm: LLM, messages: Sequence[Message], sampling: SamplingParams, drafter: str) -> Arms:
    plain, drafted = [], []
    for _ in range(NUM_ROUNDS):  # in turn, so that a machine that slows down slows both
        plain.append(llm.chat(messages, sampling, drafter="none"))
        drafted.append(llm.chat(messages, sampling, drafter=drafter))
    return Arms(plain=plain, drafted=drafted)


def _speed_table(arms: Arms) -> Table:
    from rich.table import Table

    plain_tokens_per_s = _tokens_per_s(arms.plain)
    table = Table(title=f"decoding, median of {NUM_ROUNDS} rounds", title_justify="left", title_style="default")
    for name in ("", "tokens/s", "speed-up", "tokens per pass", "tokens"):
        table.add_column(name, justify="left" if name == "" else "right")
    for name, completions in (("plain", arms.plain), ("with drafts", arms.drafted)):
        stats = completions[0].stats
        tokens_per_s = _tokens_per_s(completions)
        speed_up = f"{tokens_per_s / plain_tokens_per_s:.2f} ×" if plain_tokens_per_s > 0 else "—"
        tokens_per_pass = f"{stats.tokens_per_pass:.2f}"
        table.add_row(name, f"{tokens_per_s:.1f}", speed_up, tokens_per_pass, str(stats.num_output_tokens))
    return table


def _tokens_per_s(completions: Sequence[Completion]) -> float:
    return median(completion.stats.tokens_per_s for completion in completions)


def _source_table(completion: Completion) -> Table:
    from rich.table import Table
    from rich.text import Text

    drafted, accepted = completion.stats.drafted, completion.stats.accepted
    emitted = Counter(completion.sources)
    table = Table(title="tokens of the answer by what proposed them", title_justify="left", title_style="default")
    for name in ("source", "tokens", "drafted", "accepted", "acceptance rate"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for source in sorted(emitted, key=lambda name: (-emitted[name], name)):
        rate = f"{accepted[source] / drafted[source]:.2f}" if drafted[source] else ""
        counts = [str(drafted[source]), str(accepted[source])] if source in drafted else ["", ""]
        table.add_row(Text(source, style=source_style(source)), str(emitted[source]), *counts, rate)
    return table
