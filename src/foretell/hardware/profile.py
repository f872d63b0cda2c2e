"""T(N): the seconds that a pass of N rows takes, measured on this machine."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyProfile:
    """Measured pass latencies of one model on one machine, and what else a tuning found.

    Source: hardware-aware sizing as in Sequoia, arXiv:2402.12374, and parallel prompt decoding, arXiv:2405.18628.
    """

    key: dict[str, str]
    """What the numbers hold for: model, dtype, device, threads, compile mode, versions."""
    contexts: tuple[int, ...]
    """Context lengths at which passes were measured, ascending."""
    num_rows: tuple[int, ...]
    """Row counts that were measured, ascending."""
    pass_s: tuple[tuple[float, ...], ...]
    """Seconds of a pass, head and mask included, by context and row count."""
    is_bit_exact: bool | None = None
    """Whether chain rows gave the same logits as plain rows, bit for bit; None when not tested."""
    largest_gap: float = 0.0
    """Largest difference between logits of chain rows and plain rows."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """State of the acceptance estimates."""
    guess_ranks: dict[str, Any] = field(default_factory=dict)
    """How good the guesses of prompt tokens are: `counts`, see `GuessRanks`, and `digest` of those prompt tokens."""

    def __post_init__(self) -> None:
        for counts in (self.contexts, self.num_rows):
            if not counts or list(counts) != sorted(set(counts)):
                raise ConfigError(
                    "a latency profile needs ascending contexts and row counts: run `foretell tune` again"
                )
        if len(self.pass_s) != len(self.contexts) or any(len(row) != len(self.num_rows) for row in self.pass_s):
            raise ConfigError("a latency profile's table has the wrong shape: run `foretell tune` again")
        if not all(0 < value < math.inf for row in self.pass_s for value in row):
            raise ConfigError("a latency profile's seconds must be positive: run `foretell tune` again")

    @property
    def max_rows(self) -> int:
        """The most rows of one pass."""
        return self.num_rows[-1]

    def seconds(self, num_rows: int, context: int) -> float:
        """Return T(N) at a context length: that of the next measured row count, linear between contexts.

        Beyond the last measured row count every row costs what the last ones did.
        """
        column = min(bisect_left(self.num_rows, num_rows), len(self.num_rows) - 1)
        upper = bisect_left(self.contexts, context)
        if upper == 0 or upper == len(self.contexts):
            return self._at(min(upper, len(self.contexts) - 1), column, num_rows)
        low, high = self.contexts[upper - 1], self.contexts[upper]
        weight = (context - low) / (high - low)
        return (1 - weight) * self._at(upper - 1, column, num_rows) + weight * self._at(upper, column, num_rows)

    def _at(self, row: int, column: int, num_rows: int) -> float:
        measured = self.pass_s[row]
        num_more = num_rows - self.max_rows
        if num_more <= 0:
            return measured[column]
        before = max(0, len(measured) - 2)
        num_between = max(1, self.num_rows[-1] - self.num_rows[before])
        return measured[-1] + num_more * (measured[-1] - measured[before]) / num_between

    def curve(self, context: int) -> list[float]:
        """Return T(1), T(2), … T(max_rows) at a context length."""
        return [self.seconds(num_rows, context) for num_rows in range(1, self.max_rows + 1)]

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object."""
        return {
            "key": self.key,
            "contexts": list(self.contexts),
            "num_rows": list(self.num_rows),
            "pass_s": [list(row) for row in self.pass_s],
            "is_bit_exact": self.is_bit_exact,
            "largest_gap": self.largest_gap,
            "calibration": self.calibration,
            "guess_ranks": self.guess_ranks,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LatencyProfile:
        """Return the profile that `to_json` wrote.

        Raises:
            ConfigError: a field is missing or of the wrong type.
        """
        try:
            return cls(
                key=dict(document["key"]),
                contexts=tuple(int(context) for context in document["contexts"]),
                num_rows=tuple(int(size) for size in document["num_rows"]),
                pass_s=tuple(tuple(float(value) for value in row) for row in document["pass_s"]),
                is_bit_exact=document["is_bit_exact"],
                largest_gap=float(document["largest_gap"]),
                calibration=dict(document["calibration"]),
                guess_ranks=dict(document.get("guess_ranks", {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a latency profile is damaged ({error!r}): run `foretell tune` again") from None
