"""The model card of a trained draft: what it is, how it was made, how well it does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretell.models.draft_files import WEIGHTS
from foretell.train.distill import RANKS

_CARD: Final = """# Draft for {target}

`{weights}`: a draft model of kind `{kind}`, size `{size}`, with {num_kept:,} output ids. It shares the target's
embedding and head, and decides how many tokens a pass yields, never which. Its licence is the target's.

| | |
|---|---|
| made by | `{command}` |
| with | foretell {foretell}, torch {torch}, on {cpu} |
| text | {num_tokens:,} tokens by the target itself: {num_chat:,} conversations, {num_raw:,} raw texts |
| training | {num_steps:,} steps, {minutes:.0f} minutes |

Share of the target's own greedy choices, on texts that were held out, among the draft's best; ids that were not kept
count as misses:

| text | depth | {ranks} |
|---|---|{rules}
{rows}

Kept ids cover {chat_coverage:.1%} of the choices in chat and {raw_coverage:.1%} in raw text. The draft's best chain
alone would yield {chat_chain:.2f} and {raw_chain:.2f} tokens a pass.
"""


def draft_card(facts: Mapping[str, Any]) -> str:
    """Return the card, Markdown, from a draft's provenance."""
    scores, recipe, text = facts["scores"], facts["recipe"], facts["text"]
    return _CARD.format(
        target=facts["target"],
        weights=WEIGHTS,
        kind=recipe["kind"],
        size=recipe["size"],
        num_kept=facts["num_kept"],
        command=shlex.join(facts["argv"]),
        foretell=facts["foretell"],
        torch=facts["torch"],
        cpu=facts["cpu"],
        num_tokens=text["num_tokens"],
        num_chat=text["num_chat_documents"],
        num_raw=text["num_raw_documents"],
        num_steps=scores["num_steps"],
        minutes=scores["training_s"] / 60,
        ranks=" | ".join(f"top {rank}" for rank in RANKS),
        rules="---|" * len(RANKS),
        rows="\n".join([*_rows("chat", scores["chat"]["by_depth"]), *_rows("raw", scores["raw"]["by_depth"])]),
        chat_coverage=scores["chat"]["coverage"],
        raw_coverage=scores["raw"]["coverage"],
        chat_chain=scores["chat"]["chain_tokens_per_pass"],
        raw_chain=scores["raw"]["chain_tokens_per_pass"],
    )


def _rows(kind: str, by_depth: Sequence[Sequence[float]]) -> list[str]:
    return [
        f"| {kind} | {depth} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
        for depth, shares in enumerate(by_depth, start=1)
    ]
