"""`foretell train`: distil a draft model from a target, and make the table that drafts for the draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from foretell.cli.options import DebugOption, JsonOption
from foretell.hardware.prompt_rows import MAX_SLOTS

if TYPE_CHECKING:
    from foretell.cli.terminal import Count
    from foretell.llm import LLM
    from foretell.train.draft import Progress
    from foretell.train.prompts import PromptProgress

train = typer.Typer(name="train", no_args_is_help=True, help="Train what drafts for a target, from its own text.")

TargetOption = Annotated[
    str | None,
    typer.Option(help="Hugging Face id, folder or .gguf file of the target.", show_default="SmolLM2-135M-Instruct"),
]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads.", show_default="torch's own choice")]
TokensOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Tokens of text that the target writes: at least one shard, 384 documents or about 100,000 tokens. Text "
        "is kept, with hidden states: 1.2 GB a million tokens for a hidden width of 576.",
    ),
]
MAX_SEED = 2**63 - 1
SeedOption = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the text, its order, and the first weights.")]


@train.command()
def draft(
    target: TargetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the draft.", show_default="where foretell looks for it by itself")
    ] = None,
    kind: Annotated[
        Literal["feature", "lm"],
        typer.Option(help="feature also reads the target's hidden states; lm reads tokens alone."),
    ] = "feature",
    size: Annotated[Literal["tiny", "small"], typer.Option(help="One layer, or two.")] = "tiny",
    tokens: TokensOption = 1_000_000,
    epochs: Annotated[float, typer.Option(help="Times that the text is read.")] = 6.0,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSON Lines of user turns ("prompt", or "turns") to answer in place of made-up ones.',
            show_default="the target makes them up",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Folder of text that this target wrote before, to begin with.", show_default="none"),
    ] = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Distil a small draft model from a target. Interrupted runs go on when the command is given again.

    The target writes its own training text; no data set is needed. On two cores the default model writes 300 to 460
    tokens/s, a million in 40 to 55 minutes; training then took 50 minutes for 690,000 tokens read 7 times.
    """
    from foretell.cli.terminal import counted_stages, note
    from foretell.drafters.draft_store import draft_home
    from foretell.train.draft import Recipe
    from foretell.train.produce import Reports, produce_draft

    recipe = Recipe(kind=kind, size=size, num_epochs=epochs, seed=seed)
    llm = _load(target, threads)
    folder = out or draft_home(llm.fingerprint)
    with counted_stages("writing text (tokens)", "training (steps)") as (written, steps):
        reports = Reports(text=written, training=_TrainingLines(steps), note=note)
        trained = produce_draft(llm, folder, recipe, tokens, prompts=prompts, text=text, reports=reports)
    _report("draft", folder, as_json=as_json, is_new=trained is not None)


@train.command()
def ngram(
    draft: Annotated[
        Path | None, typer.Option(help="The draft's folder.", show_default="where `train draft` puts it")
    ] = None,
    target: TargetOption = None,
    samples: Annotated[int, typer.Option(min=1, help="Tokens that the draft samples.")] = 4_000_000,
    max_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of the table.")] = 7_900_000,
    tokens: TokensOption = 1_000_000,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of the target's text, which is found by it, and of the sampling.")
    ] = 0,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make the Katz-backoff trigram table that drafts for a draft model, from text that the draft samples."""
    from foretell.cli.documents import print_document
    from foretell.cli.terminal import counted_stages
    from foretell.drafters.draft_store import draft_home
    from foretell.train.produce import Reports, produce_ngram

    llm = _load(target, threads)
    folder = draft or draft_home(llm.fingerprint)
    with counted_stages("writing text (tokens)", "sampling (tokens)") as (text, sampled):
        scores = produce_ngram(
            llm,
            folder,
            num_tokens=samples,
            max_bytes=max_bytes,
            seed=seed,
            text_tokens=tokens,
            reports=Reports(text=text, sampling=sampled),
        )
    if as_json:
        print_document({"folder": str(folder), "scores": dict(scores)})
    else:
        typer.echo(f"table beside the draft in {folder}: {', '.join(f'{k} {v}' for k, v in scores.items())}")


@train.command()
def prompts(
    target: TargetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the prompt tokens.", show_default="where foretell looks for it by itself"),
    ] = None,
    capacity: Annotated[
        Literal["embeddings", "prefix", "sampler", "prefix+sampler", "lora", "lora+sampler"],
        typer.Option(
            help="embeddings: prompt tokens alone; prefix: and keys and values that they alone see; sampler: and a "
            "small block between them and the guesses; lora: and low-rank additions to all layers. With --draft "
            "sampler or prefix+sampler."
        ),
    ] = "sampler",
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Train them for this draft model of the target, in its folder.", show_default="for the target"
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens behind a place.", show_default="3; 1 with --draft, and no more", min=1, max=MAX_SLOTS
        ),
    ] = None,
    ensemble: Annotated[int, typer.Option(help="Chains of prompt tokens, averaged; 1 for drafts.", min=1, max=16)] = 1,
    tokens: TokensOption = 1_000_000,
    epochs: Annotated[float, typer.Option(help="Times that the text is read.")] = 1.5,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSON Lines of user turns ("prompt", or "turns") to answer in place of made-up ones.',
            show_default="the target makes them up",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Folder of text that this target wrote before, to begin with.", show_default="none"),
    ] = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train prompt tokens, with which a target drafts for itself. Interrupted runs go on when the command is repeated.

    The target writes its own training text; no data set is needed. On two cores the default model's, from 690,000
    tokens read 1.25 times, took 96 minutes beside other work; those of its draft, with --draft, 4 minutes.
    """
    from foretell.cli.terminal import counted_stages, note
    from foretell.drafters.draft_store import OWN_PROMPTS
    from foretell.drafters.prompt_store import prompts_home
    from foretell.train.produce import check_draft
    from foretell.train.produce_prompts import produce_prompts
    from foretell.train.prompt_module import PromptRecipe

    num_slots = slots if slots is not None else 3 if draft is None else 1
    recipe = PromptRecipe(capacity=capacity, num_slots=num_slots, num_chains=ensemble, num_epochs=epochs, seed=seed)
    if draft is not None:
        recipe.check_for_draft()
        check_draft(draft)
    llm = _load(target, threads)
    folder = out or (prompts_home(llm.fingerprint) if draft is None else draft / OWN_PROMPTS)
    with counted_stages("writing text (tokens)", "training (steps)") as (written, steps):
        result = produce_prompts(
            llm,
            folder,
            recipe,
            tokens,
            prompts=prompts,
            text=text,
            draft=draft,
            written=written,
            trained=_PromptLines(steps),
            note=note,
        )
    _report("prompt tokens", folder, as_json=as_json, is_new=result is not None)


class _TrainingLines:
    """A bar over the steps, and a line for every evaluation."""

    def __init__(self, bar: Count) -> None:
        self._bar = bar

    def __call__(self, progress: Progress) -> None:
        from foretell.train.produce import agreement_line

        self._bar(progress.step, progress.num_steps)
        if progress.chat is None or progress.raw is None:
            return
        lines = "; ".join(agreement_line(name, getattr(progress, name)) for name in ("chat", "raw"))
        minutes = progress.elapsed_s / 60
        typer.echo(f"step {progress.step}, {minutes:.1f} min, loss {progress.loss:.3f}; {lines}", err=True)


class _PromptLines:
    """A bar over the steps, and a line for every evaluation."""

    def __init__(self, bar: Count) -> None:
        self._bar = bar

    def __call__(self, progress: PromptProgress) -> None:
        from foretell.train.produce_prompts import accuracy_line

        self._bar(progress.step, progress.num_steps)
        if progress.chat is None or progress.raw is None:
            return
        lines = "; ".join(accuracy_line(name, getattr(progress, name)) for name in ("chat", "raw"))
        minutes = progress.elapsed_s / 60
        typer.echo(f"step {progress.step}, {minutes:.1f} min, loss {progress.loss:.3f}; {lines}", err=True)


def _load(target: str | None, threads: int | None) -> LLM:
    from foretell.cli.terminal import progress
    from foretell.llm import LLM

    with progress("loading the model") as notify:
        return LLM(target, threads=threads, draft="none", notify=notify)


def _report(kind: str, folder: Path, *, as_json: bool, is_new: bool) -> None:
    """Say what a folder holds now, and where it did before with the very same settings that nothing was done."""
    from foretell.cli.documents import print_document

    if not is_new:
        done = f"{kind} in {folder}, finished before with these settings and this text: nothing is done"
        typer.echo(done, err=as_json)
    if as_json:
        facts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        print_document({"folder": str(folder), "num_kept": facts["num_kept"], "scores": facts["scores"]})
    elif is_new:
        typer.echo(f"{kind} in {folder}, {_num_bytes(folder) / 1e6:.1f} MB")


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
