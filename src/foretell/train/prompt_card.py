"""The card of trained prompt tokens: what they are, how they were made, how good their guesses are."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from foretell.drafters.prompt_store import WEIGHTS

_CARD: Final = """# Prompt tokens for {target}

`{weights}`: {num_slots} prompt tokens in {num_chains} chain(s), capacity `{capacity}`. They ride in the target's own
passes and guess the tokens after the next one; they decide how many tokens a pass yields, never which. Their licence
is the target's.

| | |
|---|---|
| made by | `{command}` |
| with | foretell {foretell}, torch {torch}, on {cpu} |
| text | {num_tokens:,} tokens by the target itself: {num_chat:,} conversations, {num_raw:,} raw texts |
| training | {num_steps:,} steps, {minutes:.0f} minutes |

Share of places in greedy text that was held out whose own token was among the best guesses; slot j guesses the token
j + 1 places on, knowing the one before its guess where the capacity has a sampler. {misses}

| text | places | slot | top 1 | top 5 | top 10 |
|---|---|---|---|---|---|
{rows}
"""


def prompt_card(facts: Mapping[str, Any]) -> str:
    """Return the card, Markdown, from the provenance of prompt tokens."""
    scores, recipe, text = facts["scores"], facts["recipe"], facts["text"]
    has_sampler = "sampler" in recipe["capacity"]
    return _CARD.format(
        target=facts["target"],
        weights=WEIGHTS,
        num_slots=recipe["num_slots"],
        num_chains=recipe["num_chains"],
        capacity=recipe["capacity"],
        command=shlex.join(facts["argv"]),
        foretell=facts["foretell"],
        torch=facts["torch"],
        cpu=facts["cpu"],
        num_tokens=text["num_tokens"],
        num_chat=text["num_chat_documents"],
        num_raw=text["num_raw_documents"],
        num_steps=scores["num_steps"],
        minutes=scores["training_s"] / 60,
        misses=f"The sampler guesses {facts['num_kept']:,} ids; others count as misses." if has_sampler else "",
        rows="\n".join(
            f"| {kind} | {scores[kind]['num_places']:,} | {slot} | "
            + " | ".join(f"{share:.3f}" for share in shares)
            + " |"
            for kind in ("chat", "raw")
            if scores[kind]["num_places"]
            for slot, shares in enumerate(scores[kind]["by_slot"], start=1)
        ),
    )
