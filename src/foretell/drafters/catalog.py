"""Every drafter by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from foretell.drafters.corpus import Corpus
from foretell.drafters.drafter import Drafter, NoDrafter
from foretell.errors import ConfigError

if TYPE_CHECKING:
    from foretell.drafters.next_ids import NextIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What drafters may draw on."""

    eos_ids: frozenset[int]
    corpus: Corpus | None
    next_ids: NextIds | None


def make_drafter(
    name: str,
    *,
    eos_ids: frozenset[int],
    corpus: Corpus | Sequence[Sequence[int]] = (),
    next_ids: NextIds | None = None,
) -> Drafter:
    """Return a new drafter.

    Args:
        name: a key of `DRAFTERS`.
        eos_ids: tokens below which nothing is drafted; may be empty.
        corpus: texts to quote. Give the same `Corpus` to every call, so that it is built once.
        next_ids: see `RecycleDrafter`.

    Raises:
        ConfigError: there is no such drafter.
    """
    build = DRAFTERS.get(name)
    if build is None:
        raise ConfigError(f"there is no drafter {name!r}: choose one of {', '.join(DRAFTERS)}")
    if not isinstance(corpus, Corpus):
        corpus = Corpus(corpus)
    return build(Material(eos_ids=eos_ids, corpus=corpus if corpus else None, next_ids=next_ids))


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
    """The two that complement each other.

    The suffix drafter backs off through every context that lookup and n-grams know; merging those in as well changed
    nothing but the time to draft.
    """
    from foretell.drafters.combined import CombinedDrafter

    return CombinedDrafter([_suffix(material), _recycle(material)], "all")


DRAFTERS: Final[dict[str, Callable[[Material], Drafter]]] = {
    "none": _none,
    "lookup": _lookup,
    "suffix": _suffix,
    "ngram": _ngram,
    "recycle": _recycle,
    "all": _all,
}
