"""Slow twins: transformers' own processors, and a chi-square test against an exact law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from foretell.params import SamplingParams

Twin = Callable[[SamplingParams, Tensor, Sequence[int], int, Sequence[int]], Tensor]
PValue = Callable[[Counter[Hashable], Mapping[Hashable, float]], float]


class OpenAIPenalties(LogitsProcessor):
    """https://platform.openai.com/docs: logit -= count * frequency + (count > 0) * presence, over the output only."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores)
        for token_id in input_ids[0, self.num_prompt_tokens :].tolist():
            counts[0, token_id] += 1
        return scores - counts * self.frequency - (counts > 0) * self.presence


def build_processors(
    params: SamplingParams, num_prompt_tokens: int, eos_ids: Sequence[int]
) -> LogitsProcessorList:  # in the order of `GenerationMixin._get_logits_processor`
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(key,): float(bias) for key, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(OpenAIPenalties(num_prompt_tokens, params.presence_penalty, params.frequency_penalty))
    if params.no_repeat_ngram_size:
        chain.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids]))
    if params.min_new_tokens:
        end_ids = [*eos_ids, *params.stop_token_ids]
        chain.append(MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_new_tokens, end_ids))
    chain.extend(params.logits_processors)
    if params.is_greedy:
        return chain
    chain.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1.0:
        chain.append(TypicalLogitsWarper(params.typical_p))
    return chain


def transformers_log_probs(
    params: SamplingParams, logits: Tensor, context_ids: Sequence[int], num_prompt_tokens: int, eos_ids: Sequence[int]
) -> Tensor:
    """Return log-probabilities, [V], -inf for what cannot be drawn; float64 throughout, so that it is the judge."""
    chain = build_processors(params, num_prompt_tokens, eos_ids)
    scores = chain(torch.tensor([list(context_ids)]), logits.double()[None].clone())  # [1, V]
    return scores[0].log_softmax(0)  # [V]


def pooled_p_value(counts: Counter[Hashable], law: Mapping[Hashable, float]) -> float:
    """Return the chi-square p-value of `counts` under `law`; outcomes expected less than 5 times are pooled."""
    num_draws = counts.total()
    impossible = [outcome for outcome in counts if law.get(outcome, 0.0) == 0.0]
    if impossible:
        return 0.0
    observed, expected, rare_observed, rare_expected = [], [], 0, 0.0
    for outcome, probability in law.items():
        if probability * num_draws >= 5:
            observed.append(counts[outcome])
            expected.append(probability * num_draws)
        else:
            rare_observed += counts[outcome]
            rare_expected += probability * num_draws
    if rare_expected >= 5 or not expected:
        observed.append(rare_observed)
        expected.append(rare_expected)
    elif rare_expected > 0:  # too few for a bin of their own: they join the smallest one
        smallest = expected.index(min(expected))
        observed[smallest] += rare_observed
        expected[smallest] += rare_expected
    if len(expected) == 1:
        return 1.0
    total = sum(expected)
    return float(chisquare(observed, [value * sum(observed) / total for value in expected]).pvalue)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def twin() -> Twin:
    return transformers_log_probs


@pytest.fixture(scope="session")
def p_value() -> PValue:
    return pooled_p_value
