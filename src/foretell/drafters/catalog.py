"""Every drafter by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from foretell.drafters.corpus import Corpus
from foretell.drafters.drafter import Drafter, DrawingDrafter, NoDrafter
from foretell.errors import ConfigError

if TYPE_CHECKING:
    from foretell.drafters.draft_engine import DraftEngine
    from foretell.drafters.next_ids import NextIds

TableFactory = Callable[[frozenset[int]], Drafter]
"""Makes a drafter over something trained, given the tokens below which nothing is drafted."""

STAGED_PROMPTS: Final = "staged+prompts"
"""The one that needs a draft model with prompt tokens of its own."""

PROMPTS_STAGED: Final = "prompts+staged"
"""The one that needs a draft model, and prompt tokens of the target."""

_DRAFT_OFF: Final = "which `draft`='none' (`--draft none`) switched off: drop that, or"


PromptsFactory = Callable[[str, frozenset[int]], Drafter]
"""Makes a drafter of the target's prompt tokens, given its name and the tokens below which nothing is drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What drafters may draw on."""

    eos_ids: frozenset[int]
    corpus: Corpus | None
    next_ids: NextIds | None
    draft: DraftEngine | None
    ngram_table: TableFactory | None
    prompts: PromptsFactory | None


def check_drafter_name(name: str) -> None:
    """Refuse an unknown drafter before anything is loaded.

    Raises:
        ConfigError: there is no such drafter.
    """
    known = tuple(_ALL)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no drafter {name!r}{hint}: choose one of {', '.join(known)}")


def missing_draft(name: str, *, is_off: bool = False) -> ConfigError:
    """Return the error of a drafter that runs a draft model where there is none, or where it was switched off."""
    reason = "this model has none: train one (`foretell train draft`) or give one (`draft`, `--draft`)"
    if is_off:
        reason = f"{_DRAFT_OFF} choose another drafter"
    return ConfigError(f"drafter {name!r} runs a draft model, {reason}")


def missing_prompts(name: str, *, is_off: bool = False) -> ConfigError:
    """Return the error of a drafter of prompt tokens where there are none, or where they were switched off."""
    reason = "this model has none: train some (`foretell train prompts`) or give their folder (`prompts`, `--prompts`)"
    if is_off:
        reason = "which `prompts`='none' (`--prompts none`) switched off: drop that, or choose another drafter"
    return ConfigError(f"drafter {name!r} needs prompt tokens, {reason}")


def missing_draws(name: str, rule: str, *, is_off: bool = False) -> ConfigError:
    """Return the error of a drafter that draws nothing, where a rule tests draws."""
    reason = f"drafter {name!r} runs none: choose all, {', '.join(MODEL_DRAFTERS)}, or 'match'"
    if name == "all":
        reason = "this model has none: train one (`foretell train draft`), or use 'match'"
    if name == "all" and is_off:
        reason = f"{_DRAFT_OFF} use 'match'"
    return ConfigError(f"`verification`={rule!r} tests what a draft model drew, {reason}")


def make_drafter(
    name: str,
    *,
    eos_ids: frozenset[int],
    corpus: Corpus | Sequence[Sequence[int]] = (),
    next_ids: NextIds | None = None,
    draft: DraftEngine | None = None,
    ngram_table: TableFactory | None = None,
    prompts: PromptsFactory | None = None,
    off: Collection[str] = (),
    drawing_rule: str | None = None,
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
        off: which of "draft" and "prompts" are not there because that was asked for.
        drawing_rule: name of the rule that is going to test what the drafter drew; None where none does.

    Raises:
        ConfigError: there is no such drafter, it needs a draft model or prompt tokens and there are none, or it does
            not draw.
    """
    check_drafter_name(name)
    if draft is None and (name in MODEL_DRAFTERS or name in (STAGED_PROMPTS, PROMPTS_STAGED)):
        raise missing_draft(name, is_off="draft" in off)
    if name in OWN_PROMPT_DRAFTERS and (draft is None or draft.prompts is None):
        raise ConfigError(
            f"drafter {name!r} needs a draft model with prompt tokens of its own, this one has none: "
            "train some (`foretell train prompts --draft DIR`)"
        )
    if name in PROMPT_DRAFTERS and prompts is None:
        raise missing_prompts(name, is_off="prompts" in off)
    if not isinstance(corpus, Corpus):
        corpus = Corpus(corpus)
    drafter = _ALL[name](
        Material(
            eos_ids=eos_ids,
            corpus=corpus if corpus else None,
            next_ids=next_ids,
            draft=draft,
            ngram_table=ngram_table,
            prompts=prompts,
        )
    )
    if drawing_rule is not None and not isinstance(drafter, DrawingDrafter):
        raise missing_draws(name, drawing_rule, is_off="draft" in off)
    return drafter


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


def _prompts(material: Material, name: str = "prompts") -> Drafter:
    assert material.prompts is not None
    return material.prompts(name, material.eos_ids)


def _fixed_prompts(name: str) -> Callable[[Material], Drafter]:
    return lambda material: _prompts(material, name)


def _staged_prompts(material: Material) -> Drafter:
    return _draft_model(material, STAGED_PROMPTS, inner=_second_stage(material), has_prompts=True)


def _prompts_staged(material: Material) -> Drafter:
    return _draft_model(material, PROMPTS_STAGED, inner=_second_stage(material), beside=_prompts(material))


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
    has_prompts: bool = False,
) -> Drafter:
    from foretell.drafters.draft import DraftModelDrafter
    from foretell.drafters.expansion import TreeShape

    assert material.draft is not None
    shape = TreeShape(max_children=1, max_width=1) if is_chain else TreeShape()
    return DraftModelDrafter(
        material.draft,
        name,
        eos_ids=material.eos_ids,
        shape=shape,
        inner=inner,
        beside=beside,
        has_prompts=has_prompts,
    )


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

PROMPT_DRAFTERS: Final[dict[str, Callable[[Material], Drafter]]] = {
    "prompts": _prompts,
    "prompts-static": _fixed_prompts("prompts-static"),
    "prompts-published": _fixed_prompts("prompts-published"),
    "prompts-equal": _fixed_prompts("prompts-equal"),
    "prompts-random": _fixed_prompts("prompts-random"),
    PROMPTS_STAGED: _prompts_staged,
}
"""Those that need prompt tokens of the target; those with a hyphen are there to be compared with the first."""

OWN_PROMPT_DRAFTERS: Final[dict[str, Callable[[Material], Drafter]]] = {STAGED_PROMPTS: _staged_prompts}
"""Those that need a draft model with prompt tokens of its own."""

_ALL: Final = DRAFTERS | MODEL_DRAFTERS | PROMPT_DRAFTERS | OWN_PROMPT_DRAFTERS
