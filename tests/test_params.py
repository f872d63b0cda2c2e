"""Sampling parameters are checked once, in one line."""

from __future__ import annotations

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
    ],
)
def test_a_wrong_type_or_size_is_told_in_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}`") as caught:
        SamplingParams(**wrong)
    assert "\n" not in str(caught.value)


def test_numbers_of_array_libraries_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert params.top_k == 3
