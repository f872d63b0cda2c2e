"""`foretell plan`: answer a question part by part, independent parts at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretell.cli.api_key import ApiKeyEnvOption, read_api_key
from foretell.cli.options import MODEL, SAMPLING, EngineOptions, JsonOption, spread

if TYPE_CHECKING:
    from foretell.plato.events import Answer, Event
    from foretell.plato.options import PlatoOptions


@spread
def plan(
    question: Annotated[str | None, typer.Argument(help="The question; - or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the question from a UTF-8 file.")] = None,
    mode: Annotated[
        Literal["plato", "sot", "sequential"],
        typer.Option(help="plato: plan, then independent parts at once; sot: no part sees another; sequential: plain."),
    ] = "plato",
    force_plan: Annotated[
        bool, typer.Option("--force-plan", help="Plan even where it is not expected to pay.")
    ] = False,
    max_parts: Annotated[int, typer.Option(help="Most parts of a plan.", min=2, max=8)] = 8,
    max_parallel: Annotated[int, typer.Option(help="Most parts written at once.", min=1)] = 8,
    max_rows: Annotated[
        int | None, typer.Option(help="Rows that plan and parts may have in a pass together, drafts among them.", min=1)
    ] = None,
    max_slots: Annotated[
        int | None,
        typer.Option(help="Slots of keys and values that plan and parts may hold at once; parts wait for room.", min=1),
    ] = None,
    visibility: Annotated[
        Literal["prefix", "full"],
        typer.Option(help="What a part sees of the plan: the lines up to its own, or, once it is complete, all."),
    ] = "prefix",
    headings: Annotated[bool, typer.Option(help="Put each part's title above it.")] = True,
    backend: Annotated[
        Literal["embedded", "openai"],
        typer.Option(help="embedded: this engine; openai: any server that speaks OpenAI's protocol."),
    ] = "embedded",
    base_url: Annotated[str | None, typer.Option(help="Address of the server, for the openai backend.")] = None,
    api_key_env: ApiKeyEnvOption = None,
    as_json: JsonOption = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", rich_help_panel=SAMPLING)] = 512,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above, tokens are drawn.", rich_help_panel=SAMPLING)
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Key of the noise.", rich_help_panel=SAMPLING)] = None,
    drafter: Annotated[str, typer.Option(help="Who proposes, as in generate.", rich_help_panel=MODEL)] = "all",
    *,
    options: EngineOptions,
) -> None:
    """Answer a question part by part, independent parts at once (Plato). Unlike all else here this changes the answer.

    The model plans the answer as parts that build on each other; parts that do not are written at the same time.
    """
    from foretell.cli.documents import print_document
    from foretell.cli.plan_view import show
    from foretell.cli.prompt import read_prompt
    from foretell.plato.options import PlatoOptions
    from foretell.provenance import provenance

    settings = PlatoOptions(
        mode=mode,
        max_answer_tokens=max_new_tokens,
        max_parallel=max_parallel,
        max_parts=max_parts,
        max_rows=max_rows,
        max_slots=max_slots,
        visibility=visibility,
        force_plan=force_plan,
        has_headings=headings,
        temperature=temperature,
        seed=seed,
        drafter=drafter if backend == "embedded" else None,
    )
    text = read_prompt(question, file, is_raw=False)
    answer = show(_events(text, settings, options, backend, base_url, api_key_env), is_quiet=as_json)
    if as_json:
        print_document({"answer": answer_document(answer), "provenance": provenance()})


def answer_document(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain data, its ratios included."""
    document = asdict(answer)
    if answer.plan is not None:
        document["plan"] = [asdict(part) for part in answer.plan]
        document["width"], document["depth"] = answer.plan.width, answer.plan.depth
    return document | {"tokens_per_s": answer.tokens_per_s, "critical_path": list(answer.critical_path)}


def _events(
    question: str,
    settings: PlatoOptions,
    options: EngineOptions,
    backend: str,
    base_url: str | None,
    api_key_env: str | None,
) -> Iterator[Event]:
    from foretell.errors import ConfigError

    if backend == "embedded":
        for name, value in (("--base-url", base_url), ("--api-key-env", api_key_env)):
            if value is not None:
                raise ConfigError(f"{name} has no effect with --backend embedded: add --backend openai, or drop it")
        assert settings.drafter is not None
        return options.load(settings.drafter).stream_plan(question, settings)
    from foretell.plato.remote import stream_remote_plan

    if base_url is None:
        raise ConfigError("--backend openai needs the server's address: give --base-url")
    return stream_remote_plan(base_url, options.model, question, settings, api_key=read_api_key(api_key_env))
