"""`custom_generate` against transformers' own `generate`, on tiny random models."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)

import foretell
from foretell import bridge
from foretell.drafters.calibration import Calibration
from foretell.drafters.drafter import NoDrafter, Proposal
from foretell.errors import CapacityError, ConfigError, ForetellError, ModelError, NumericsError
from foretell.hardware.profile import LatencyProfile
from foretell.models.hf import HFModel
from foretell.tree.token_tree import TokenTree

VOCAB = 64
CONTEXT = 256
PROMPT = (5, 9, 11, 9, 30, 5, 9)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # wide enough that greedy outputs wander
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # transformers zeroes the embedding of a padding token, and 0 would follow 0 for ever
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "mistral": SHAPE | {"sliding_window": 8},
    "qwen2": SHAPE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": SHAPE | {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": SHAPE
    | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": GPT2 | {"bos_token_id": 1, "eos_token_id": 2},
    "phi3": SHAPE,  # runs through the adapter
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **FAMILIES[family] | fields)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    """A llama in float64, which no test changes."""
    return make_model()


def prompt(token_ids: Sequence[int] = PROMPT) -> Tensor:
    return torch.tensor([list(token_ids)])  # [1, T]


def plain(model: Any, token_ids: Sequence[int] = PROMPT, **options: Any) -> Any:
    """Return what transformers says."""
    options = {"do_sample": False, "max_new_tokens": 40} | options
    return model.generate(prompt(token_ids), **options)


def ours(model: Any, token_ids: Sequence[int] = PROMPT, **options: Any) -> Any:
    """Return what foretell says."""
    return plain(model, token_ids, **{"custom_generate": foretell.custom_generate} | options)


@dataclass
class Oracle(NoDrafter):
    """Proposes a chain of what will come, as long as it may."""

    name: str = "oracle"
    truth: Sequence[int] = ()
    """Prompt and output, without padding."""
    position: int = 0

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None:
        assert list(prompt_ids) == list(self.truth[: len(prompt_ids)])
        self.position = len(prompt_ids)

    def observe(self, outcome: Any) -> None:
        self.position += len(outcome.token_ids)

    def propose(self, proposal: Proposal) -> TokenTree:
        tree, start = TokenTree.root(proposal.tip), self.position + len(proposal.ahead)
        for token_id in self.truth[start : start + min(proposal.max_depth, proposal.max_nodes)]:
            tree.add(len(tree) - 1, token_id, -0.01 * len(tree), self.name)
        return tree


class Trusting(Calibration):
    """Believes every drafter, whatever happened."""

    def calibrate(self, tree: TokenTree, *, is_sampled: bool = False) -> TokenTree:
        return tree


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch, model: Any) -> Iterator[Callable[[Tensor], None]]:
    """Make every draft right: given what `generate` returns without padding, blocks are 16 tokens long."""
    free = LatencyProfile(key={}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.0),))
    monkeypatch.setattr(bridge, "quick_profile", lambda *_: free)
    monkeypatch.setattr(bridge, "Calibration", Trusting)
    bridge.release(model)

    def know(truth: Tensor) -> None:
        monkeypatch.setattr(bridge, "make_drafter", lambda *_, **__: Oracle(truth=truth[0].tolist()))

    yield know
    bridge.release(model)


# The same tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(family: str) -> None:
    """transformers#30042, transformers#39421: assisted decoding differed from greedy."""
    model = make_model(family, torch.float32, seed=1)
    assert torch.equal(ours(model, eos_token_id=None), plain(model, eos_token_id=None))
    assert isinstance(bridge._HELD[model].engine.runner.model, HFModel) == (family == "phi3")


@pytest.mark.parametrize("drafter", ["none", "lookup", "suffix", "ngram", "recycle", "all"])
@pytest.mark.parametrize("seed", range(3))
def test_every_drafter_says_the_same(drafter: str, seed: int) -> None:
    model = make_model(dtype=torch.float32, seed=seed)
    assert torch.equal(ours(model, foretell_drafter=drafter, max_new_tokens=80), plain(model, max_new_tokens=80))


def test_one_prompt_token(model: Any) -> None:
    assert torch.equal(ours(model, [7]), plain(model, [7]))


def test_a_prompt_from_nothing_is_the_bos_token(model: Any) -> None:
    expected = model.generate(do_sample=False, max_new_tokens=9)
    assert torch.equal(
        model.generate(do_sample=False, max_new_tokens=9, custom_generate=bridge.custom_generate), expected
    )


class Descending(LogitsProcessor):
    """Forbids every id above the last one, unless the last is small: no two tokens have the same law."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = int(input_ids[0, -1])
        if last < 8:
            return scores
        is_above = torch.arange(scores.shape[1]) > last  # [V]
        return scores.masked_fill(is_above, -torch.inf)


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 30, "eos_token_id": list(range(2, 30))},
    "min_length": {"min_length": 30, "eos_token_id": list(range(2, 30))},
    "bad_words_ids": {"bad_words_ids": [[5], [9, 30], [11, 9]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 60))},
    "forced_eos_token_id": {"forced_eos_token_id": 4, "max_new_tokens": 21},
    "sequence_bias": {"sequence_bias": [[[9], 3.0], [[9, 9], -9.0], [[9, 30], 4.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.4)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "renormalize_logits": {"renormalize_logits": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: range(ids.shape[0] % 5, VOCAB, 5)},
    "watermark": {"watermarking_config": {"bias": 4.0}},
    "own processor": {"logits_processor": [Descending()]},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "bad_words_ids": [[5]]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_processors_apply_inside_a_block(name: str, model: Any, oracle: Callable[[Tensor], None]) -> None:
    expected = plain(model, **SETTINGS[name])
    oracle(expected)
    assert torch.equal(ours(model, **SETTINGS[name]), expected)


def test_blocks_are_long(model: Any, oracle: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests with an oracle rely on."""
    sizes: list[int] = []

    def step(self: Any, sequences: Any, original: Any = bridge.Engine.step) -> Any:
        emissions = original(self, sequences)
        sizes.append(len(emissions[0]))
        return emissions

    oracle(plain(model, eos_token_id=None, repetition_penalty=1.1))
    monkeypatch.setattr(bridge.Engine, "step", step)
    ours(model, eos_token_id=None, repetition_penalty=1.1)
    assert sizes == [16, 16, 8]


@pytest.mark.parametrize("name", SETTINGS)
def test_processors_apply_with_real_drafters(name: str, model: Any) -> None:
    assert torch.equal(ours(model, **SETTINGS[name]), plain(model, **SETTINGS[name]))


# Sampling


WARPERS: dict[str, dict[str, Any]] = {
    "none": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 1.7},
    "top_k and top_p": {"top_k": 6, "top_p": 0.8},
    "min_p": {"top_k": 0, "min_p": 0.2},
    "typical_p": {"top_k": 0, "typical_p": 0.7},
    "eta and epsilon": {"top_k": 0, "eta_cutoff": 0.1, "epsilon_cutoff": 0.02},
}


@pytest.mark.parametrize("name", WARPERS)
def test_sampling_with_a_seed_does_not_depend_on_the_drafter(
    name: str, model: Any, oracle: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(drafter: str) -> Tensor:
        torch.manual_seed(3)
        return ours(model, do_sample=True, foretell_drafter=drafter, **WARPERS[name])

    expected = sample("none")
    assert torch.equal(sample("all"), expected)
    oracle(expected)
    assert torch.equal(sample("oracle"), expected)
    torch.manual_seed(4)
    assert not torch.equal(ours(model, do_sample=True, foretell_drafter="none", **WARPERS[name])[:, :20], expected)


def test_one_seed_after_another_gives_other_samples(model: Any) -> None:
    torch.manual_seed(0)
    first, second = (ours(model, do_sample=True, top_k=0) for _ in range(2))
    assert not torch.equal(first, second)


def test_greedy_search_leaves_the_generator_alone(model: Any) -> None:
    before = torch.get_rng_state()
    ours(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_follow_the_processed_distribution() -> None:
    """Logits of next to nothing and a bias make tokens independent of each other: their counts are a multinomial's."""
    model = make_model(eos_token_id=None, max_position_embeddings=1024)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-9)
    bias = torch.linspace(-1, 2, VOCAB)  # [V]
    torch.manual_seed(0)
    output = ours(
        model,
        do_sample=True,
        top_k=10,
        temperature=0.9,
        max_new_tokens=500,
        sequence_bias=[[[token_id], float(value)] for token_id, value in enumerate(bias)],
    )
    counts = torch.bincount(output[0, len(PROMPT) :], minlength=VOCAB)  # [V]
    assert int(counts[-10:].sum()) == 500
    probabilities = (bias[-10:].double() / 0.9).softmax(0)  # [10]
    assert chisquare(counts[-10:], 500 * probabilities).pvalue > 1e-3


# Where it ends


@pytest.fixture(scope="module")
def truth(model: Any) -> Tensor:
    """What the model says, without an end."""
    return plain(model, eos_token_id=None)


def test_eos_at_every_place_of_a_block(model: Any, truth: Tensor, oracle: Callable[[Tensor], None]) -> None:
    """transformers#47912: an EOS accepted mid-block did not end the output."""
    oracle(truth)
    output = truth[0, len(PROMPT) :].tolist()
    for token_id in dict.fromkeys(output):
        expected = plain(model, eos_token_id=token_id)
        assert expected.shape[1] == len(PROMPT) + output.index(token_id) + 1
        assert torch.equal(ours(model, eos_token_id=token_id), expected)


def test_several_eos_ids(model: Any, truth: Tensor, oracle: Callable[[Tensor], None]) -> None:
    oracle(truth)
    eos_ids = truth[0, [-1, len(PROMPT) + 11, len(PROMPT) + 9]].tolist()
    assert torch.equal(ours(model, eos_token_id=eos_ids), plain(model, eos_token_id=eos_ids))


@pytest.mark.parametrize("drafter", ["none", "lookup", "all"])
def test_no_eos(drafter: str) -> None:
    """transformers#27775: prompt lookup failed on a model without EOS."""
    model = make_model(eos_token_id=None)
    output = ours(model, foretell_drafter=drafter)
    assert output.shape[1] == len(PROMPT) + 40
    assert torch.equal(output, plain(model))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33])
def test_length_limits(model: Any, truth: Tensor, oracle: Callable[[Tensor], None], size: int) -> None:
    oracle(truth)
    expected = truth[:, : len(PROMPT) + size]
    assert torch.equal(ours(model, eos_token_id=None, max_new_tokens=size), expected)
    options = {"eos_token_id": None, "max_new_tokens": None, "max_length": len(PROMPT) + size}
    assert torch.equal(ours(model, **options), expected)


def test_the_whole_context_can_be_filled() -> None:
    model = make_model(eos_token_id=None)
    output = ours(model, max_new_tokens=None, max_length=CONTEXT)
    assert output.shape == (1, CONTEXT)
    assert torch.equal(output, plain(model, max_new_tokens=None, max_length=CONTEXT))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One printable character for each id."""
    characters = [chr(33 + index) for index in range(VOCAB)]
    backend = RustTokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_stop_strings_at_every_place_of_a_block(
    model: Any, truth: Tensor, oracle: Callable[[Tensor], None], tokenizer: Any
) -> None:
    """transformers#48039: a stop string completed mid-block did not end the output."""
    oracle(truth)
    text = tokenizer.decode(truth[0, len(PROMPT) :])
    assert len(text) == 40
    for start in range(0, 38, 3):
        stop = [text[start : start + 2], "~~"]
        expected = plain(model, eos_token_id=None, stop_strings=stop, tokenizer=tokenizer)
        assert expected.shape[1] <= len(PROMPT) + start + 2
        output = ours(model, eos_token_id=None, stopping_criteria=[StopStringCriteria(tokenizer, stop)])
        assert torch.equal(output, expected)


@dataclass
class Recorder(StoppingCriteria):
    """Keeps what it was asked, and ends the sequence at a length."""

    max_length: int
    calls: list[Any] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert input_ids.dtype == torch.int64
        best = None if scores is None else [int(row.argmax()) for row in scores]
        self.calls.append((input_ids.tolist(), best))
        return torch.tensor([input_ids.shape[1] >= self.max_length])


@pytest.mark.parametrize("has_scores", [False, True])
def test_criteria_are_asked_once_for_each_token(
    model: Any, truth: Tensor, oracle: Callable[[Tensor], None], has_scores: bool
) -> None:
    oracle(truth)
    mine, theirs = Recorder(len(PROMPT) + 19), Recorder(len(PROMPT) + 19)
    options = {"eos_token_id": None, "return_dict_in_generate": has_scores, "output_scores": has_scores}
    plain(model, stopping_criteria=[theirs], **options)
    ours(model, stopping_criteria=[mine], **options)
    assert len(mine.calls) == 19
    assert mine.calls == theirs.calls


def test_max_time_ends_the_output(model: Any) -> None:
    assert ours(model, max_time=0.0).shape[1] == len(PROMPT) + 1


# What is reported


@dataclass
class Listener:
    """A streamer that keeps what it is told."""

    values: list[Any] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def test_a_streamer_hears_every_token_and_the_end(model: Any, truth: Tensor, oracle: Callable[[Tensor], None]) -> None:
    oracle(truth)
    mine, theirs = Listener(), Listener()
    plain(model, streamer=theirs, max_new_tokens=20)
    ours(model, streamer=mine, max_new_tokens=20)
    assert mine.values == theirs.values
    assert mine.values[-1] == "end"


def test_a_direct_call_takes_a_streamer(model: Any, truth: Tensor) -> None:
    listener = Listener()

    def generate(*args: Any, **options: Any) -> Any:
        return foretell.custom_generate(*args, streamer=listener, **options)

    output = plain(model, custom_generate=generate, eos_token_id=None)
    assert torch.equal(output, truth)
    assert listener.values == [*([token_id] for token_id in truth[0, len(PROMPT) :].tolist()), "end"]


@pytest.mark.parametrize("drafter", ["oracle", "none"])
def test_scores_and_logits_of_every_token(
    model: Any, oracle: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
        "eos_token_id": None,
    }
    expected = plain(model, **options)
    if drafter == "oracle":
        oracle(expected.sequences)
    output = ours(model, foretell_drafter=drafter, **options)
    assert type(output) is type(expected)
    assert torch.equal(output.sequences, expected.sequences)
    for mine, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert len(mine) == len(theirs) == 40
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs))
    assert not torch.equal(torch.stack(output.scores), torch.stack(output.logits))


def test_rows_that_were_not_asked_for_are_none(model: Any) -> None:
    output = ours(model, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(model))
    assert output.scores is None
    assert output.logits is None
    assert torch.equal(ours(model, output_scores=True), plain(model))


def test_bfloat16_says_the_same_with_every_drafter_and_keeps_the_emitted_rows() -> None:
    """A token accepted outside the first chain is computed twice: the row that emitted it is the one that is kept."""
    model = make_model(dtype=torch.bfloat16, eos_token_id=None)
    options = {"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.05}
    outputs = [ours(model, foretell_drafter=drafter, **options) for drafter in ("none", "all", "ngram")]
    for output in outputs:
        assert torch.equal(output.sequences, outputs[0].sequences)
        best = torch.cat(output.scores).argmax(1)  # [N]
        assert torch.equal(best, output.sequences[0, len(PROMPT) :])


# Padding


PADDED = (0, 0, 0, *PROMPT)
PADDED_MASK = torch.tensor([[0, 0, 0] + [1] * len(PROMPT)])


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("name", ["repetition_penalty", "min_length", "begin_suppress_tokens", "forced_eos_token_id"])
def test_padding_on_the_left_is_passed_over(name: str, family: str) -> None:
    model = make_model(family)
    options = SETTINGS[name] | {"attention_mask": PADDED_MASK, "pad_token_id": 0}
    output = ours(model, PADDED, **options)
    assert torch.equal(output, plain(model, PADDED, **options))
    assert output[0, :3].tolist() == [0, 0, 0]


def test_scores_and_criteria_count_padding(model: Any) -> None:
    recorder = Recorder(len(PADDED) + 4)
    options = {"return_dict_in_generate": True, "output_scores": True, "attention_mask": PADDED_MASK}
    output = ours(model, PADDED, stopping_criteria=[recorder], **options)
    assert [len(ids[0]) for ids, _ in recorder.calls] == [len(PADDED) + 1 + index for index in range(4)]
    assert len(output.scores) == 4


@pytest.mark.parametrize(
    "mask", [[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0] * 7, [0, 1, 0, 1, 1, 1, 1]], ids=str
)
def test_other_masks_are_refused(model: Any, mask: list[int]) -> None:
    with pytest.raises(ConfigError, match="hides more than padding on the left"):
        ours(model, attention_mask=torch.tensor([mask]))


# Refusals


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "was asked for beam search"),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, "was asked for beam sample"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "was asked for assisted generation"),
    "several samples": ({"num_return_sequences": 2, "do_sample": True}, "`num_return_sequences` is 2"),
    "attentions": (
        {"return_dict_in_generate": True, "output_attentions": True},
        "`output_attentions` is not supported",
    ),
    "hidden states": ({"output_hidden_states": True}, "`output_hidden_states` is not supported"),
    "static cache": ({"cache_implementation": "static"}, "`cache_implementation` is 'static'"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
    "watermark": (
        {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)},
        "SynthIDTextWatermarkLogitsProcessor keeps state",
    ),
    "positions": ({"position_ids": torch.arange(1, 8)[None]}, "`position_ids` are not 0, 1, 2"),
    "drafter": ({"foretell_drafter": "psychic"}, "there is no drafter 'psychic'"),
    "draft model": (
        {"foretell_drafter": "staged"},
        "`foretell_drafter`='staged' needs .*: choose one of none",
    ),
    "prompt tokens": ({"foretell_drafter": "prompts"}, "`foretell_drafter`='prompts' needs .*, prompts=…"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_told_before_anything_is_packed(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, message = REFUSED[name]
    monkeypatch.setattr(bridge, "_hold", None)
    with pytest.raises(ConfigError, match=message) as caught:
        ours(model, **options)
    assert "\n" not in str(caught.value)


def test_an_assistant_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="was asked for assisted generation"):
        ours(model, assistant_model=make_model(seed=1))


def test_several_rows_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="`input_ids` has 2 rows"):
        model.generate(prompt().repeat(2, 1), max_new_tokens=4, custom_generate=foretell.custom_generate)


def test_embeddings_are_refused(model: Any) -> None:
    embeddings = model.get_input_embeddings()(prompt())
    with pytest.raises(ConfigError, match="`inputs_embeds` is not supported"):
        model.generate(inputs_embeds=embeddings, max_new_tokens=4, custom_generate=foretell.custom_generate)


def test_token_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="`token_type_ids` is not supported"):
        ours(make_model("gpt2"), token_type_ids=torch.zeros_like(prompt()))


def test_a_cache_of_the_caller_is_refused(model: Any) -> None:
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with pytest.raises(ConfigError, match=f"`{name}` cannot be continued"):
        ours(model, **{name: DynamicCache(config=model.config)})


def test_a_length_beyond_the_context_is_refused(model: Any) -> None:
    with pytest.raises(
        CapacityError, match=f"`max_length` is {len(PROMPT) + 600}, the model's context holds {CONTEXT}"
    ):
        ours(model, max_new_tokens=600)


def test_nan_and_nothing_left_are_told(model: Any) -> None:
    broken = make_model()
    with torch.no_grad():
        broken.lm_head.weight[3] = torch.nan
    with pytest.raises(ForetellError, match="logits are off by nan"):
        ours(broken)
    with pytest.raises(NumericsError, match="all 64 logits"):
        ours(model, suppress_tokens=list(range(VOCAB)))


# Models


def test_training_mode_is_refused() -> None:
    model = make_model()
    ours(model)
    with pytest.raises(ModelError, match="is in training mode: call its `eval"):
        ours(model.train())


class Adapter(nn.Module):
    """A low-rank adapter as peft arranges it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, dtype=base_layer.weight.dtype)
        self.lora_B = nn.Linear(2, base_layer.out_features, dtype=base_layer.weight.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        return self.base_layer(rows) + self.lora_B(self.lora_A(rows))


def test_an_adapter_is_refused() -> None:
    model = make_model()
    ours(model)
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    with pytest.raises(ModelError, match=r"has an adapter .*: merge it first"):
        ours(model)


def test_quantised_weights_are_refused() -> None:
    model = make_model()
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.zeros(weight.shape, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"torch\.int8 \(lm_head\.weight\)"):
        ours(model)


def test_meta_tensors_are_refused() -> None:
    model = make_model()
    model.model.norm.to("meta")
    with pytest.raises(ModelError, match="lies on cpu, meta: put all of it on one device"):
        ours(model)


def test_hooks_that_change_the_output_are_refused() -> None:
    model = make_model()
    ours(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(ModelError, match="does not compute what its weights say"):
        ours(model)
    handle.remove()
    assert torch.equal(ours(model), plain(model))


def test_hooks_that_only_look_are_not() -> None:
    model = make_model()
    model(prompt(), output_hidden_states=True)  # transformers leaves hooks behind
    assert torch.equal(ours(model), plain(model))


def test_changed_modules_are_refused() -> None:
    model = make_model()
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ModelError, match="its modules were changed"):
        ours(model)
    model = make_model()
    model.model.norm = nn.LayerNorm(16, dtype=torch.float64)
    with pytest.raises(ModelError, match="its modules were changed"):
        ours(model)


def test_a_recurrent_model_is_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelError, match="recurrent or hybrid"):
        ours(AutoModelForCausalLM.from_config(config).eval())


def test_an_encoder_decoder_is_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.generation_config.decoder_start_token_id = 0
    with pytest.raises(ModelError, match="is an encoder-decoder model"):
        ours(model)


# What is kept


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows whenever weights are packed."""
    calls: list[str] = []

    def read_live(model: Any, original: Any = bridge.read_live) -> Any:
        calls.append(type(model).__name__)
        return original(model)

    monkeypatch.setattr(bridge, "read_live", read_live)
    return calls


def add_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(0.1)


def add_to_data(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data += 0.1  # as peft merges adapters; autograd does not see it


def load_others(model: Any) -> None:
    model.load_state_dict(make_model(seed=1).state_dict())


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone() + 0.1)


def convert(model: Any) -> None:
    model.to(torch.float32)


@pytest.mark.parametrize("change", [add_in_place, add_to_data, load_others, replace_parameter, convert])
def test_weights_are_packed_once_and_again_when_they_change(change: Callable[[Any], None], packed: list[str]) -> None:
    model = make_model()
    before = ours(model)
    assert torch.equal(ours(model, [3, 4]), plain(model, [3, 4]))
    assert len(packed) == 1
    change(model)
    after = ours(model)
    assert len(packed) == 2
    assert torch.equal(after, plain(model))
    assert change is convert or not torch.equal(after, before)
    ours(model)
    assert len(packed) == 2


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_what_is_kept_goes_with_the_model(family: str) -> None:
    model = make_model(family)
    ours(model)
    engine, module = weakref.ref(bridge._HELD[model].engine), weakref.ref(model)
    weights = weakref.ref(next(model.parameters()))
    num_held = len(bridge._HELD)
    del model
    gc.collect()
    assert (engine(), module(), weights()) == (None, None, None)
    assert len(bridge._HELD) < num_held


def test_memory_is_stated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "foretell")
    model = make_model(dtype=torch.float32)
    assert bridge.held_bytes(model) == 0
    ours(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    assert bridge.held_bytes(model) == weights - embedding.nbytes
    assert bridge._HELD[model].engine.runner.model.embedding.data_ptr() == embedding.data_ptr()
    assert "MB beside the weights of LlamaForCausalLM" in caplog.text
    assert bridge._HELD[model].engine.runner.cache.num_bytes == 0
    bridge.release(model)
    assert bridge.held_bytes(model) == 0
    adapted = make_model("phi3")
    ours(adapted)
    assert bridge.held_bytes(adapted) == 0


def test_an_interrupted_call_leaves_no_slots(model: Any) -> None:
    class Interruption(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if input_ids.shape[1] > len(PROMPT) + 3:
                raise KeyboardInterrupt
            return torch.tensor([False])

    with pytest.raises(KeyboardInterrupt):
        ours(model, stopping_criteria=[Interruption()])
    assert bridge._HELD[model].engine.runner.cache.num_bytes == 0
    assert torch.equal(ours(model), plain(model))


def test_threads_take_turns(model: Any) -> None:
    prompts = [[5, 9, seed] for seed in range(3, 9)]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda token_ids: ours(model, token_ids), prompts))
    for token_ids, output in zip(prompts, outputs, strict=True):
        assert torch.equal(output, plain(model, token_ids))


def test_a_generation_config_is_honoured(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=11, repetition_penalty=1.3, eos_token_id=[2, 3], do_sample=False)
    output = model.generate(prompt(), generation_config=config, custom_generate=foretell.custom_generate)
    assert torch.equal(output, model.generate(prompt(), generation_config=config))


def test_the_document_compiles() -> None:
    text = (Path(__file__).parents[1] / "docs" / "transformers.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(code, "transformers.md", "exec")
    for name in re.findall(r"`foretell\.bridge\.(\w+)\(", text):
        assert callable(getattr(bridge, name))
