"""Keys and values that prompt tokens alone see: as in training, and of no consequence to any token's own row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foretell.drafters.prompt_tokens import PromptTokens
from foretell.engine.prompting import Prompting
from foretell.hardware.prompt_policy import GuessRanks
from foretell.params import SamplingParams
from foretell.train.anchors import Anchors, read_texts, run_prompts
from prompt_lab import Watcher

NUM_PREFIX = 5


def with_prefix(lab: Any) -> PromptTokens:
    config, dtype = lab.model.config, lab.model.dtype
    random = torch.Generator().manual_seed(3)
    counts = np.ones((4, 4), dtype=np.int64)
    counts[0, 0] = 40
    prefix = torch.randn(
        config.num_layers, 2 * config.num_kv_heads, NUM_PREFIX, config.head_dim, generator=random, dtype=dtype
    )
    embeddings = torch.randn(1, 2, config.hidden_size, generator=random, dtype=dtype)
    return PromptTokens(embeddings, GuessRanks(counts), None, prefix)


@pytest.mark.parametrize("policy", ["canonical", "copy"])
def test_output_is_plain_and_guesses_are_those_of_training(family_lab: Any, policy: Any) -> None:
    tokens, params = with_prefix(family_lab), SamplingParams(max_new_tokens=24)
    engine = family_lab.engine(policy, prompting=Prompting(tokens, family_lab.VOCAB_SIZE))
    prompt = family_lab.prompt(1, 9)
    drafter = Watcher(tokens, family_lab.VOCAB_SIZE, eos_ids=frozenset())
    run = family_lab.run(engine, family_lab.request(prompt, drafter, params))
    token_ids = run.sequence.token_ids
    assert token_ids == family_lab.decode(None, prompt, params)
    num_checked = 0
    with torch.no_grad():
        text = read_texts(family_lab.model, torch.tensor([token_ids]))
        for num_tokens, guesses in drafter.told:
            if guesses is None or policy == "canonical":  # there the last accepted row may be one yet to be emitted
                continue
            place = num_tokens - 2  # of the row that chose the last token
            anchors = Anchors(torch.tensor([[place]]), torch.ones(1, 1, dtype=torch.bool))
            size = guesses.hidden.shape[1]
            expected = run_prompts(family_lab.model, text, anchors, tokens.embeddings[:, :size], tokens.prefix)
            torch.testing.assert_close(guesses.hidden.mean(0), expected[0, 0], rtol=1e-4, atol=1e-4)
            num_checked += 1
    assert policy == "canonical" or num_checked > 3
