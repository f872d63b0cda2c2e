"""Where the benchmark touches the engine: loading, encoding, and what it reads from a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from foretell.bench.arms import BenchLLM
from foretell.bench.settings import DEFAULT_DRAFTERS, DRAFTERS_WITH_DRAFT, EngineSettings
from foretell.bench.suites import BenchPrompt


def check_drafters(names: Sequence[str]) -> None:
    """Refuse an unknown drafter before anything is loaded.

    Raises:
        ConfigError: there is no such drafter.
    """
    from foretell.drafters.catalog import check_drafter_name

    for name in names:
        check_drafter_name(name)


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
        notify=notify,
    )


def default_drafters(llm: BenchLLM) -> Sequence[str]:
    """Return the drafters to compare where none are named; those with a draft model only where there is one."""
    return DEFAULT_DRAFTERS if llm.settings.get("draft", "none") == "none" else DRAFTERS_WITH_DRAFT


def resolved_engine(llm: BenchLLM, engine: EngineSettings) -> EngineSettings:
    """Return the settings with what the LLM chose itself, so that baselines and children choose the same."""
    names = ("dtype", "device", "threads", "draft")
    return replace(engine, **{name: llm.settings[name] for name in names if llm.settings.get(name) is not None})


def encode_prompt(llm: BenchLLM, prompt: BenchPrompt) -> list[int]:
    """Return the prompt's token ids: through the chat template if it is a user's turn and the model has one."""
    if prompt.is_chat and llm.tokenizer.has_chat_template:
        return list(llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
    return list(llm.tokenizer.encode(prompt.text))


def profile_document(llm: BenchLLM) -> dict[str, Any] | None:
    """Return the measured T(N) as plain data, or None where nothing was measured."""
    return None if llm.profile is None else dict(llm.profile.to_json())
