"""Every sampling parameter, alone and combined, against transformers' own processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

from foretell.errors import ConfigError, NumericsError
from foretell.params import SamplingParams
from foretell.verify.processors import Processors

V = 60
EOS_IDS = [7, 11]
NUM_PROMPT_TOKENS = 6
CONTEXT = [3, 9, 3, 14, 9, 2, 14, 9, 30, 3, 14, 9]
"""Ends in the bigram (14, 9), which 2 and 30 have followed; prompt and output both repeat tokens."""


def boost_successor(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A caller's processor that depends on the path and works in place."""
    scores[:, (input_ids[0, -1] + 1) % scores.shape[1]] += 2.0
    return scores


ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 500},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "typical_p": {"typical_p": 0.7},
    "tiny typical_p": {"typical_p": 1e-6},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition reward": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.2},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "negative penalties": {"presence_penalty": -0.7, "frequency_penalty": -0.4},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "no_repeat_ngram_size beyond the context": {"no_repeat_ngram_size": 40},
    "bad_words_ids": {"bad_words_ids": [[5], [9, 20], [14, 9, 21], [9, 14, 22], list(range(30))]},
    "logit_bias": {"logit_bias": {4: 3.5, 50: -2.0, 9: float("-inf")}},
    "min_new_tokens": {"min_new_tokens": 7},
    "min_new_tokens reached": {"min_new_tokens": 6},
    "min_new_tokens with stop ids": {"min_new_tokens": 7, "stop_token_ids": [40]},
    "logits_processors": {"logits_processors": [boost_successor, SuppressTokensLogitsProcessor([1, 2])]},
    "everything": {
        "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "repetition_penalty": 1.2,
        "presence_penalty": 0.5, "frequency_penalty": 0.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[5], [9, 20]],
        "logit_bias": {4: 3.5}, "min_new_tokens": 9, "logits_processors": [boost_successor],
    },
}  # fmt: skip


def make_row(seed: int, scale: float = 3.0, size: int = V) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def make_processors(
    params: SamplingParams, vocab_size: int = V, num_prompt_tokens: int = NUM_PROMPT_TOKENS
) -> Processors:
    return Processors(params, num_prompt_tokens=num_prompt_tokens, eos_ids=EOS_IDS, vocab_size=vocab_size)


def dense(processors: Processors, row: Tensor, context: Sequence[int]) -> Tensor:
    law = processors.law(row, context)
    assert np.isfinite(law.log_probs).all()
    assert np.exp(law.log_probs).sum() == pytest.approx(1.0, abs=1e-9)
    assert len(set(law.ids.tolist())) == len(law.ids)
    log_probs = torch.full((processors.vocab_size,), float("-inf"), dtype=torch.float64)
    log_probs[torch.from_numpy(law.ids)] = torch.from_numpy(law.log_probs)
    return log_probs


def assert_same_law(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours > -torch.inf, theirs > -torch.inf)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("seed", range(4))
def test_each_parameter_agrees_with_transformers(name: str, seed: int, twin: Callable[..., Tensor]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **ALONE[name]})
    row = make_row(seed)
    theirs = twin(params, row, CONTEXT, NUM_PROMPT_TOKENS, EOS_IDS)
    assert_same_law(dense(make_processors(params), row, CONTEXT), theirs)


WITHOUT_EFFECT_HERE = {
    "nothing",
    "min_new_tokens reached",
    "top_k beyond the vocabulary",
    "no_repeat_ngram_size beyond the context",
}


@pytest.mark.parametrize("name", sorted(ALONE.keys() - WITHOUT_EFFECT_HERE))
def test_each_parameter_changes_the_law_trtllm_17701(name: str) -> None:
    # Penalties that a tree-verifying engine accepts and then ignores: TensorRT-LLM#17701, vllm#9834.
    plain = make_processors(SamplingParams(temperature=1.0))
    changed = make_processors(SamplingParams(**{"temperature": 1.0, **ALONE[name]}))
    row = make_row(0, scale=1.0)
    assert not torch.equal(dense(plain, row, CONTEXT), dense(changed, row, CONTEXT))


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.2, 3.0),
    "top_k": st.integers(1, V + 5),
    "top_p": st.floats(0.05, 0.99),
    "min_p": st.floats(0.001, 0.9),
    "typical_p": st.floats(0.05, 0.99),
    "repetition_penalty": st.floats(0.5, 2.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": st.lists(st.lists(st.sampled_from([3, 9, 14, 2, 30, 50]), min_size=1, max_size=3), max_size=5),
    "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-5.0, 5.0), max_size=5),
    "min_new_tokens": st.integers(0, 20),
    "logits_processors": st.just([boost_successor]),
}


@settings(deadline=None, max_examples=150)
@given(
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    seed=st.integers(0, 2**32),
    scale=st.floats(0.5, 5.0),
    output_ids=st.lists(st.sampled_from([3, 9, 14, 2, 30]), max_size=20),
)
def test_combinations_agree_with_transformers(
    twin: Callable[..., Tensor], options: dict[str, Any], seed: int, scale: float, output_ids: list[int]
) -> None:
    params = SamplingParams(**{"temperature": 1.0, **options})
    context = [*CONTEXT[:NUM_PROMPT_TOKENS], *output_ids]
    row = make_row(seed, scale)
    theirs = twin(params, row, context, NUM_PROMPT_TOKENS, EOS_IDS)
    assert_same_law(dense(make_processors(params), row, context), theirs)


@pytest.mark.parametrize("size", [49_152, 262_144])
@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
@pytest.mark.parametrize(
    "options",
    [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.05}, {"typical_p": 0.9}, {"top_k": 40, "top_p": 0.8}],
    ids=str,
)
def test_real_vocabularies_peaked_and_flat(
    size: int, scale: float, options: dict[str, Any], twin: Callable[..., Tensor]
) -> None:
    params = SamplingParams(temperature=1.0, **options)
    row = make_row(5, scale, size)
    ours = dense(make_processors(params, size), row, CONTEXT)
    theirs = twin(params, row, CONTEXT, NUM_PROMPT_TOKENS, EOS_IDS)
    # Sums of 49,152 float32 numbers may put the border one token further in or out, but no more.
    differing = (ours > -torch.inf) != (theirs > -torch.inf)
    assert int(differing.sum()) <= 2
    assert float(ours.exp()[differing].sum() + theirs.exp()[differing].sum()) < 1e-4
    torch.testing.assert_close(ours[~differing], theirs[~differing], atol=1e-4, rtol=0)


def test_order_is_that_of_transformers_generate() -> None:
    """The processed scores of a real `generate` call, everything on, against ours from the same raw logits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5, eos_token_id=EOS_IDS, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = torch.tensor([CONTEXT])
    common: dict[str, Any] = {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.95, "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [9, 20]], "min_new_tokens": 5, "max_new_tokens": 12,
    }  # fmt: skip
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=GenerationConfig(
            **common,
            do_sample=True,
            sequence_bias=[[[4], 2.0]],
            eos_token_id=EOS_IDS,
            pad_token_id=0,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        ),
        logits_processor=LogitsProcessorList([boost_successor]),
    )
    params = SamplingParams(**common, logit_bias={4: 2.0}, logits_processors=[boost_successor])
    processors = make_processors(params, num_prompt_tokens=len(CONTEXT))
    assert len(result.scores) >= 5
    for step, (raw, processed) in enumerate(zip(result.logits, result.scores)):
        context = result.sequences[0, : len(CONTEXT) + step].tolist()
        assert_same_law(dense(processors, raw[0], context), processed[0].double().log_softmax(0))


def test_greedy_applies_edits_and_no_filter(twin: Callable[..., Tensor]) -> None:
    params = SamplingParams(repetition_penalty=1.7, logit_bias={4: 3.5}, logits_processors=[boost_successor])
    row = make_row(3)
    scores = make_processors(params).edit(row, CONTEXT)
    theirs = twin(params, row, CONTEXT, NUM_PROMPT_TOKENS, EOS_IDS)
    torch.testing.assert_close(torch.from_numpy(scores).double().log_softmax(0), theirs, atol=1e-5, rtol=0)
    law = make_processors(params).law(row, CONTEXT)
    assert law.ids.tolist() == [int(theirs.argmax())]
    assert law.log_probs.tolist() == [0.0]


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_top_k_keeps_ties_as_transformers_does(top_k: int, twin: Callable[..., Tensor]) -> None:
    row = make_row(1).bfloat16().round()  # many ties
    params = SamplingParams(temperature=1.0, top_k=top_k)
    assert_same_law(
        dense(make_processors(params), row, CONTEXT), twin(params, row, CONTEXT, NUM_PROMPT_TOKENS, EOS_IDS)
    )


@pytest.mark.parametrize("option", ["top_p", "typical_p"])
@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9])
def test_equal_scores_share_their_fate(option: str, mass: float, twin: Callable[..., Tensor]) -> None:
    row = make_row(1).bfloat16().round()
    params = SamplingParams(temperature=1.0, **{option: mass})  # type: ignore[arg-type]
    kept = dense(make_processors(params), row, CONTEXT) > -torch.inf
    theirs = twin(params, row, CONTEXT, NUM_PROMPT_TOKENS, EOS_IDS) > -torch.inf
    tied = torch.isin(row, row[theirs])
    assert torch.equal(kept, tied)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dense(make_processors(params), row[order], CONTEXT) > -torch.inf, kept[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["nothing", "everything", "repetition_penalty", "logits_processors"])
def test_rows_are_left_as_they_were(dtype: torch.dtype, name: str) -> None:
    row = make_row(2).to(dtype)
    before = row.clone()
    with torch.inference_mode():
        make_processors(SamplingParams(**{"temperature": 1.0, **ALONE[name]})).law(row, CONTEXT)
    assert torch.equal(row, before)


def test_a_row_with_gradients_is_accepted() -> None:
    make_processors(SamplingParams(temperature=1.0)).law(make_row(2).requires_grad_(), CONTEXT)


def test_padding_beyond_the_vocabulary_is_never_looked_at() -> None:
    params = SamplingParams(**{"temperature": 1.0, **ALONE["everything"]})
    row = make_row(2)
    padded = torch.cat([row, torch.tensor([1e4, float("nan"), float("inf")])])
    assert torch.equal(dense(make_processors(params), padded, CONTEXT), dense(make_processors(params), row, CONTEXT))


def test_context_ids_beyond_the_vocabulary_are_passed_over() -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "no_repeat_ngram_size": 1}
    params = SamplingParams(temperature=1.0, **options)
    row = make_row(2)
    with_strangers = [V, *CONTEXT[1:NUM_PROMPT_TOKENS], V + 3, *CONTEXT[NUM_PROMPT_TOKENS:]]
    without = [CONTEXT[2], *CONTEXT[1:]]
    assert_same_law(dense(make_processors(params), row, with_strangers), dense(make_processors(params), row, without))


def test_a_processor_sees_prompt_output_and_path() -> None:
    seen: list[Tensor] = []

    def record(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape == (1, V)
        assert scores.dtype == torch.float32
        seen.append(input_ids.clone())
        input_ids.zero_()  # spoils its own copy only
        return scores

    params = SamplingParams(logits_processors=[record, record], no_repeat_ngram_size=2)
    context = list(CONTEXT)
    make_processors(params).law(make_row(0).bfloat16(), context)
    assert [ids.tolist() for ids in seen] == [[CONTEXT], [CONTEXT]]
    assert seen[0].dtype == torch.int64
    assert context == CONTEXT


def test_a_processor_list_is_a_processor() -> None:
    suppress = SuppressTokensLogitsProcessor([1, 2])
    alone = make_processors(SamplingParams(temperature=1.0, logits_processors=[suppress]))
    listed = make_processors(SamplingParams(temperature=1.0, logits_processors=[LogitsProcessorList([suppress])]))
    assert torch.equal(dense(alone, make_row(0), CONTEXT), dense(listed, make_row(0), CONTEXT))


@pytest.mark.parametrize("result", [torch.zeros(V), torch.zeros(1, V + 1), None], ids=["1-D", "too wide", "None"])
def test_a_processor_that_returns_something_else_is_refused(result: Any) -> None:
    params = SamplingParams(logits_processors=[lambda input_ids, scores: result])
    with pytest.raises(ConfigError, match=r"expected scores of shape \(1, 60\)"):
        make_processors(params).law(make_row(0), CONTEXT)


def test_ignore_eos_leaves_eos_possible_before_min_new_tokens() -> None:
    params = SamplingParams(temperature=1.0, min_new_tokens=50, ignore_eos=True, stop_token_ids=[40])
    log_probs = dense(make_processors(params), make_row(0), CONTEXT)
    assert (log_probs == -torch.inf).nonzero().flatten().tolist() == [40]


def test_eos_ids_beyond_the_vocabulary_are_passed_over() -> None:
    params = SamplingParams(temperature=1.0, min_new_tokens=50)
    processors = Processors(params, num_prompt_tokens=0, eos_ids=[V + 1], vocab_size=V)
    assert not processors.has_edits


def test_a_banned_eos_id_stays_banned() -> None:
    # transformers drops EOS ids from `bad_words_ids` without a word.
    params = SamplingParams(temperature=1.0, bad_words_ids=[[EOS_IDS[0]]])
    assert dense(make_processors(params), make_row(0), CONTEXT)[EOS_IDS[0]] == -torch.inf


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_and_warns_of_nothing(temperature: float) -> None:
    row = make_row(0)
    law = make_processors(SamplingParams(temperature=temperature)).law(row, CONTEXT)
    assert law.ids[law.log_probs.argmax()] == int(row.argmax())
    assert np.exp(law.log_probs.max()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["logit_bias", "bad_words_ids", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [-1, V, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(name: str, token_id: int) -> None:
    value: Any = {"logit_bias": {token_id: 1.0}, "bad_words_ids": [[1, token_id]], "stop_token_ids": [token_id]}[name]
    with pytest.raises(ConfigError, match=f"`{name}` holds token id {token_id}, the vocabulary ends at 59"):
        make_processors(SamplingParams(**{name: value}))


@pytest.mark.parametrize("bias", [float("nan"), float("inf")])
def test_a_bias_that_leaves_no_distribution_is_refused(bias: float) -> None:
    with pytest.raises(ConfigError, match="use a finite number, or -inf"):
        SamplingParams(logit_bias={3: bias})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 31, V - 1])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 3}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_with_nan_or_infinity_raises_vllm_53029(
    value: float, where: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    row = make_row(0).to(dtype)
    row[where] = value
    with pytest.raises(NumericsError, match="from the model hold"):
        make_processors(SamplingParams(**options)).law(row, CONTEXT)


def test_a_row_of_minus_infinity_raises() -> None:
    with pytest.raises(NumericsError, match="all 60 logits from the model are -inf"):
        make_processors(SamplingParams(temperature=1.0)).law(torch.full((V,), float("-inf")), CONTEXT)


def test_forbidding_every_token_raises() -> None:
    params = SamplingParams(temperature=1.0, bad_words_ids=[[token_id] for token_id in range(V)])
    with pytest.raises(NumericsError, match="forbid fewer tokens"):
        make_processors(params).law(make_row(0), CONTEXT)


def test_a_processor_that_returns_nan_raises() -> None:
    params = SamplingParams(logits_processors=[lambda input_ids, scores: scores * float("nan")])
    with pytest.raises(NumericsError, match="logits processors hold nan"):
        make_processors(params).law(make_row(0), CONTEXT)


def test_penalties_beyond_float32() -> None:
    row = make_row(0)
    row[CONTEXT] = torch.linspace(-50.0, 50.0, len(CONTEXT))
    dense(make_processors(SamplingParams(temperature=1.0, repetition_penalty=1e38)), row, CONTEXT)
    with pytest.raises(NumericsError, match="weaker penalties"):
        make_processors(SamplingParams(temperature=1.0, repetition_penalty=1e-38)).law(row, CONTEXT)


def test_minus_infinity_in_a_row_is_never_drawn() -> None:
    row = make_row(0)
    row[::2] = -torch.inf
    for options in ({}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 0.001}, {"typical_p": 0.99}):
        law = make_processors(SamplingParams(temperature=1.0, **options)).law(row, CONTEXT)
        assert (law.ids % 2 == 1).all()
