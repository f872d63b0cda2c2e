"""T(N) as a table: look-up, interpolation, and the way to a file and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import ConfigError
from foretell.hardware.profile import LatencyProfile


def make(**changes: Any) -> LatencyProfile:
    fields: dict[str, Any] = {
        "key": {"model": "tiny", "threads": "2"},
        "contexts": (0, 512, 2048),
        "num_rows": (1, 4, 8),
        "pass_s": ((1.0, 2.0, 4.0), (2.0, 3.0, 5.0), (8.0, 9.0, 11.0)),
    }
    return LatencyProfile(**{**fields, **changes})


@pytest.mark.parametrize(
    ("num_rows", "context", "seconds"),
    [
        (1, 0, 1.0),
        (2, 0, 2.0),  # the next measured count, never a guess between two
        (4, 0, 2.0),
        (5, 0, 4.0),
        (9, 0, 4.5),  # beyond the last measured count every row costs what the last ones did
        (1, 256, 1.5),
        (8, 512, 5.0),
        (4, 1280, 6.0),
        (1, 2048, 8.0),
        (1, 99_999, 8.0),
    ],
)
def test_seconds(num_rows: int, context: int, seconds: float) -> None:
    assert make().seconds(num_rows, context) == pytest.approx(seconds)


def test_curve() -> None:
    profile = make()
    assert profile.max_rows == 8
    assert profile.curve(0) == [1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert profile.curve(256) == [profile.seconds(size, 256) for size in range(1, 9)]


@given(st.integers(1, 12), st.integers(0, 3000), st.integers(0, 3000))
def test_seconds_rise_with_rows_and_context(num_rows: int, context: int, other: int) -> None:
    profile = make()
    low, high = sorted((context, other))
    assert profile.seconds(num_rows, low) <= profile.seconds(num_rows, high) + 1e-12
    assert profile.seconds(num_rows, low) <= profile.seconds(num_rows + 1, low) + 1e-12


def test_json_round_trip() -> None:
    profile = make(is_bit_exact=True, largest_gap=0.25, calibration={"num_buckets": 4})
    assert LatencyProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert LatencyProfile.from_json(make().to_json()) == make()


@pytest.mark.parametrize(
    "changes",
    [
        {"contexts": ()},
        {"contexts": (512, 0, 2048)},
        {"contexts": (0, 0, 2048)},
        {"num_rows": ()},
        {"num_rows": (4, 1, 8)},
        {"num_rows": (1, 1, 8)},
        {"pass_s": ((1.0, 2.0, 4.0),)},
        {"pass_s": ((1.0,), (1.0,), (1.0,))},
        {"pass_s": ((0.0, 2.0, 4.0), (2.0, 3.0, 5.0), (8.0, 9.0, 11.0))},
        {"pass_s": ((1.0, float("nan"), 4.0), (2.0, 3.0, 5.0), (8.0, 9.0, 11.0))},
        {"pass_s": ((1.0, 2.0, float("inf")), (2.0, 3.0, 5.0), (8.0, 9.0, 11.0))},
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="run `foretell tune` again"):
        make(**changes)


@pytest.mark.parametrize(
    "name", ["key", "contexts", "num_rows", "pass_s", "is_bit_exact", "largest_gap", "calibration"]
)
def test_a_document_without_a_field_is_refused(name: str) -> None:
    document = make().to_json()
    del document[name]
    with pytest.raises(ConfigError, match=f"damaged .*{name}.*run `foretell tune` again"):
        LatencyProfile.from_json(document)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("contexts", 5),
        ("contexts", ["x"]),
        ("pass_s", [[None]]),
        ("largest_gap", "wide"),
        ("key", 3),
        ("calibration", 1),
    ],
)
def test_a_document_of_other_types_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="run `foretell tune` again"):
        LatencyProfile.from_json({**make().to_json(), name: value})


@pytest.mark.parametrize("document", [[], "x", 5, None])
def test_anything_but_an_object_is_refused(document: Any) -> None:
    with pytest.raises(ConfigError, match="run `foretell tune` again"):
        LatencyProfile.from_json(document)
