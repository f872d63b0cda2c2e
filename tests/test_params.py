"""Sampling parameters are checked once, in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretell.errors import ConfigError
from foretell.params import SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": "5"},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": True},
        {"temperature": "1"},
        {"temperature": None},
        {"top_k": None},
        {"seed": "a"},
        {"logprobs": 1.5},
        {"stop": None},
        {"stop": [1]},
        {"stop_token_ids": None},
        {"bad_words_ids": [1]},
        {"logit_bias": [1]},
        {"logit_bias": {"0": 1}},
        {"logits_processors": [1]},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {0: 1e300}},
        {"regex": 5},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": {"enum": {1, 2}}},
        {"json_schema": "[" * 100_000},
        {"json_schema": {}, "regex": "a"},
    ],
)
def test_a_wrong_type_or_size_is_told_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}`") as caught:
        SamplingParams(**wrong)
    assert "\n" not in str(caught.value)


def test_numbers_of_array_libraries_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert params.top_k == 3


def test_a_schema_is_kept_as_json() -> None:
    schema = {"enum": [1]}
    params = SamplingParams(json_schema=schema)
    schema["enum"].append(2)
    assert params.json_schema == '{"enum": [1]}'
    assert replace(params, max_new_tokens=4).json_schema == params.json_schema
    assert SamplingParams(json_schema=params.json_schema) == params


@pytest.mark.parametrize("grammar", [{"json_schema": {}}, {"regex": ""}])
def test_a_constrained_output_ends_with_eos(grammar: dict[str, Any]) -> None:
    assert SamplingParams(**grammar).is_constrained
    assert not SamplingParams().is_constrained
    with pytest.raises(ConfigError, match="`ignore_eos` goes on past the end"):
        SamplingParams(**grammar, ignore_eos=True)
