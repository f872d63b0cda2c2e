"""Tables of a target's most likely next ids on disk: shipped with the package, or kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from foretell.drafters.table_files import DTYPES, opened, read_metadata, refuse_other_model, write_table
from foretell.errors import ModelError

NextIds = NDArray[np.uint16 | np.int32]
"""For each token id the target's most likely next ids, [V, K], best first."""

FORMAT: Final = "1"
SHIPPED: Final = Path(__file__).parents[1] / "pretrained"
"""One folder per model for which a table comes with the package."""

_TENSOR: Final = "next_ids"
_FILE: Final = "next_ids.safetensors"
_DTYPES: Final = (DTYPES["U16"], DTYPES["I32"])
_REMEDY: Final = "delete it and run `foretell tune`"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNextIds:
    """A table that was found."""

    table: NextIds
    origin: Literal["shipped", "cached"]
    path: Path


class NextIdsStore:
    """Where the table of one model is.

    Args:
        folder: where tables are kept that did not come with the package; it need not exist.
        fingerprint: the model's, see `foretell.models.fingerprint`.
        vocab_size: the model's.
        shipped: folders of shipped tables.
    """

    def __init__(self, folder: Path, fingerprint: str, vocab_size: int, *, shipped: Path = SHIPPED) -> None:
        self.path = folder / f"{fingerprint[:16]}.safetensors"
        self._fingerprint, self._vocab_size, self._shipped = fingerprint, vocab_size, shipped

    def find(self, notify: Callable[[str], None] | None = None) -> KnownNextIds | None:
        """Return the model's table, None where there is none; a kept one, built on purpose, before a shipped one.

        A damaged table is told about and left aside: without it drafts are fewer, and outputs the same.

        Args:
            notify: called with what is wrong with a table, in one line.
        """
        try:
            if self.path.is_file():
                return self._read(self.path, "cached")
            for path in sorted(self._shipped.glob(f"*/{_FILE}")):
                if read_facts(path).get("fingerprint") == self._fingerprint:
                    return self._read(path, "shipped")
        except ModelError as error:
            if notify is not None:
                notify(str(error))
        return None

    def save(self, table: NextIds, facts: Mapping[str, str]) -> KnownNextIds:
        """Keep the model's table and how it came about; see `write_next_ids`.

        Raises:
            ConfigError: the folder cannot be written.
        """
        write_next_ids(self.path, table, {"fingerprint": self._fingerprint, **facts})
        return KnownNextIds(table=table, origin="cached", path=self.path)

    def _read(self, path: Path, origin: Literal["shipped", "cached"]) -> KnownNextIds:
        return KnownNextIds(table=read_next_ids(path, self._fingerprint, self._vocab_size), origin=origin, path=path)


def id_dtype(vocab_size: int) -> type[np.uint16 | np.int32]:
    """Return the smallest type that tables use and that holds every id of a vocabulary."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def write_next_ids(path: Path, table: NextIds, facts: Mapping[str, str]) -> None:
    """Write a table whole or not at all; equal tables and facts give equal bytes.

    Args:
        path: a safetensors file, replaced where it exists.
        table: [V, K].
        facts: `fingerprint` of the model, and whatever else tells how the table came about.

    Raises:
        ConfigError: the file cannot be written.
    """
    assert "fingerprint" in facts
    write_table(path, {_TENSOR: table}, {"format_version": FORMAT, **dict(sorted(facts.items()))})


def read_facts(path: Path) -> Mapping[str, str]:
    """Return what a file tells about its table.

    Raises:
        ModelError: the file is damaged, or of another format.
    """
    return read_metadata(path, FORMAT, _REMEDY)


def read_next_ids(path: Path, fingerprint: str, vocab_size: int) -> NextIds:
    """Return the table of a model.

    Args:
        path: a file by `write_next_ids`.
        fingerprint: the model's, see `foretell.models.fingerprint`.
        vocab_size: the model's.

    Raises:
        ModelError: the file is damaged, of another format or of another model, or its ids are not the vocabulary's.
    """
    refuse_other_model(path, read_facts(path), fingerprint, _REMEDY)
    with opened(path, _REMEDY) as file:
        table: NextIds = file.get_tensor(_TENSOR)  # [V, K]
    is_table = table.ndim == 2 and table.dtype in _DTYPES and len(table) == vocab_size
    if not is_table or table.size == 0:
        raise ModelError(f"{path} holds {table.dtype} {list(table.shape)}, not [{vocab_size}, K] token ids: {_REMEDY}")
    if int(table.min()) < 0 or int(table.max()) >= vocab_size:
        raise ModelError(f"{path} holds ids outside the vocabulary of {vocab_size}: {_REMEDY}")
    return table
