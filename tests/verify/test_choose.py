"""The token chooser: argmax, keyed draws, and what a broken row does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretell.errors import NumericsError
from foretell.params import SamplingParams
from foretell.verify.choose import TokenChooser
from foretell.verify.noise import gumbel_noise_array

V = 97
PROMPT = [5, 6, 7]


def make_row(seed: int, scale: float = 2.0, size: int = V) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def make_chooser(
    params: SamplingParams | None = None, *, seed: int | None = 0, sequence_key: int = 0, vocab_size: int = V
) -> TokenChooser:
    return TokenChooser(
        params or SamplingParams(temperature=1.0),
        num_prompt_tokens=len(PROMPT),
        eos_ids=[2],
        seed=seed,
        sequence_key=sequence_key,
        vocab_size=vocab_size,
    )


def sample(chooser: TokenChooser, num_tokens: int = 40) -> list[int]:
    """Decode with a toy model whose rows depend on the last token and the position."""
    context = list(PROMPT)
    for _ in range(num_tokens):
        context.append(chooser.choose(make_row(context[-1] * 1000 + len(context)), context))
    return context[len(PROMPT) :]


def test_greedy_takes_the_first_of_equals() -> None:
    row = torch.zeros(V)
    row[[40, 11, 90]] = 3.0
    chooser = make_chooser(SamplingParams(), seed=None)
    assert chooser.choose(row, PROMPT) == int(row.argmax()) == 11
    assert chooser.argmax_rows(row[None]) == [11]
    penalized = make_chooser(SamplingParams(logit_bias={0: -1.0}), seed=None)
    assert penalized.choose(row, PROMPT) == 11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_is_torchs_argmax_of_the_float32_row(dtype: torch.dtype) -> None:
    chooser = make_chooser(SamplingParams())
    rows = torch.stack([make_row(seed, scale=0.2) for seed in range(200)]).to(dtype)  # bfloat16 ties abound
    expected = rows.float().argmax(dim=1).tolist()
    assert [chooser.choose(row, PROMPT) for row in rows] == expected
    assert chooser.argmax_rows(rows) == expected


def test_many_rows_at_once_may_be_padded_or_none() -> None:
    chooser = make_chooser(SamplingParams())
    rows = torch.stack([make_row(seed, size=V + 31) for seed in range(5)])
    rows[:, V:] = 1e4
    rows[2, V + 1] = float("nan")
    assert chooser.argmax_rows(rows) == [chooser.choose(row, PROMPT) for row in rows]
    assert all(token_id < V for token_id in chooser.argmax_rows(rows))
    assert chooser.argmax_rows(rows[:0]) == []


@pytest.mark.parametrize(
    ("options", "is_raw"),
    [
        ({}, True),
        ({"temperature": 1.0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"no_repeat_ngram_size": 3}, False),
        ({"bad_words_ids": [[1]]}, False),
        ({"bad_words_ids": [[1, 2]]}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"min_new_tokens": 1}, False),
        ({"min_new_tokens": 1, "ignore_eos": True}, True),
        ({"min_new_tokens": 1, "ignore_eos": True, "stop_token_ids": [3]}, False),
        ({"stop_token_ids": [3], "stop": ["."], "logprobs": 3}, True),
        ({"logits_processors": [lambda input_ids, scores: scores]}, False),
    ],
    ids=str,
)
def test_is_raw_argmax(options: dict[str, Any], is_raw: bool) -> None:
    assert make_chooser(SamplingParams(**options)).is_raw_argmax is is_raw


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 50.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"typical_p": 0.6},
    {"repetition_penalty": 1.4, "bad_words_ids": [[token_id] for token_id in range(60)]},
]


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 30.0])
def test_a_draw_is_the_argmax_of_law_plus_noise(options: dict[str, Any], scale: float) -> None:
    for seed in range(60):
        chooser = make_chooser(SamplingParams(**{"temperature": 1.0, **options}), seed=seed, sequence_key=seed % 3)
        context = PROMPT + [9] * (seed % 5)
        row = make_row(seed, scale)
        law = chooser.law(row, context)
        noisy = law.log_probs + gumbel_noise_array(seed, seed % 3, len(context), law.ids)
        assert chooser.choose(row, context) == law.ids[noisy.argmax()]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.floats(0.01, 40.0), st.integers(1, 40_000))
def test_skipping_quiet_ids_never_changes_a_draw(seed: int, position: int, scale: float, size: int) -> None:
    row = np.random.default_rng(seed).normal(0.0, scale, size).astype(np.float32)
    context = range(position)
    chooser = TokenChooser(
        SamplingParams(temperature=1.0), num_prompt_tokens=0, eos_ids=(), seed=seed, sequence_key=1, vocab_size=size
    )
    noise = gumbel_noise_array(seed, 1, position, np.arange(size))
    assert chooser.choose(torch.from_numpy(row), context) == (row - row.max() + noise).argmax()


def test_same_seed_same_tokens_and_another_seed_others_vllm_13196() -> None:
    assert sample(make_chooser(seed=1)) == sample(make_chooser(seed=1))
    outputs = {tuple(sample(make_chooser(seed=seed))) for seed in (0, 1, 2, 2**40, 2**63 - 1)}
    assert len(outputs) == 5


def test_samples_of_one_request_differ_litert_lm_3017() -> None:
    outputs = {tuple(sample(make_chooser(seed=1, sequence_key=key))) for key in range(8)}
    assert len(outputs) == 8


def test_samples_of_one_request_are_independent_litert_lm_3017(p_value: Callable[..., float]) -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    choosers = [make_chooser(seed=11, sequence_key=key, vocab_size=4) for key in (0, 1)]
    pairs = Counter(tuple(chooser.choose(row, range(position)) for chooser in choosers) for position in range(3, 4003))
    probs = row.exp().tolist()
    joint = {(first, second): probs[first] * probs[second] for first in range(4) for second in range(4)}
    assert p_value(pairs, joint) > 1e-3


def test_alone_or_among_others_a_seed_gives_the_same_vllm_6038() -> None:
    # vllm#6038 and #9441: per-request generators were ignored, or mixed up, in a batch with others.
    alone = [sample(make_chooser(seed=seed, sequence_key=key)) for seed, key in ((1, 0), (2, 0), (1, 1))]
    choosers = [make_chooser(seed=seed, sequence_key=key) for seed, key in ((1, 0), (2, 0), (1, 1))]
    contexts = [list(PROMPT) for _ in choosers]
    for _ in range(40):
        for chooser, context in reversed(list(zip(choosers, contexts))):
            context.append(chooser.choose(make_row(context[-1] * 1000 + len(context)), context))
    assert [context[len(PROMPT) :] for context in contexts] == alone


def test_draws_touch_no_generator_trtllm_19487() -> None:
    # TensorRT-LLM#19487: requests shared a generator. Here there is none: neither read nor advanced.
    torch_state, numpy_state = torch.get_rng_state(), str(np.random.get_state())
    before = sample(make_chooser(seed=3))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert str(np.random.get_state()) == numpy_state
    with torch.random.fork_rng():
        torch.manual_seed(99)
        assert sample(make_chooser(seed=3)) == before


def test_rows_may_be_visited_in_any_order_and_number() -> None:
    chooser = make_chooser(seed=4)
    contexts = [[*PROMPT, token_id] for token_id in range(20)] + [[*PROMPT, 1, token_id] for token_id in range(20)]
    rows = [make_row(seed) for seed in range(len(contexts))]
    forwards = [chooser.choose(row, context) for row, context in zip(rows, contexts)]
    backwards = [chooser.choose(row, context) for row, context in zip(rows[::-1], contexts[::-1])]
    assert forwards == backwards[::-1]
    assert forwards[7] == make_chooser(seed=4).choose(rows[7], contexts[7])


def test_a_penalty_follows_the_path_of_its_node_vllm_6718() -> None:
    # Two siblings, one row of logits: each node's penalty sees that node's own path, the draft token included.
    row = torch.zeros(V)
    row[[20, 30]] = torch.tensor([2.0, 1.9])
    chooser = make_chooser(SamplingParams(repetition_penalty=1.5))
    assert chooser.choose(row, [*PROMPT, 40]) == 20
    assert chooser.choose(row, [*PROMPT, 20]) == 30
    assert chooser.choose(row, [*PROMPT, 20, 30]) == 20
    ngram = make_chooser(SamplingParams(no_repeat_ngram_size=2))
    assert ngram.choose(row, [*PROMPT, 8, 20, 8]) == 30
    assert ngram.choose(row, [*PROMPT, 8, 20, 9]) == 20


def test_min_p_holds_at_every_depth_vllm_42802() -> None:
    # vllm#42802: a filter that cannot change the argmax was skipped for verified tokens.
    row = torch.tensor([0.6, 0.25, 0.1, 0.05]).log()
    chooser = make_chooser(SamplingParams(temperature=1.0, min_p=0.3), vocab_size=4)
    drawn = {chooser.choose(row, range(position)) for position in range(3, 500)}
    assert drawn == {0, 1}


def test_min_new_tokens_counts_the_path() -> None:
    row = torch.zeros(V)
    row[2] = 5.0  # EOS
    chooser = make_chooser(SamplingParams(min_new_tokens=2))
    assert chooser.choose(row, PROMPT) == 0
    assert chooser.choose(row, [*PROMPT, 8]) == 0
    assert chooser.choose(row, [*PROMPT, 8, 9]) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_broken_row_raises_and_names_no_token_vllm_53029(value: float, dtype: torch.dtype) -> None:
    # vllm#53029, #50183, #45060: an argmax over padded NaN named the id V, which crashed far from its cause.
    row = make_row(0).to(dtype)
    row[V - 1] = value
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)):
        with pytest.raises(NumericsError, match="from the model"):
            make_chooser(params).choose(row, PROMPT)
    with pytest.raises(NumericsError, match="from the model"):
        make_chooser(SamplingParams()).argmax_rows(torch.stack([make_row(1).to(dtype), row]))
    with pytest.raises(NumericsError, match="from the model"):
        make_chooser().logprobs(row, 3, 2)


def test_nothing_left_raises() -> None:
    empty = torch.full((V,), float("-inf"))
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(NumericsError, match="-inf"):
            make_chooser(params).choose(empty, PROMPT)
    with pytest.raises(NumericsError, match="no finite best token"):
        make_chooser(SamplingParams()).argmax_rows(empty[None])


@pytest.mark.parametrize("options", SAMPLING[:-1], ids=str)
def test_ids_stay_below_the_vocabulary(options: dict[str, Any]) -> None:
    row = make_row(0, size=V + 31)
    row[V:] = 100.0
    for seed in range(100):
        assert make_chooser(SamplingParams(**{"temperature": 1.0, **options}), seed=seed).choose(row, PROMPT) < V


def test_one_token_left_is_drawn() -> None:
    row = torch.full((V,), float("-inf"))
    row[50] = -1e30
    assert make_chooser().choose(row, PROMPT) == 50
    assert make_chooser(vocab_size=1).choose(torch.tensor([3.0]), PROMPT) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_are_the_models_own(dtype: torch.dtype) -> None:
    row = make_row(0, size=V + 5).to(dtype)
    expected = row[:V].double().log_softmax(0)
    chooser = make_chooser(SamplingParams(temperature=0.3, top_k=1, logit_bias={4: 9.0}, repetition_penalty=2.0))
    entry = chooser.logprobs(row, 17, 5)
    assert entry.token_id == 17
    assert entry.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    assert len(entry.top) == 5
    ranked = sorted(range(V), key=lambda token_id: (-float(expected[token_id]), token_id))
    assert [token_id for token_id, _ in entry.top] == ranked[:5]
    assert [logprob for _, logprob in entry.top] == pytest.approx(expected[ranked[:5]].tolist(), abs=1e-5)
    assert all(type(logprob) is float and type(token_id) is int for token_id, logprob in entry.top)


def test_logprobs_at_the_edges() -> None:
    chooser = make_chooser(vocab_size=4)
    assert chooser.logprobs(torch.zeros(4), 2, 0).top == ()
    assert [token_id for token_id, _ in chooser.logprobs(torch.zeros(4), 2, 2).top] == [0, 1]
    assert [token_id for token_id, _ in chooser.logprobs(torch.zeros(4), 2, 20).top] == [0, 1, 2, 3]
    peaked = chooser.logprobs(torch.tensor([500.0, -500.0, -500.0, -500.0]), 0, 1)
    assert peaked.logprob == pytest.approx(0.0, abs=1e-6)
