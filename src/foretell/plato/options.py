"""How an answer is planned and written: frozen, keyword-only, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from foretell.errors import ConfigError
from foretell.plato.events import Mode
from foretell.plato.plan import MAX_PARTS
from foretell.plato.schedule import MIN_PART_TOKENS

Visibility = Literal["prefix", "full"]
"""What a part sees of the plan: `prefix` is the lines up to its own, so that it may begin before the plan is complete;
`full` is all of it."""

_WHOLE: Final = ("max_answer_tokens", "max_parallel", "max_parts", "max_rows", "max_slots", "seed")
_MAY_BE_NONE: Final = ("max_rows", "max_slots", "seed")
_FLAGS: Final = ("is_pipelined", "is_reusing", "force_plan", "has_headings")
_MIN_PARTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatoOptions:
    """How to plan and write one answer.

    Raises:
        ConfigError: a value is out of range, or not of its type.
    """

    mode: Mode = "plato"
    max_answer_tokens: int = 512
    """Tokens of all parts together; the plan has a limit of its own."""
    max_parallel: int = 8
    """Parts that are written at once."""
    max_parts: int = MAX_PARTS
    """Of a plan; fewer where each would have less than a short paragraph's tokens."""
    max_rows: int | None = None
    """Rows that the plan and all parts may have in a step, drafts among them; with fewer rows than parts these take
    turns, the plan and those that most parts wait for first. None sets no limit but what pays."""
    max_slots: int | None = None
    """Slots of keys and values that the plan and all parts may hold at once; with fewer than they need, parts wait for
    each other, and some of what they share is computed again. The rules and examples, which all answers share, are not
    counted; memory is taken for twice as many regions whenever it runs out. None sets no limit."""
    is_pipelined: bool = True
    """A part begins as soon as its line of the plan is complete, not only after the whole plan."""
    is_reusing: bool = True
    """Keys and values of what prompts share are computed once."""
    visibility: Visibility = "prefix"
    force_plan: bool = False
    """Plan whatever the question is."""
    has_headings: bool = True
    """A part's title stands above it in the answer."""
    temperature: float = 0.0
    """0 is greedy; plans and parts are drawn alike."""
    seed: int | None = None
    """Key of the noise; None draws one at random."""
    drafter: str | None = None
    """Who proposes; None leaves it to the model's own settings."""
    deadline_s: float | None = None
    """Seconds from the request's start after which no further part begins; None sets no limit. If no part is
    planned by then, the question is answered directly."""

    @property
    def num_plannable(self) -> int:
        """Most parts that a plan is asked for."""
        return min(self.max_parts, max(_MIN_PARTS, self.max_answer_tokens // MIN_PART_TOKENS))

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, get_args(Mode))
        _one_of("visibility", self.visibility, get_args(Visibility))
        for name in _WHOLE:
            value = getattr(self, name)
            if (isinstance(value, bool) or not isinstance(value, int)) and not (value is None and name in _MAY_BE_NONE):
                raise ConfigError(f"`{name}` must be a whole number, got {value!r}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"`{name}` must be True or False, got {getattr(self, name)!r}")
        for name in ("max_answer_tokens", "max_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        for name in ("max_rows", "max_slots"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {limit}; None sets no limit")
        if not _MIN_PARTS <= self.max_parts <= MAX_PARTS:
            raise ConfigError(f"`max_parts` must be in [{_MIN_PARTS}, {MAX_PARTS}], got {self.max_parts}")
        if not _is_real(self.temperature) or self.temperature < 0:
            raise ConfigError(f"`temperature` must be a number of at least 0, got {self.temperature!r}; 0 is greedy")
        if self.deadline_s is not None and not (_is_real(self.deadline_s) and self.deadline_s > 0):
            raise ConfigError(f"`deadline_s` must be above 0 seconds, got {self.deadline_s!r}; None sets no limit")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
