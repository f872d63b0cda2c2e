"""The option that names the key of a server: keys themselves do not belong on a command line, which others can read."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from foretell.errors import ConfigError

ApiKeyEnvOption = Annotated[
    str | None,
    typer.Option(help="Environment variable that holds the server's key.", show_default="no key is sent"),
]


def read_api_key(variable: str | None) -> str | None:
    """Return the key that an environment variable holds; None for None.

    Raises:
        ConfigError: it holds none. What does not look like a variable's name is not repeated: it may be the key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if key:
        return key
    if re.fullmatch("[A-Z][A-Z0-9_]*", variable):
        raise ConfigError(f"--api-key-env names {variable}, which is not set: export it, or drop the option")
    raise ConfigError("--api-key-env names no variable that is set: export one that holds the key, and give its name")
