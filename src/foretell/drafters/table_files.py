"""Tables on disk: safetensors that are written whole, byte for byte alike, and name the model that they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretell.errors import ConfigError, ModelError

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
"""Types of tables' arrays by their names in a file."""


def write_table(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write arrays whole or not at all; equal arrays and metadata, in the same order, give equal bytes.

    Args:
        path: a safetensors file, replaced where it exists.
        arrays: of `DTYPES`; wide types first, so that each is aligned where it is mapped.
        metadata: what the file tells about them.

    Raises:
        ConfigError: the file cannot be written.
    """
    # By hand, because the library writes the metadata in another order every time.
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        kind = next(kind for kind, dtype in DTYPES.items() if dtype == array.dtype)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(array.tobytes() for array in arrays.values())
        partial.write_bytes(len(text).to_bytes(8, "little") + text + data)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; free some space") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def read_metadata(path: Path, format_version: str, remedy: str) -> Mapping[str, str]:
    """Return what a file tells about its arrays.

    Raises:
        ModelError: the file is damaged, or of another format; the message ends with `remedy`.
    """
    with opened(path, remedy) as file:
        metadata: Mapping[str, str] = file.metadata() or {}
    if (found := metadata.get("format_version")) != format_version:
        raise ModelError(f"{path} has format {found}, this version reads {format_version}: {remedy}")
    return metadata


def refuse_other_model(path: Path, metadata: Mapping[str, str], fingerprint: str, remedy: str) -> None:
    """Raise where a file belongs to another model.

    Raises:
        ModelError: its fingerprint is another one.
    """
    found = str(metadata.get("fingerprint"))
    if found != fingerprint:
        raise ModelError(f"{path} belongs to model {found[:16]}, this one is {fingerprint[:16]}: {remedy}")


@contextmanager
def opened(path: Path, remedy: str) -> Iterator[Any]:
    """Open a safetensors file for numpy; what is wrong with it is a `ModelError`, whenever it shows."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{path} is truncated, corrupt or unreadable ({reason}): {remedy}") from None
