"""Files that training keeps: whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from foretell.errors import ForetellError


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write that takes its place at the end; after a failure nothing of it is left.

    Raises:
        ForetellError: it cannot be written; finished files stay, so that running again goes on.
    """
    partial = path.with_suffix(f".partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise ForetellError(
            f"{path} cannot be written ({error.strerror or error}): free some space and run again, which goes on "
            "from what is finished"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()
