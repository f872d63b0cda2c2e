"""Low-rank additions for the rows of prompt tokens: as in training, and of no consequence to any token's own row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foretell.drafters.prompt_tokens import PromptTokens
from foretell.engine.prompting import Prompting
from foretell.errors import ConfigError
from foretell.hardware.prompt_policy import GuessRanks
from foretell.models.layers import LowRank
from foretell.models.llama import LINEARS, LayerAdapters, Llama
from foretell.params import SamplingParams
from foretell.train.anchors import Anchors, read_texts, run_prompts
from prompt_lab import Watcher


def with_adapters(lab: Any) -> PromptTokens:
    model = lab.model
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=random, dtype=model.dtype)

    counts = np.ones((4, 4), dtype=np.int64)
    counts[0, 0] = 40
    adapters = {}
    for index, layer in enumerate(model.layers):
        linears = [getattr(layer, name) for name in LINEARS]
        pairs = [LowRank(draw(2, linear.in_features), draw(linear.out_features, 2)) for linear in linears]
        adapters[index] = LayerAdapters(*pairs)
    return PromptTokens(draw(1, 2, model.config.hidden_size), GuessRanks(counts), adapters=adapters)


def test_output_is_plain_and_guesses_are_those_of_training(family_lab: Any) -> None:
    params = SamplingParams(max_new_tokens=24)
    prompt = family_lab.prompt(1, 9)
    truth = family_lab.decode(None, prompt, params)
    if not isinstance(family_lab.model, Llama):
        return
    before = family_lab.model.layers
    tokens = with_adapters(family_lab)
    try:
        engine = family_lab.engine("copy", prompting=Prompting(tokens, family_lab.VOCAB_SIZE))
        drafter = Watcher(tokens, family_lab.VOCAB_SIZE, eos_ids=frozenset())
        run = family_lab.run(engine, family_lab.request(prompt, drafter, params))
        assert run.sequence.token_ids == truth
        num_checked = 0
        with torch.no_grad():
            text = read_texts(family_lab.model, torch.tensor([truth]))
            for num_tokens, guesses in drafter.told:
                if guesses is None:
                    continue
                anchors = Anchors(torch.tensor([[num_tokens - 2]]), torch.ones(1, 1, dtype=torch.bool))
                embeddings = tokens.embeddings[:, : guesses.hidden.shape[1]]
                expected = run_prompts(family_lab.model, text, anchors, embeddings, is_adapted=True)
                plain = run_prompts(family_lab.model, text, anchors, embeddings)
                torch.testing.assert_close(guesses.hidden.mean(0), expected[0, 0], rtol=1e-4, atol=1e-4)
                assert not torch.allclose(expected, plain, atol=1e-3)
                num_checked += 1
        assert num_checked > 3
    finally:
        family_lab.model.layers = before


def test_compiled_passes_refuse_adapters(lab: Any) -> None:
    tokens = with_adapters(lab)
    engine = lab.engine("copy")
    engine.runner.compiled = object()
    with pytest.raises(ConfigError, match="low-rank adapters run in eager passes"):
        tokens.install(engine.runner)
