"""What one timed run gives, and how it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One arm's run on one prompt. None stands for what the arm does not report."""

    token_ids: tuple[int, ...]
    wall_s: float
    """From the call to its return, by the benchmark's own clock."""
    ttft_s: float
    """From the request's start to its first token."""
    decode_s: float
    """From the first token to the last."""
    num_first_tokens: int = 1
    """Tokens that the first pass emitted: they arrived together, so all of them count as the first."""
    prefill_s: float | None = None
    num_passes: int | None = None
    """Target passes after prefill."""
    num_rows: int | None = None
    forward_s: float | None = None
    draft_s: float | None = None
    tokens_per_pass_counts: Mapping[int, int] = field(default_factory=dict)
    """Passes by the number of tokens that they emitted."""
    drafted: Mapping[str, int] | None = None
    """Draft tokens by source."""
    accepted: Mapping[str, int] | None = None
    drafter_memory_bytes: int = 0
    """What the drafter held when the run ended."""
    num_draft_passes: int | None = None
    """Passes of a draft model, its prompt's excluded; 0 where none runs."""
    num_confirmed: int | None = None
    """Tokens of the second stage that the draft model's own choice confirmed."""
    target_bytes: int | None = None
    """What target passes after prefill read."""
    draft_bytes: int | None = None
    """What draft passes read."""

    @property
    def num_decode_tokens(self) -> int:
        """Tokens after the first, which `decode_s` was spent on."""
        return max(0, len(self.token_ids) - self.num_first_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` takes and `from_json` understands."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Measurement:
        """Build from `to_json`'s dict after a round trip through JSON, which turns integer keys into strings.

        Raises:
            KeyError, TypeError, ValueError: the record is not a measurement.
        """
        values = {name.name: record[name.name] for name in fields(cls)}
        values["token_ids"] = tuple(values["token_ids"])
        values["tokens_per_pass_counts"] = {int(k): v for k, v in values["tokens_per_pass_counts"].items()}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All arms on one prompt, one after the other: the unit within which speeds are compared."""

    prompt: int
    """Index of the prompt in the suite."""
    repeat: int
    measurements: Mapping[str, Measurement]
    """By arm key, in the order in which they ran."""
