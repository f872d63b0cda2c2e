"""A table of trigrams that backs off to shorter contexts, on disk and memory-mapped, and the drafter that reads it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from foretell.drafters.drafter import Outcome, Proposal, TableDrafter
from foretell.drafters.grow import MIN_PATH_PROBABILITY, grow
from foretell.drafters.next_ids import id_dtype
from foretell.drafters.table_files import DTYPES, read_metadata, refuse_other_model, write_table
from foretell.errors import ModelError
from foretell.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

FORMAT: Final = "1"
FILE: Final = "ngram.safetensors"

MAX_ORDER: Final = 2
"""Tokens of the longest context."""

MAX_RANKED: Final = 12
"""Continuations of one context that a lookup returns: the widest fan that drafts of drafts are made with."""

_STEP: Final = 1 / 16
"""Between the logarithms of two neighbouring codes: a probability is off by 3 % at most."""
_VALUES: Final = (*np.exp(-_STEP * np.arange(255)).tolist(), 0.0)
_MAX_BACKOFF: Final = 64.0

_CACHE_SIZE: Final = 4096
_CACHED_BYTES: Final = 1500
"""Of one cached context, about."""

_NAMES: Final = ("unigram", "bigram", "trigram")
_REMEDY: Final = "delete it and run `foretell train ngram`"

Context = tuple[int, ...]
"""The last tokens, at most `MAX_ORDER`."""


@dataclass(frozen=True, slots=True)
class KatzLevel:
    """Ranked continuations of all contexts of one length."""

    contexts: NDArray[Any]
    """[C], ascending: a context's ids as the digits of a number, base V."""
    starts: NDArray[np.uint32]
    """[C + 1]; context c has the continuations `starts[c]` to `starts[c + 1]`."""
    ids: NDArray[Any]
    """[F], each context's best first."""
    codes: NDArray[np.uint8]
    """[F], their probabilities, see `encode`."""
    backoff_codes: NDArray[np.uint8]
    """[C], what probabilities of shorter contexts are multiplied by, over 64."""


def level_dtypes(order: int, vocab_size: int) -> dict[str, np.dtype[Any]]:
    """Return the type of each array of a level whose contexts have `order` tokens."""
    return {
        "contexts": np.min_scalar_type(max(vocab_size**order, 2**16) - 1),
        "starts": DTYPES["U32"],
        "ids": np.dtype(id_dtype(vocab_size)),
        "codes": DTYPES["U8"],
        "backoff_codes": DTYPES["U8"],
    }


def encode(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return codes of values in [0, 1], [M] to [M]; 0 has a code of its own, others are at least 1.3e-7."""
    with np.errstate(divide="ignore"):
        codes = np.round(np.log(values) / -_STEP)  # [M]
    return np.where(values > 0, np.clip(codes, 0, 254), 255).astype(np.uint8)  # [M]


def encode_backoff(weights: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return codes of backoff weights of any size, [C] to [C]."""
    return encode(np.minimum(weights / _MAX_BACKOFF, 1.0))


class KatzTable:
    """What may follow two tokens, one or none.

    Args:
        levels: unigrams (one context, of no tokens), bigrams, trigrams.
        vocab_size: V.

    Cost: a lookup takes 9.5 µs, and 0.15 µs again while the context is cached.
    """

    def __init__(self, levels: Sequence[KatzLevel], vocab_size: int) -> None:
        assert len(levels) == MAX_ORDER + 1
        self.levels, self.vocab_size = tuple(levels), vocab_size
        self._readers = [_LevelReader.of(level) for level in levels]
        self._cache: dict[Context, list[tuple[float, int]]] = {}

    def ranked(self, context: Context) -> list[tuple[float, int]]:
        """Return `(probability, token id)` after a context of at most two tokens, best first, at most `MAX_RANKED`.

        A shorter context counts with the longer one's backoff weight, for ids that the longer one does not name.
        """
        ranked = self._cache.get(context)
        if ranked is None:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            ranked = self._cache[context] = self._read(context)
        return ranked

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(int(array.nbytes) for array in _arrays(self).values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays and of what is cached."""
        return self.mapped_bytes + _CACHED_BYTES * len(self._cache)

    def _read(self, context: Context) -> list[tuple[float, int]]:
        found: dict[int, float] = {}
        weight = 1.0
        for start in range(len(context) + 1):
            key = 0
            for token_id in context[start:]:
                key = key * self.vocab_size + token_id
            reader = self._readers[len(context) - start]
            place = bisect_left(reader.contexts, key)
            if place == len(reader.contexts) or reader.contexts[place] != key:
                continue
            first, end = reader.starts[place], reader.starts[place + 1]
            for token_id, code in zip(reader.ids[first:end].tolist(), reader.codes[first:end]):
                found.setdefault(token_id, weight * _VALUES[code])
            weight *= _MAX_BACKOFF * _VALUES[reader.backoff_codes[place]]
        best = sorted(found.items(), key=itemgetter(1), reverse=True)[:MAX_RANKED]
        return [(probability, token_id) for token_id, probability in best]


@dataclass(frozen=True, slots=True)
class _LevelReader:
    """A level's arrays as views whose items are Python numbers: ten times as fast as numpy's, one by one."""

    contexts: memoryview[int]
    starts: memoryview[int]
    ids: memoryview[int]
    codes: memoryview[int]
    backoff_codes: memoryview[int]

    @classmethod
    def of(cls, level: KatzLevel) -> _LevelReader:
        return cls(*(memoryview(getattr(level, name)) for name in KatzLevel.__slots__))


class KatzDrafter(TableDrafter):
    """Proposes what a table ranks after the last two tokens; learns nothing from the text.

    Args:
        table: may be shared by any number of drafters.
        eos_ids: tokens below which nothing is drafted.

    Cost: 49 µs for a tree of 24 nodes while their contexts are cached, 77 µs where they are mostly new.
    Source: the second stage of Spector and Re 2023, arXiv:2308.04623 §4.2.
    """

    name = "katz"
    needs: frozenset[str] = frozenset()

    def __init__(self, table: KatzTable, *, eos_ids: frozenset[int]) -> None:
        self._table, self._eos_ids = table, eos_ids
        self._context: Context = ()

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        self._context = tuple(prompt_ids[-MAX_ORDER:])

    def propose(self, proposal: Proposal) -> TokenTree:
        context = (*self._context, *proposal.ahead)[-MAX_ORDER:]
        return grow(proposal, context, self._expand, self.name, self._eos_ids)

    def observe(self, outcome: Outcome) -> None:
        self._context = (*self._context, *outcome.token_ids)[-MAX_ORDER:]

    def fork(self) -> KatzDrafter:
        twin = KatzDrafter(self._table, eos_ids=self._eos_ids)
        twin._context = self._context
        return twin

    @property
    def memory_bytes(self) -> int:
        """Bytes of the table in full, though it is mapped and shared."""
        return self._table.num_bytes

    def _expand(self, context: Context, path_probability: float) -> list[tuple[float, int, Context]]:
        recent, least = context[-1:], MIN_PATH_PROBABILITY / path_probability
        ranked = self._table.ranked(context)
        return [(chance, token_id, (*recent, token_id)) for chance, token_id in ranked if chance >= least]


def write_katz(path: Path, table: KatzTable, facts: Mapping[str, str]) -> None:
    """Write a table whole or not at all; equal tables and facts give equal bytes.

    Args:
        path: a safetensors file, replaced where it exists.
        table: its arrays as `level_dtypes` has them.
        facts: `fingerprint` of the target's tokenizer and embeddings, and how the table came about.

    Raises:
        ConfigError: the file cannot be written.
    """
    assert "fingerprint" in facts
    metadata = {**facts, "format_version": FORMAT, "vocab_size": str(table.vocab_size)}
    arrays = sorted(_arrays(table).items(), key=lambda item: (-item[1].itemsize, item[0]))
    write_table(path, dict(arrays), dict(sorted(metadata.items())))


def read_facts(path: Path) -> Mapping[str, str]:
    """Return what a file tells about its table.

    Raises:
        ModelError: the file is damaged, or of another format.
    """
    return read_metadata(path, FORMAT, _REMEDY)


def read_katz(path: Path, fingerprint: str, vocab_size: int) -> KatzTable:
    """Return the table of a target, mapped from its file.

    Args:
        path: a file by `write_katz`.
        fingerprint: of the target's tokenizer and embeddings.
        vocab_size: the target's.

    Raises:
        ModelError: the file is damaged, of another format or of another target.

    Cost: 1.1 ms for 8 MB in the page cache; every number is looked at, none is copied.
    """
    refuse_other_model(path, read_facts(path), fingerprint, _REMEDY)
    levels = []
    arrays = _mapped(path)
    for order, level in enumerate(_NAMES):
        dtypes = level_dtypes(order, vocab_size)
        parts = {name: arrays[key] for name in dtypes if (key := f"{level}.{name}") in arrays}
        is_typed = all(part.ndim == 1 and part.dtype == dtypes[name] for name, part in parts.items())
        if len(parts) < len(dtypes) or not is_typed or not _is_sound(KatzLevel(**parts), vocab_size):
            raise ModelError(f"{path} holds no table of {level}s over {vocab_size} ids: {_REMEDY}")
        levels.append(KatzLevel(**parts))
    return KatzTable(levels, vocab_size)


def _arrays(table: KatzTable) -> dict[str, NDArray[Any]]:
    named = zip(_NAMES, table.levels, strict=True)
    return {f"{level_name}.{name}": getattr(level, name) for level_name, level in named for name in KatzLevel.__slots__}


def _mapped(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file whose header is sound, mapped; those of unknown types are left out."""
    data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)  # [bytes]
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:begin].tobytes())
    header.pop("__metadata__", None)
    mapped = {}
    for name, tensor in header.items():
        first, end = tensor["data_offsets"]
        if tensor["dtype"] in DTYPES and (begin + first) % DTYPES[tensor["dtype"]].itemsize == 0:
            mapped[name] = data[begin + first : begin + end].view(DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return mapped


def _is_sound(level: KatzLevel, vocab_size: int) -> bool:
    """Whether no lookup in these arrays can go wrong."""
    contexts, starts, ids = level.contexts, level.starts, level.ids
    if len(starts) != len(contexts) + 1 or len(level.backoff_codes) != len(contexts) or len(level.codes) != len(ids):
        return False
    is_rising = bool((contexts[1:] > contexts[:-1]).all() and (starts[1:] >= starts[:-1]).all())
    is_covering = int(starts[0]) == 0 and int(starts[-1]) == len(ids)
    return is_rising and is_covering and (len(ids) == 0 or 0 <= int(ids.min()) <= int(ids.max()) < vocab_size)
