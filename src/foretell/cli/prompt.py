"""Where a prompt comes from: the argument, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from foretell.errors import ConfigError, InputError


def read_prompt(argument: str | None, file: Path | None, *, is_raw: bool) -> str:
    """Return the prompt's text.

    `-`, or no argument while stdin is not a terminal, reads stdin. Trailing line ends are dropped unless `is_raw`.

    Raises:
        ConfigError: no prompt was given, or two.
        InputError: the prompt cannot be read, is not UTF-8, or is empty.
    """
    if argument not in (None, "-") and file is not None:
        raise ConfigError("a prompt and --file were both given: drop one of them")
    if file is not None and str(file) != "-":
        text = read_file(file)
    elif argument not in (None, "-"):
        assert argument is not None
        text = _decode(argument.encode("utf-8", "surrogateescape"), "the prompt")
    elif argument is None and file is None and sys.stdin.isatty():
        raise ConfigError("no prompt was given: add one as an argument, with --file, or on stdin")
    else:
        text = _decode(sys.stdin.buffer.read(), "stdin")
    if not is_raw:
        text = text.rstrip("\r\n")
    if not text.strip():
        raise InputError("the prompt is empty: give at least one character that is not white space")
    return text


def read_file(file: Path) -> str:
    """Return a UTF-8 file's text.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {str(file)!r}: {error.strerror}") from error
    return _decode(data, repr(str(file)))


def _decode(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{origin} is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}): convert it first"
        ) from error
