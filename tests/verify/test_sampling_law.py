"""The joint law of the first three sampled tokens, for each sampling parameter, against exact enumeration.

The judge enumerates all outcomes of a toy model with transformers' processors; a chi-square test compares what the
chooser draws. Each parameter's law also has to be told apart from the law without it, which shows that the test has the
power to see an ignored parameter (vllm#9834, vllm#42802).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.params import SamplingParams
from foretell.verify.choose import TokenChooser

V = 5
EOS_IDS = [4]
PROMPT = [0, 1, 0, 2]
NUM_DRAWS = 1600
ROWS = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.2
"""Row i: logits of the token after token i."""


def favour_repeats_of_the_first(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A caller's processor that looks far back along the path."""
    scores[:, input_ids[0, len(PROMPT) - 1 :].min()] += 1.0
    return scores


PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.6},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [1, 2]]},
    "logit_bias": {"logit_bias": {2: 1.5}},
    "min_new_tokens": {"min_new_tokens": 2},
    "logits_processors": {"logits_processors": [favour_repeats_of_the_first]},
    "several": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "top_k": 4},
}


def draw(params: SamplingParams, seed: int, sequence_key: int) -> tuple[int, ...]:
    chooser = TokenChooser(
        params,
        num_prompt_tokens=len(PROMPT),
        eos_ids=EOS_IDS,
        seed=seed,
        sequence_key=sequence_key,
        vocab_size=V,
    )
    context = list(PROMPT)
    for _ in range(3):
        context.append(chooser.choose(ROWS[context[-1]], context))
    return tuple(context[len(PROMPT) :])


def enumerate_law(params: SamplingParams, twin: Callable[..., Tensor]) -> dict[tuple[int, ...], float]:
    """Return the probability of each possible outcome of three tokens."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, probability in law.items():
            context: Sequence[int] = [*PROMPT, *path]
            probs = twin(params, ROWS[context[-1]], context, len(PROMPT), EOS_IDS).exp().tolist()
            longer.update({(*path, token_id): probability * probs[token_id] for token_id in range(V)})
        law = {path: probability for path, probability in longer.items() if probability > 0}
    assert sum(law.values()) == pytest.approx(1.0)
    return law


@pytest.mark.parametrize("name", ["plain", *PARAMETERS])
def test_three_tokens_follow_their_law_vllm_9834(
    name: str, twin: Callable[..., Tensor], p_value: Callable[..., float]
) -> None:
    params = SamplingParams(**{"temperature": 1.0, **PARAMETERS.get(name, {})})
    # Half of the draws differ by seed, half by sequence key: both must be as good as fresh randomness.
    counts = Counter(draw(params, seed, 0) for seed in range(NUM_DRAWS // 2))
    counts += Counter(draw(params, 1_000_003, key) for key in range(1, NUM_DRAWS // 2 + 1))
    assert p_value(counts, enumerate_law(params, twin)) > 1e-3
    if name != "plain":
        without = enumerate_law(SamplingParams(temperature=1.0), twin)
        assert p_value(counts, without) < 1e-6


def test_noise_that_is_not_keyed_by_position_is_caught(
    twin: Callable[..., Tensor], p_value: Callable[..., float]
) -> None:
    params = SamplingParams(temperature=1.0)

    def draw_with_one_noise(seed: int) -> tuple[int, ...]:
        chooser = TokenChooser(params, num_prompt_tokens=0, eos_ids=EOS_IDS, seed=seed, sequence_key=0, vocab_size=V)
        path: list[int] = [PROMPT[-1]]
        for _ in range(3):
            path.append(chooser.choose(ROWS[path[-1]], [0]))  # the same position again and again
        return tuple(path[1:])

    counts = Counter(draw_with_one_noise(seed) for seed in range(NUM_DRAWS))
    assert p_value(counts, enumerate_law(params, twin)) < 1e-6
