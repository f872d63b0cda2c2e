"""Where the benchmark touches the engine: loading, encoding, and what it reads from a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.bench.arms import BenchLLM
from foretell.bench.settings import DEFAULT_DRAFTERS, DRAFTERS_WITH_DRAFT, EngineSettings
from foretell.bench.suites import BenchPrompt
from foretell.errors import ConfigError
from foretell.params import SamplingParams


def check_drafters(
    names: Sequence[str] | None,
    engine: EngineSettings,
    sampling: SamplingParams,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Refuse drafters that cannot do what they are asked to, before weights are loaded.

    Args:
        names: None for the default.
        engine: how the model is going to be loaded.
        sampling: says which rule accepts drafts.
        notify: called before what takes long.

    Raises:
        ConfigError: there is no such drafter, no draft model or no prompt tokens for it, or it does not draw what the
            rule tests.
        ModelError: the model whose drafts are looked for cannot be found or read.
    """
    from foretell.drafters.catalog import (
        MODEL_DRAFTERS,
        PROMPT_DRAFTERS,
        check_drafter_name,
        missing_draft,
        missing_prompts,
    )
    from foretell.drafters.draft_store import NONE

    for name in names or ():
        check_drafter_name(name)
    need_draft = [name for name in names or () if name in MODEL_DRAFTERS]
    if sampling.verification in ("rejection", "traversal") and not sampling.is_greedy:
        drawing = ("none", "all", *MODEL_DRAFTERS)  # `all` where it has a draft model
        asked = DEFAULT_DRAFTERS if names is None else names
        if unable := [name for name in asked if name not in drawing]:
            raise ConfigError(
                f"`verification`={sampling.verification!r} tests drawn drafts, {', '.join(unable)} draw none: name "
                f"`drafters` among {', '.join(drawing)}"
            )
        need_draft += [name for name in names or () if name == "all"]
    if need_draft and not _has_draft(engine, notify):
        raise missing_draft(need_draft[0], is_off=engine.draft == NONE)
    need_prompts = [name for name in names or () if name in PROMPT_DRAFTERS]
    if need_prompts and not _has_prompts(engine, notify):
        raise missing_prompts(need_prompts[0], is_off=engine.prompts == NONE)


def _has_draft(engine: EngineSettings, notify: Callable[[str], None] | None) -> bool:
    """Return whether the engine is going to have a draft model, as far as files tell."""
    from foretell.drafters.draft_store import NONE, has_draft

    return has_draft(_fingerprint(engine, notify)) if engine.draft is None else engine.draft != NONE


def _has_prompts(engine: EngineSettings, notify: Callable[[str], None] | None) -> bool:
    """Return whether the engine is going to have prompt tokens, as far as files tell."""
    from foretell.drafters.prompt_store import NONE, has_prompts

    return has_prompts(_fingerprint(engine, notify)) if engine.prompts is None else engine.prompts != NONE


def _fingerprint(engine: EngineSettings, notify: Callable[[str], None] | None) -> str:
    """Return the target's fingerprint, from its files."""
    from foretell.models.config import read_config
    from foretell.models.files import resolve
    from foretell.models.fingerprint import model_fingerprint
    from foretell.text.tokenizer import Tokenizer

    folder = resolve(engine.model, notify=notify).folder
    return model_fingerprint(folder, Tokenizer.load(folder), read_config(folder).vocab_size)


def load_llm(engine: EngineSettings, notify: Callable[[str], None] | None = None) -> BenchLLM:
    """Load the model that serves all of foretell's arms; `notify` is called before what takes long."""
    from foretell.llm import LLM

    return LLM(
        engine.model,
        dtype=engine.dtype,
        device=engine.device,
        threads=engine.threads,
        compile=engine.compile,
        context_tokens=engine.context_tokens,
        corpus=engine.corpus,
        draft=engine.draft,
        prompts=engine.prompts,
        notify=notify,
    )


def default_drafters(llm: BenchLLM) -> Sequence[str]:
    """Return the drafters to compare where none are named; those with a draft model only where there is one."""
    return DEFAULT_DRAFTERS if llm.settings.get("draft", "none") == "none" else DRAFTERS_WITH_DRAFT


def resolved_engine(llm: BenchLLM, engine: EngineSettings) -> EngineSettings:
    """Return the settings with what the LLM chose itself, so that baselines and children choose the same."""
    names = ("dtype", "device", "threads", "draft", "prompts")
    return replace(engine, **{name: llm.settings[name] for name in names if llm.settings.get(name) is not None})


def draft_files(engine: EngineSettings) -> dict[str, tuple[int, int]]:
    """Return size and time of each file of weights and tables in the draft's folder, which tell when it is replaced."""
    found = {path.name: path.stat() for path in sorted(Path(engine.draft or "none").glob("*.safetensors"))}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def encode_prompt(llm: BenchLLM, prompt: BenchPrompt) -> list[int]:
    """Return the prompt's token ids: through the chat template if it is a user's turn and the model has one."""
    if prompt.is_chat and llm.tokenizer.has_chat_template:
        return list(llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
    return list(llm.tokenizer.encode(prompt.text))


def profile_document(llm: BenchLLM) -> dict[str, Any] | None:
    """Return the measured T(N) as plain data, or None where nothing was measured."""
    return None if llm.profile is None else dict(llm.profile.to_json())
