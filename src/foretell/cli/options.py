"""Options that several commands share, declared once.

`DecodingOptions` is a dataclass whose fields are the command-line options. A command takes it as one parameter named
`options`; `spread` gives typer the fields in its place. So no command lists twenty parameters, and none forgets one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from foretell.llm import LLM
    from foretell.params import SamplingParams

MODEL = "Model"
SAMPLING = "Sampling"
CONSTRAINT = "Constraint"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line of stdout.")]

ShowSourcesOption = Annotated[
    bool, typer.Option("--show-sources", help="Colour tokens by who proposed them, and count them on stderr.")
]


@dataclass(slots=True)
class Invocation:
    """What the outermost handler must know about the command that ran; typer carries it as the context's object."""

    is_debug: bool = False


def _note_debug(context: typer.Context, value: bool) -> bool:
    if value:
        context.find_object(Invocation).is_debug = True  # type: ignore[union-attr]  # main puts it there
    return value


DebugOption = Annotated[
    bool, typer.Option("--debug", help="Print the traceback of an error.", callback=_note_debug, expose_value=True)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model to load, and how to run it."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face id, folder or .gguf file.", show_default="SmolLM2-135M-Instruct", rich_help_panel=MODEL
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option(help="Precision; auto takes bfloat16 where it is fast.", rich_help_panel=MODEL),
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda.", rich_help_panel=MODEL)] = "auto"
    threads: Annotated[
        int | None, typer.Option(help="Threads of a pass.", show_default="torch's own choice", rich_help_panel=MODEL)
    ] = None
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile passes; needs a C++ compiler.", rich_help_panel=MODEL)
    ] = False
    context_tokens: Annotated[
        int | None,
        typer.Option(help="Longest sequence, in tokens.", show_default="the model's own", rich_help_panel=MODEL),
    ] = None
    corpus: Annotated[
        Path | None, typer.Option(help="Text file that the suffix drafter may quote.", rich_help_panel=MODEL)
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model: folder, Hugging Face id, or none.",
            show_default="the target's own, if it has one",
            rich_help_panel=MODEL,
        ),
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompt tokens: folder, or none.",
            show_default="the target's own, if it has some",
            rich_help_panel=MODEL,
        ),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the effective settings to stderr.")] = False
    debug: DebugOption = False

    def load(self, drafter: str = "all") -> LLM:
        """Load the model."""
        from foretell.cli.terminal import progress
        from foretell.llm import LLM

        with progress("loading the model") as notify:
            return LLM(
                self.model,
                dtype=self.dtype,
                device=self.device,
                threads=self.threads,
                compile=self.compile,
                drafter=drafter,
                context_tokens=self.context_tokens,
                corpus=self.corpus,
                draft=self.draft,
                prompts=self.prompts,
                notify=notify,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(EngineOptions):
    """Engine options, and how to choose tokens. None means "not given": a default of the command's applies."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Stop after this many tokens.", show_default="256; 128 in bench", rich_help_panel=SAMPLING),
    ] = None
    min_new_tokens: Annotated[
        int | None, typer.Option(help="No end of text before this many tokens.", rich_help_panel=SAMPLING)
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; above, tokens are drawn.", rich_help_panel=SAMPLING)
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=SAMPLING)] = None
    top_p: Annotated[
        float | None, typer.Option(help="Keep the smallest set of this probability.", rich_help_panel=SAMPLING)
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens at least this fraction as likely as the likeliest.", rich_help_panel=SAMPLING),
    ] = None
    typical_p: Annotated[
        float | None, typer.Option(help="Keep the most typical tokens up to this.", rich_help_panel=SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divide the scores of tokens seen before; 1 is off.", rich_help_panel=SAMPLING)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtract from logits of tokens in the output.", rich_help_panel=SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, times the token's count.", rich_help_panel=SAMPLING)
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, typer.Option(help="Forbid n-grams of this size from repeating.", rich_help_panel=SAMPLING)
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Key of the noise.", show_default="drawn at random", rich_help_panel=SAMPLING)
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="End the output at this string; repeatable.", rich_help_panel=SAMPLING)
    ] = None
    n: Annotated[int | None, typer.Option(help="Independent samples.", rich_help_panel=SAMPLING)] = None
    verification: Annotated[
        Literal["match", "rejection", "traversal", "typical"] | None,
        typer.Option(
            help="Which rule accepts drafts; see docs/drafters.md.", show_default="match", rich_help_panel=SAMPLING
        ),
    ] = None
    allow_lossy: Annotated[
        bool | None,
        typer.Option(
            "--allow-lossy",
            help="Allow a rule that changes what the model says; chooses none.",
            rich_help_panel=SAMPLING,
        ),
    ] = None

    def sampling(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return the sampling parameters: those given, over a command's `defaults`.

        Raises:
            ConfigError: a value is out of range, or two contradict each other.
        """
        from foretell.params import SamplingParams

        names = {field.name for field in fields(SamplingOptions)} - {field.name for field in fields(EngineOptions)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        inherited = dict(defaults or {})
        if given.get("temperature") == 0.0:  # greedy was asked for: a model's default filters mean nothing
            for name in ("top_k", "top_p", "min_p", "typical_p"):
                inherited.pop(name, None)
        return SamplingParams(**{**inherited, **given})


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions(SamplingOptions):
    """Sampling options, and one drafter."""

    drafter: Annotated[
        str,
        typer.Option(
            help="Who proposes: none, lookup, suffix, ngram, recycle, or all; with a draft model also draft, "
            "draft-chain, staged, or staged-chain; with prompt tokens also prompts; with both prompts+staged; with a "
            "draft model that has prompt tokens of its own staged+prompts.",
            rich_help_panel=MODEL,
        ),
    ] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(DecodingOptions):
    """Decoding options, and what an answer may be."""

    json_schema: Annotated[
        str | None,
        typer.Option(help="JSON Schema that the answer follows: a file, or JSON.", rich_help_panel=CONSTRAINT),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(help="Regular expression that the whole answer matches.", rich_help_panel=CONSTRAINT),
    ] = None

    def sampling(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return what `SamplingOptions` does, with the constraint; raises also what `constraint` does."""
        return SamplingOptions.sampling(self, {**(defaults or {}), **self.constraint()})

    def constraint(self) -> dict[str, Any]:
        """Return the parameters that constrain the answer; needs no model.

        Raises:
            ConfigError: there can be no such constraint.
            InputError: the schema's file cannot be read.
        """
        from foretell.params import SamplingParams
        from foretell.verify.constraint import check_grammar

        schema = None if self.json_schema is None else _schema(self.json_schema)
        check_grammar(SamplingParams(json_schema=schema, regex=self.regex))
        return {"json_schema": schema, "regex": self.regex}


def _schema(text: str) -> str:
    """Return a schema that was given as it is, or as the name of its file."""
    if text.lstrip().startswith("{"):
        return text
    from foretell.cli.prompt import read_file

    return read_file(Path(text))


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer the fields of a command's `options` dataclass as parameters of their own.

    The command's other parameters come first, in their order. Parameters must be keyword-capable.
    """
    hints = get_type_hints(command, include_extras=True)
    options_class = hints["options"]
    option_hints = get_type_hints(options_class, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "options"
    ]
    spread_out = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=option_hints[field.name]
        )
        for field in fields(options_class)
    ]

    @functools.wraps(command)
    def with_fields(**values: Any) -> None:
        options = options_class(**{field.name: values.pop(field.name) for field in fields(options_class)})
        command(**values, options=options)

    parameters = [*own, *spread_out]
    with_fields.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_fields


def single_answer(sampling: SamplingParams, command: str) -> SamplingParams:
    """Return `sampling` unchanged.

    Raises:
        ConfigError: it asks for several samples, and `command` shows one answer.
    """
    from foretell.errors import ConfigError

    if sampling.n > 1:
        raise ConfigError(f"`n`={sampling.n} with `{command}`, which shows one answer: use `generate`, or drop it")
    return sampling
