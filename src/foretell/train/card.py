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

{summary}
"""

_KINDS: Final = {"chat": "chat", "raw": "raw text"}

NGRAM_HEADING: Final = "\n## Its trigram table\n"

_NGRAM: Final = """
`ngram.safetensors`, {megabytes:.1f} MB: ranked continuations of {num_trigrams:,} contexts of two tokens and
{num_bigrams:,} of one, discounted and backed off after Katz, for the drafter that drafts for this draft. Its size is
that of the contexts which {num_sampled:,} sampled tokens showed; it is mapped, not read.

| | |
|---|---|
| made by | `{command}` |
| with | foretell {foretell}, torch {torch}; {minutes:.0f} minutes |
| holds the draft's choice | best {best:.1%}, best four {best_four:.1%}, of {num_tested:,} held-out places |
| a lookup | {lookup_us:.1f} µs, repeated {cached_lookup_us:.2f} µs |
"""


def draft_card(facts: Mapping[str, Any]) -> str:
    """Return the card, Markdown, from a draft's provenance."""
    scores, recipe, text = facts["scores"], facts["recipe"], facts["text"]
    kinds = {kind: name for kind, name in _KINDS.items() if scores[kind]["num_choices"]}  # a short text may lack one
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
        rows="\n".join(row for kind in kinds for row in _rows(kind, scores[kind]["by_depth"])),
        summary=_summary(scores, kinds),
    )


def ngram_section(facts: Mapping[str, Any]) -> str:
    """Return what a draft's card says of its trigram table, Markdown, from `ngram.json`."""
    return NGRAM_HEADING + _NGRAM.format(
        megabytes=facts["file_bytes"] / 1e6,
        num_trigrams=facts["num_trigram_contexts"],
        num_bigrams=facts["num_bigram_contexts"],
        num_sampled=facts["num_sampled"],
        command=facts["command"],
        foretell=facts["foretell"],
        torch=facts["torch"],
        minutes=facts["sampling_s"] / 60,
        best=facts["agreement"]["1"],
        best_four=facts["agreement"]["4"],
        num_tested=facts["num_tested"],
        lookup_us=facts["lookup_us"],
        cached_lookup_us=facts["cached_lookup_us"],
    )


def _summary(scores: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    """Return what the figures of these kinds of text, named for readers, add up to."""
    if not kinds:
        return "No text was held out that is long enough."
    coverage = " and ".join(f"{scores[kind]['coverage']:.1%} of the choices in {name}" for kind, name in kinds.items())
    chains = " and ".join(f"{scores[kind]['chain_tokens_per_pass']:.2f}" for kind in kinds)
    return f"Kept ids cover {coverage}. The draft's best chain\nalone would yield {chains} tokens a pass."


def _rows(kind: str, by_depth: Sequence[Sequence[float]]) -> list[str]:
    return [
        f"| {kind} | {depth} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
        for depth, shares in enumerate(by_depth, start=1)
    ]
