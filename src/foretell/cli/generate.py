"""`foretell generate`: answer a prompt, or continue a text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli.options import AnswerOptions, JsonOption, ShowSourcesOption, spread

if TYPE_CHECKING:
    from foretell.cli.terminal import Paint
    from foretell.llm import LLM
    from foretell.params import SamplingParams
    from foretell.result import Chunk, Completion


@spread
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a UTF-8 file.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    show_sources: ShowSourcesOption = False,
    as_json: JsonOption = False,
    *,
    options: AnswerOptions,
) -> None:
    """Answer a prompt, or continue a text with --raw. Greedy unless a temperature is given."""
    from foretell.cli.documents import completion_document, print_document
    from foretell.cli.prompt import read_prompt
    from foretell.cli.terminal import note_settings, note_sources, note_stats, painter, unpainted
    from foretell.provenance import provenance

    sampling = options.sampling()  # before the model: a wrong value is reported at once
    text = read_prompt(prompt, file, is_raw=raw)
    llm = options.load(options.drafter)
    if options.verbose:
        note_settings({**llm.settings, **_shown(sampling)})
    if as_json:
        completions = _complete(llm, text, sampling, is_raw=raw)
        print_document(
            {
                "completions": [completion_document(completion) for completion in completions],
                "settings": dict(llm.settings),
                "provenance": provenance(),
            }
        )
    elif sampling.n > 1:
        completions = _complete(llm, text, sampling, is_raw=raw)
        for number, completion in enumerate(completions, start=1):
            print(f"--- {number} of {sampling.n} ---\n{completion.text}", flush=True)
    else:
        paint = painter(sys.stdout) if show_sources else unpainted
        completions = [_print_stream(_stream(llm, text, sampling, is_raw=raw), paint)]
    for completion in completions:
        if show_sources:
            note_sources(completion.sources)
        if options.verbose:
            note_stats(completion.stats)


def _complete(llm: LLM, text: str, sampling: SamplingParams, *, is_raw: bool) -> list[Completion]:
    return llm.generate(text if is_raw else llm.tokenizer.encode_chat(_question(text)), sampling)


def _stream(llm: LLM, text: str, sampling: SamplingParams, *, is_raw: bool) -> Iterator[Chunk]:
    return llm.stream(text, sampling) if is_raw else llm.stream_chat(_question(text), sampling)


def _question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _print_stream(chunks: Iterator[Chunk], paint: Paint) -> Completion:
    from foretell.cli.terminal import ended_line

    completion = None
    with ended_line():
        for chunk in chunks:
            print(paint(chunk.text, chunk.source), end="", flush=True)
            completion = chunk.completion
    print(flush=True)
    assert completion is not None
    return completion


def _shown(sampling: SamplingParams) -> dict[str, object]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "seed", "n")
    constraint = [name for name in ("json_schema", "regex") if getattr(sampling, name) is not None]
    return {name: getattr(sampling, name) for name in (*names, "verification", *constraint)}
