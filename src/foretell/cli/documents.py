"""Results as JSON documents."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from foretell.result import Completion, Stats


def print_document(document: Any) -> None:
    """Print a document as one line of JSON: the last line of stdout.

    Not-a-number is refused: a consumer's parser would.
    """
    print(json.dumps(document, ensure_ascii=False, allow_nan=False, default=str), flush=True)


def completion_document(completion: Completion) -> dict[str, Any]:
    """Return a completion as plain data, its ratios included."""
    document: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "sources": list(completion.sources),
        "seed": completion.seed,
        "stats": stats_document(completion.stats),
    }
    if completion.logprobs is not None:
        document["logprobs"] = [asdict(logprobs) for logprobs in completion.logprobs]
    return document


def stats_document(stats: Stats) -> dict[str, Any]:
    """Return counters and the ratios made of them."""
    counters = {field.name: getattr(stats, field.name) for field in fields(stats)}
    ratios = (
        "tokens_per_pass", "acceptance_rate", "rows_per_pass", "draft_passes_per_token", "e2", "bytes_per_token",
        "draft_share", "tokens_per_s", "end_to_end_tokens_per_s",
    )  # fmt: skip
    return counters | {name: getattr(stats, name) for name in ratios}
