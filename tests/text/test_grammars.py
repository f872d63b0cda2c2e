"""Texts of every kind of tokenizer that can be held to a grammar: what was allowed as tokens matches as text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from foretell.params import SamplingParams
from foretell.text.detokenizer import Detokenizer
from foretell.text.tokenizer import Tokenizer
from foretell.verify.constraint import Grammars
from foretell.verify.edits import Context

WORDS = ["the cat", "déjà", "x"]


def walks(tokenizer: Tokenizer, num_walks: int, **grammar: Any) -> Iterator[str]:
    """Yield texts, each of tokens drawn from those that the grammar allows."""
    eos = tokenizer.eos_id
    assert eos is not None
    grammars = Grammars(tokenizer, [eos])
    for seed in range(num_walks):
        constraint, draw = grammars.constraint(SamplingParams(**grammar)), random.Random(seed)
        assert constraint is not None
        ids: list[int] = []
        while not ids or ids[-1] != eos:
            scores = constraint.narrow(np.zeros(tokenizer.vocab_size, np.float32), Context(ids, 0))  # [V]
            allowed = np.flatnonzero(scores == 0).tolist()
            ids.append(eos if eos in allowed and draw.random() < 0.5 else draw.choice(allowed))
        detokenizer = Detokenizer(tokenizer)
        yield "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
def test_what_is_allowed_as_tokens_matches_as_text(tokenizers: Mapping[str, Tokenizer], kind: str) -> None:
    regex = r"the[a-e ]{2,6}(—|é|x){1,3}\n"
    assert all(re.fullmatch(regex, text) for text in walks(tokenizers[kind], 20, regex=regex))
    schema = {"type": "array", "items": {"enum": WORDS}, "minItems": 1, "maxItems": 3}
    for text in walks(tokenizers[kind], 20, json_schema=schema):
        values = json.loads(text)
        assert 1 <= len(values) <= 3
        assert set(values) <= set(WORDS)
