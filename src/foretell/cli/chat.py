"""`foretell chat`: a conversation."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foretell.cli.options import AnswerOptions, ShowSourcesOption, single_answer, spread

if TYPE_CHECKING:
    from foretell.cli.terminal import Paint
    from foretell.result import Chunk, Completion
    from foretell.text.tokenizer import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was said; without a completion when it was interrupted."""

    text: str
    completion: Completion | None


@spread
def chat(
    system: Annotated[str | None, typer.Option(help="Instructions that precede the conversation.")] = None,
    show_sources: ShowSourcesOption = False,
    *,
    options: AnswerOptions,
) -> None:
    """Talk with the model. Ctrl-C ends an answer, Ctrl-D the conversation.

    Sampling follows the model's generation_config.json where an option does not say otherwise.
    """
    from foretell.cli.terminal import note, note_settings, note_sources, note_stats, painter, unpainted

    options.constraint()  # before the model: a wrong one is reported at once
    llm = options.load(options.drafter)
    sampling = single_answer(options.sampling(llm.generation_defaults), "chat")
    if options.verbose:
        note_settings(llm.settings)
    paint = painter(sys.stdout) if show_sources else unpainted
    conversation = llm.conversation()
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for question in _questions():
        messages.append({"role": "user", "content": question})
        answer = _answer(conversation.stream(messages, sampling), paint)
        messages.append({"role": "assistant", "content": answer.text})
        if answer.completion is None:
            note("(stopped)")
            continue
        if show_sources:
            note_sources(answer.completion.sources)
        if options.verbose:
            note_stats(answer.completion.stats)
        if answer.completion.finish_reason == "context":
            note("foretell: the context is full, the answer was cut: start a new chat, or raise --context-tokens")
            return


def _questions() -> Iterator[str]:
    """Yield one question a line until the input ends; empty lines are passed over."""
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if is_interactive:
        import readline  # noqa: F401  # gives input() line editing and a history
    while True:
        try:
            question = input("> ") if is_interactive else _read_line()
        except EOFError:
            return
        if question.strip():
            yield question


def _read_line() -> str:
    from foretell.errors import InputError

    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 text (byte 0x{line[error.start]:02x}): convert it first") from error


def _answer(stream: Iterator[Chunk], paint: Paint) -> Answer:
    """Stream one answer to stdout; Ctrl-C ends it and keeps what was said so far."""
    text = ""
    completion = None
    # A stream is a generator: closing it ends its request and keeps what was computed for the next turn.
    generator = cast("Generator[Chunk, None, None]", stream)
    with _interruption() as is_interrupted, closing(generator) as chunks:
        for chunk in chunks:
            print(paint(chunk.text, chunk.source), end="", flush=True)
            text += chunk.text
            completion = chunk.completion
            if is_interrupted():
                break
    print(flush=True)
    return Answer(text=text, completion=completion)


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that a pass is never cut in the middle; the second one is Ctrl-C again."""
    event = Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield event.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
