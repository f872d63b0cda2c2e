"""Every drafter by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from foretell.drafters.corpus import Corpus
from foretell.drafters.drafter import Drafter, NoDrafter
from foretell.errors import ConfigError

if TYPE_CHECKING:
    from foretell.drafters.draft_engine import DraftEngine
    from foretell.drafters.next_ids import NextIds

TableFactory = Callable[[frozenset[int]], Drafter]
"""Makes a drafter over something trained, given the tokens below which nothing is drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What drafters may draw on."""

    eos_ids: frozenset[int]
    corpus: Corpus | None
    next_ids: NextIds | None
    draft: DraftEngine | None
    ngram_table: TableFactory | None
    prompts: TableFactory | None
    """Makes the drafter of the target's prompt tokens."""


def check_drafter_name(name: str) -> None:
    """Refuse an unknown drafter before anything is loaded.

    Raises:
        ConfigError: there is no such drafter.
    """
    if name not in (*DRAFTERS, *MODEL_DRAFTERS, *PROMPT_DRAFTERS):
        known = ", ".join((*DRAFTERS, *MODEL_DRAFTERS, *PROMPT_DRAFTERS))
        raise ConfigError(f"there is no drafter {name!r}: choose one of {known}")


def missing_draft(name: str) -> ConfigError:
    """Return the error of a drafter that runs a draft model where there is none."""
    return ConfigError(
        f"drafter {name!r} runs a draft model, this model has none: "
        "train one (`foretell train draft`) or give one (`--draft`)"
    )


def missing_prompts(name: str) -> ConfigError:
    """Return the error of a drafter of prompt tokens where there are none."""
    return ConfigError(
        f"drafter {name!r} needs prompt tokens, this model has none: "
        "train some (`foretell train prompts`) or give their folder (`--prompts`)"
    )


def make_drafter(
    name: str,
    *,
    eos_ids: frozenset[int],
    corpus: Corpus | Sequence[Sequence[int]] = (),
    next_ids: NextIds | None = None,
    draft: DraftEngine | None = None,
    ngram_table: TableFactory | None = None,
    prompts: TableFactory | None = None,
) -> Drafter:
    """Return a new drafter.

    Args:
        name: a key of `DRAFTERS` or `MODEL_DRAFTERS`.
        eos_ids: tokens below which nothing is drafted; may be empty.
        corpus: texts to quote. Give the same `Corpus` to every call, so that it is built once.
        next_ids: see `RecycleDrafter`.
        draft: a loaded draft model, the same for every call.
        ngram_table: drafts for the draft model.
        prompts: makes the drafter of the target's prompt tokens.

    Raises:
        ConfigError: there is no such drafter, or it needs a draft model or prompt tokens and there are none.
    """
    check_drafter_name(name)
    if name in MODEL_DRAFTERS and draft is None:
        raise missing_draft(name)
    if name in PROMPT_DRAFTERS and prompts is None:
        raise missing_prompts(name)
    if not isinstance(corpus, Corpus):
        corpus = Corpus(corpus)
    build = DRAFTERS.get(name) or MODEL_DRAFTERS.get(name) or PROMPT_DRAFTERS[name]
    return build(
        Material(
            eos_ids=eos_ids,
            corpus=corpus if corpus else None,
            next_ids=next_ids,
            draft=draft,
            ngram_table=ngram_table,
            prompts=prompts,
        )
    )


def _none(material: Material) -> Drafter:
    return NoDrafter()


def _lookup(material: Material) -> Drafter:
    from foretell.drafters.lookup import LookupDrafter

    return LookupDrafter(eos_ids=material.eos_ids)


def _suffix(material: Material) -> Drafter:
    from foretell.drafters.suffix import SuffixDrafter

    return SuffixDrafter(eos_ids=material.eos_ids, corpus=material.corpus)


def _ngram(material: Material) -> Drafter:
    from foretell.drafters.ngram import NgramDrafter

    return NgramDrafter(eos_ids=material.eos_ids)


def _recycle(material: Material) -> Drafter:
    from foretell.drafters.recycle import RecycleDrafter

    return RecycleDrafter(eos_ids=material.eos_ids, next_ids=material.next_ids)


def _all(material: Material) -> Drafter:
    """The two that complement each other, and prompt tokens and a draft model where there are some.

    The suffix drafter backs off through every context that lookup and n-grams know; merging those in as well changed
    nothing but the time to draft.
    """
    from foretell.drafters.combined import CombinedDrafter

    prompts = [] if material.prompts is None else [_prompts(material)]
    combined = CombinedDrafter([_suffix(material), _recycle(material), *prompts], "all")
    if material.draft is None:
        return combined
    table = None if material.ngram_table is None else material.ngram_table(material.eos_ids)
    return _draft_model(material, "all", inner=table, beside=combined)


def _draft_chain(material: Material) -> Drafter:
    return _draft_model(material, "draft-chain", is_chain=True)


def _draft(material: Material) -> Drafter:
    return _draft_model(material, "draft")


def _staged_chain(material: Material) -> Drafter:
    return _draft_model(material, "staged-chain", is_chain=True, inner=_second_stage(material))


def _staged(material: Material) -> Drafter:
    return _draft_model(material, "staged", inner=_second_stage(material))


def _prompts(material: Material) -> Drafter:
    assert material.prompts is not None
    return material.prompts(material.eos_ids)


def _second_stage(material: Material) -> Drafter:
    """What drafts for the draft model."""
    from foretell.drafters.combined import CombinedDrafter

    table = [] if material.ngram_table is None else [material.ngram_table(material.eos_ids)]
    return CombinedDrafter([*table, _ngram(material), _suffix(material)], "second stage")


def _draft_model(
    material: Material,
    name: str,
    *,
    is_chain: bool = False,
    inner: Drafter | None = None,
    beside: Drafter | None = None,
) -> Drafter:
    from foretell.drafters.draft import DraftModelDrafter
    from foretell.drafters.expansion import TreeShape

    assert material.draft is not None
    shape = TreeShape(max_children=1, max_width=1) if is_chain else TreeShape()
    return DraftModelDrafter(material.draft, name, eos_ids=material.eos_ids, shape=shape, inner=inner, beside=beside)


DRAFTERS: Final[dict[str, Callable[[Material], Drafter]]] = {
    "none": _none,
    "lookup": _lookup,
    "suffix": _suffix,
    "ngram": _ngram,
    "recycle": _recycle,
    "all": _all,
}
"""Those that need no draft model."""

MODEL_DRAFTERS: Final[dict[str, Callable[[Material], Drafter]]] = {
    "draft-chain": _draft_chain,
    "draft": _draft,
    "staged-chain": _staged_chain,
    "staged": _staged,
}
"""Those that run one."""

PROMPT_DRAFTERS: Final[dict[str, Callable[[Material], Drafter]]] = {"prompts": _prompts}
"""Those that need prompt tokens of the target."""
