"""Ways to answer that are compared: one literal catalog of names and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from foretell.errors import ConfigError
from foretell.plato.answers import Arm
from foretell.plato.embedded import answer
from foretell.plato.events import Answer, last_answer
from foretell.plato.host import Host
from foretell.plato.options import PlatoOptions

PLAIN: Final = "plain"
"""The arm that speeds are compared with."""

ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    PLAIN: {"mode": "sequential"},
    "sot": {"mode": "sot"},
    "plato": {"mode": "plato"},
    "plato-nopipeline": {"mode": "plato", "is_pipelined": False},
    "plato-noreuse": {"mode": "plato", "is_reusing": False},
    "plato-full": {"mode": "plato", "visibility": "full"},
}
"""What each arm sets; the rest is as the caller's options say."""


def check_arms(names: Sequence[str]) -> None:
    """Refuse names that `make_arms` would, before a model is loaded.

    Raises:
        ConfigError: there is no name, an unknown one, or one twice.
    """
    if not names:
        raise ConfigError(f"no arm is named: choose from {', '.join(ARMS)}")
    for name in names:
        if name not in ARMS:
            raise ConfigError(f"arm {name!r} does not exist: choose from {', '.join(ARMS)}")
        if names.count(name) > 1:
            raise ConfigError(f"arm {name!r} is named {names.count(name)} times: name it once")


def make_arms(llm: Host, names: Sequence[str], options: PlatoOptions | None = None) -> dict[str, Arm]:
    """Return arms by name, in the order of `names`.

    Raises:
        ConfigError: what `check_arms` raises.
    """
    check_arms(names)
    return {name: _arm(llm, replace(options or PlatoOptions(), **ARMS[name])) for name in names}


def _arm(llm: Host, options: PlatoOptions) -> Arm:
    def ask(question: str) -> Answer:
        return last_answer(answer(llm, question, options))

    return ask
