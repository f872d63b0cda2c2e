"""Text in, text out: on a tiny random model whose tokens are bytes, told what to say where that matters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.drafters.calibration import Calibration
from foretell.drafters.catalog import DRAFTERS
from foretell.drafters.drafter import NoDrafter
from foretell.drafters.next_ids import KnownNextIds, NextIdsStore
from foretell.engine.engine import Engine
from foretell.engine.next_ids import build_next_ids
from foretell.errors import CapacityError, ConfigError, InputError, ModelError, NumericsError
from foretell.hardware.profile import LatencyProfile
from foretell.llm import LLM, MAX_BATCH
from foretell.params import SamplingParams
from foretell.result import Chunk, Completion, DraftWork
from tiny import EOS, save_model

FLAT = LatencyProfile(key={"model": "flat"}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.0),))
TEXT = "To be, or not to be, that is the question: to be, or not."


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything that foretell keeps goes here."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("FORETELL_HOME", str(folder))
        yield folder
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["canonical", "copy"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    """In float64, where what is equal on paper is equal; rows are free, so that drafts are bought."""
    llm = LLM(folder, dtype="float64", threads=1)
    llm.engine.profile, llm.engine.commit_policy = FLAT, request.param
    return llm


@pytest.fixture(autouse=True)
def nothing_stays_allocated(request: pytest.FixtureRequest) -> Iterator[None]:
    """sglang#13826: whatever happened to a request, its slots come back."""
    cache = request.getfixturevalue("llm").engine.runner.cache if "llm" in request.fixturenames else None
    before = cache and cache.num_bytes
    yield
    assert before == (cache and cache.num_bytes)


class Script:
    """Makes a model say given tokens, and EOS after them."""

    def __init__(self, num_prompt_tokens: int, token_ids: Sequence[int]) -> None:
        self.num_prompt_tokens, self.token_ids = num_prompt_tokens, [*token_ids, EOS]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.num_prompt_tokens
        scores[0, self.token_ids[place]] += 1e4
        return scores


def scripted(llm: LLM, prompt: str, text: str, **fields: Any) -> SamplingParams:
    """Return parameters under which the model continues `prompt` with `text`."""
    size, ids = len(llm.tokenizer.encode(prompt)), llm.tokenizer.encode(text)
    return SamplingParams(logits_processors=[Script(size, ids)], **{"max_new_tokens": 200, **fields})


def stream(llm: LLM, *args: Any, **options: Any) -> tuple[list[Chunk], Completion]:
    """Return a stream's chunks, and the completion that only the last of them has."""
    chunks = list(llm.stream(*args, **options))
    assert all(chunk.completion is None for chunk in chunks[:-1])
    completion = chunks[-1].completion
    assert completion is not None
    return chunks, completion


def same(left: Completion, right: Completion) -> bool:
    return (left.text, left.token_ids, left.finish_reason) == (right.text, right.token_ids, right.finish_reason)


# Prompts and results


def test_generate(llm: LLM) -> None:
    (completion,) = llm.generate("Hello", SamplingParams(max_new_tokens=12))
    assert completion.prompt_token_ids == llm.tokenizer.encode("Hello")
    assert len(completion.token_ids) == len(completion.sources) == 12
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert (completion.finish_reason, completion.seed, completion.logprobs) == ("length", None, None)


def test_generate_is_greedy_and_limited_by_itself(llm: LLM) -> None:
    (completion,) = llm.generate("Hello")
    assert same(completion, llm.generate("Hello", SamplingParams())[0])
    assert len(completion.token_ids) <= 256


def test_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=8)
    ids = llm.tokenizer.encode("Hello")
    assert same(llm.generate("Hello", params)[0], llm.generate(ids, params)[0])
    prompts: list[Any] = ["Hello", ids, tuple(ids)]
    together = llm.generate(prompts, params)
    assert all(same(each, together[0]) for each in together)


def test_several_prompts_come_back_in_their_order(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=20)
    prompts = ["a", "To be, or not to be", "xyz " * 30, "q", "To be, or not to be"]
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    together = llm.generate(prompts, params)
    assert [each.prompt_token_ids for each in together] == [each.prompt_token_ids for each in alone]
    assert all(same(left, right) for left, right in zip(together, alone, strict=True))


def test_more_prompts_than_a_batch_holds(llm: LLM) -> None:
    prompts = [[3 + number, 7] for number in range(MAX_BATCH + 9)]
    completions = llm.generate(prompts, SamplingParams(max_new_tokens=2))
    assert [each.prompt_token_ids for each in completions] == prompts


@pytest.mark.parametrize("n", [2, 5, MAX_BATCH + 1])
def test_samples_follow_each_other(llm: LLM, n: int) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=4, n=n)
    completions = llm.generate(["ab", "cd"], params)
    prompts = [llm.tokenizer.encode(text) for text in ("ab", "cd")]
    assert [each.prompt_token_ids for each in completions] == [prompts[0]] * n + [prompts[1]] * n
    assert len({tuple(each.token_ids) for each in completions[:n]}) > n // 2
    few = llm.generate("ab", SamplingParams(max_new_tokens=6, temperature=1.0, seed=4, n=2))
    assert all(same(left, right) for left, right in zip(few, completions, strict=False))


# Drafters


SAMPLINGS = [
    SamplingParams(max_new_tokens=40),
    SamplingParams(max_new_tokens=40, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=40, temperature=0.7, seed=1),
    SamplingParams(max_new_tokens=40, temperature=1.2, top_k=20, top_p=0.9, seed=2, n=3, presence_penalty=0.5),
]


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "penalty", "sampled", "three samples"])
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_every_drafter_says_the_same(llm: LLM, name: str, params: SamplingParams) -> None:
    prompts = ["abcabcabcabc", TEXT]
    plain = llm.generate(prompts, params, drafter="none")
    drafted = llm.generate(prompts, params, drafter=name)
    assert all(same(left, right) for left, right in zip(plain, drafted, strict=True))
    assert {source for each in plain for source in each.sources} == {"target"}


def test_the_drafter_of_a_request_counts(folder: Path) -> None:
    llm = LLM(folder, dtype="float64", threads=1, drafter="none")
    llm.engine.profile = FLAT
    params = scripted(llm, TEXT, TEXT)
    assert set(llm.generate(TEXT, params)[0].sources) == {"target"}
    assert set(llm.generate(TEXT, params, drafter="lookup")[0].sources) == {"target", "lookup"}


def test_a_quoted_text_takes_few_passes(llm: LLM) -> None:
    (completion,) = llm.generate(TEXT, scripted(llm, TEXT, TEXT), drafter="all")
    assert completion.text == TEXT
    assert completion.stats.num_passes < len(TEXT) / 2
    assert set(completion.sources) > {"target"}


def test_the_corpus_may_be_quoted(folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT, encoding="utf-8")
    llm = LLM(folder, dtype="float64", threads=1, drafter="suffix", corpus=corpus)
    llm.engine.profile = FLAT
    (completion,) = llm.generate("T", scripted(llm, "T", TEXT[1:]))
    assert completion.text == TEXT[1:]
    assert completion.sources.count("suffix") > len(TEXT) / 2


def test_stats_add_up(llm: LLM) -> None:
    """EAGLE#62: every emitted token belongs to one pass, and every accepted one to a draft."""
    for params in SAMPLINGS:
        for completion in llm.generate([TEXT, "ab"], params, drafter="all"):
            stats = completion.stats
            assert stats.num_prompt_tokens == len(completion.prompt_token_ids)
            assert stats.num_output_tokens == len(completion.token_ids)
            assert stats.num_output_tokens == sum(n * count for n, count in stats.tokens_per_pass_counts.items())
            assert stats.num_passes == stats.tokens_per_pass_counts.total()
            assert stats.num_rows == stats.num_passes + stats.num_refed_rows + stats.drafted.total()
            assert stats.accepted.total() <= stats.drafted.total()
            assert stats.num_output_tokens <= stats.num_passes + stats.accepted.total()
            assert stats.num_plain_passes <= stats.num_passes
            assert 0 < stats.first_token_s <= stats.first_token_s + stats.decode_s
            assert stats.prefill_s <= stats.first_token_s


def test_stats_hold_what_the_drafter_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(NoDrafter):
        work = DraftWork(num_passes=3, num_rows=12, num_confirmed=2, num_staged_passes=1, num_bytes=700)

    monkeypatch.setattr("foretell.llm.make_drafter", lambda *_, **__: Counting())
    (completion,) = llm.generate("ab", SamplingParams(max_new_tokens=4))
    stats = completion.stats
    assert (stats.num_draft_passes, stats.num_draft_rows, stats.num_confirmed) == (3, 12, 2)
    assert (stats.num_staged_passes, stats.draft_bytes) == (1, 700)
    assert stats.target_bytes > 4 * llm.engine.runner.model.num_bytes


# Log-probabilities


def test_logprobs_are_the_models_own(llm: LLM, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    params = SamplingParams(max_new_tokens=15, temperature=0.8, seed=3, top_k=5, repetition_penalty=1.5, logprobs=4)
    (completion,) = llm.generate(TEXT, params)
    assert completion.logprobs is not None
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.tensor([ids])).logits[0]
    laws = logits.log_softmax(-1)[len(completion.prompt_token_ids) - 1 : -1]  # [T, V]
    for token_id, law, found in zip(completion.token_ids, laws, completion.logprobs, strict=True):
        assert found.token_id == token_id
        assert found.logprob == pytest.approx(float(law[token_id]), abs=1e-5)
        best = law.topk(4)
        assert [other for other, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_do_not_depend_on_the_drafter(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=30, logprobs=0)
    plain, drafted = (llm.generate("abcabcabc", params, drafter=name)[0].logprobs for name in ("none", "all"))
    assert plain is not None
    assert drafted is not None
    assert [each.token_id for each in plain] == [each.token_id for each in drafted]
    assert [each.logprob for each in plain] == pytest.approx([each.logprob for each in drafted], abs=1e-6)
    assert all(each.top == () for each in drafted)


def test_logprobs_arrive_with_their_tokens(llm: LLM) -> None:
    chunks, completion = stream(llm, TEXT, SamplingParams(max_new_tokens=12, logprobs=1))
    assert [chunk.logprobs for chunk in chunks] == completion.logprobs
    assert all(chunk.logprobs is not None and chunk.logprobs.token_id == chunk.token_id for chunk in chunks)


# Seeds


def test_a_seed_is_drawn_and_reported(llm: LLM) -> None:
    """vllm#13196: and the same seed says the same again, whoever drafts."""
    params: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5}
    first, second = (llm.generate("Hello", SamplingParams(**params))[0] for _ in range(2))
    assert first.seed is not None
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    for name in DRAFTERS:
        again = llm.generate("Hello", SamplingParams(**params, seed=first.seed), drafter=name)[0]
        assert same(again, first)
        assert again.seed == first.seed


def test_mixed_seeds_alone_and_together(llm: LLM) -> None:
    """vllm#6038, #9441: a prompt's tokens depend on the seed, not on its place in a batch."""
    params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=9)
    alone = llm.generate("ab", params)[0]
    assert all(same(each, alone) for each in llm.generate(["ab", "ab", "ab"], params))


# Streams


@pytest.mark.parametrize("params", SAMPLINGS[:3], ids=["greedy", "penalty", "sampled"])
def test_a_stream_says_what_generate_says(llm: LLM, params: SamplingParams) -> None:
    (expected,) = llm.generate(TEXT, params)
    chunks, completion = stream(llm, TEXT, params)
    assert same(completion, expected)
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [chunk.token_id for chunk in chunks] == expected.token_ids
    assert [chunk.source for chunk in chunks] == completion.sources


def test_a_stream_comes_as_it_is_made(llm: LLM) -> None:
    made: list[int] = []

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        made.append(input_ids.shape[1])
        return Script(1, llm.tokenizer.encode(TEXT))(input_ids, scores)

    chunks = llm.stream("x", SamplingParams(logits_processors=[processor]), drafter="none")
    assert made == []
    for num_chunks, chunk in enumerate(chunks, start=1):
        assert len(made) == num_chunks
        assert chunk.text == TEXT[num_chunks - 1 : num_chunks]


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_a_stream_that_is_closed_early_keeps_nothing(llm: LLM, num_taken: int) -> None:
    chunks = llm.stream(TEXT, SamplingParams(max_new_tokens=40))
    assert len(list(islice(chunks, num_taken))) == num_taken
    chunks.close()  # type: ignore[attr-defined]
    assert llm.engine.runner.cache.num_bytes == 0


# Stop strings


STOPS = [TEXT[start : start + size] for size in (1, 2, 3, 7) for start in range(0, len(TEXT) - size, 5)]


@pytest.mark.parametrize("drafter", ["none", "all"])
def test_a_stop_string_ends_text_ids_and_stream(llm: LLM, drafter: str) -> None:
    """sglang#23802, vllm#47616: wherever in a block it completes, nothing of it or after it is left."""
    for stop in STOPS:
        params = scripted(llm, TEXT, TEXT, stop=[stop], logprobs=0)
        expected = TEXT[: TEXT.index(stop)]
        chunks, completion = stream(llm, TEXT, params, drafter=drafter)
        assert (completion.text, completion.finish_reason) == (expected, "stop"), stop
        assert completion.token_ids == llm.tokenizer.encode(expected)
        assert completion.logprobs is not None
        assert [each.token_id for each in completion.logprobs] == completion.token_ids
        assert "".join(chunk.text for chunk in chunks) == expected
        if expected:
            assert [chunk.token_id for chunk in chunks] == completion.token_ids
        assert same(llm.generate(TEXT, params, drafter=drafter)[0], completion)


def test_of_several_stop_strings_the_first(llm: LLM) -> None:
    (completion,) = llm.generate(TEXT, scripted(llm, TEXT, TEXT, stop=["that", "not to", "question"]))
    assert completion.text == "To be, or "


def test_a_stop_string_that_does_not_come(llm: LLM) -> None:
    """What was held back because it might become one is told in the end."""
    chunks, completion = stream(llm, "x", scripted(llm, "x", TEXT, stop=["not!", "or not.."]))
    assert completion.text == "".join(chunk.text for chunk in chunks) == TEXT
    assert completion.finish_reason == "stop"  # by EOS
    (cut,) = llm.generate("x", scripted(llm, "x", TEXT, stop=["not!"], max_new_tokens=12))
    assert (cut.text, cut.finish_reason) == (TEXT[:12], "length")


@pytest.mark.parametrize("stop", ["é", "né", "€", "😀", "😀!", "ü😀"])
@pytest.mark.parametrize("drafter", ["none", "all"])
def test_a_stop_string_of_several_bytes_a_character(llm: LLM, stop: str, drafter: str) -> None:
    text = "pané ist für 5€ zu haben, aü😀!"
    expected = text[: text.index(stop)]
    chunks, completion = stream(llm, text, scripted(llm, text, text, stop=[stop]), drafter=drafter)
    assert completion.text == "".join(chunk.text for chunk in chunks) == expected
    assert completion.token_ids == [chunk.token_id for chunk in chunks] == llm.tokenizer.encode(expected)


def test_a_stop_string_at_the_length_limit(llm: LLM) -> None:
    """sglang#31599: the output ended by itself."""
    (completion,) = llm.generate("x", scripted(llm, "x", TEXT, stop=["or"], max_new_tokens=9))
    assert (completion.text, completion.finish_reason) == ("To be, ", "stop")


def test_characters_arrive_whole(llm: LLM) -> None:
    text = "naïve 😀 €"
    chunks, completion = stream(llm, "x", scripted(llm, "x", text))
    assert completion.text == text
    assert all("�" not in chunk.text for chunk in chunks)
    chunks, completion = stream(llm, "x", scripted(llm, "x", text, max_new_tokens=9))  # ends within the emoji
    assert completion.text == "".join(chunk.text for chunk in chunks) == "naïve �"
    assert len(completion.token_ids) == 9


# EOS


def test_eos_ends_the_output_and_is_told_by_its_id_alone(llm: LLM) -> None:
    for drafter in ("none", "all"):
        chunks, completion = stream(llm, TEXT, scripted(llm, TEXT, TEXT), drafter=drafter)
        assert (completion.text, completion.finish_reason) == (TEXT, "stop")
        assert completion.token_ids == [*llm.tokenizer.encode(TEXT), EOS]
        assert [chunk.token_id for chunk in chunks] == completion.token_ids
        assert chunks[-1].text == ""


def test_ignore_eos(llm: LLM) -> None:
    script = Script(1, [*llm.tokenizer.encode("ab"), EOS, *llm.tokenizer.encode("cd")])
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, logits_processors=[script])
    (completion,) = llm.generate("x", params)
    assert (completion.text, completion.finish_reason, completion.token_ids[2]) == ("abcd", "length", EOS)


def test_min_new_tokens(llm: LLM) -> None:
    bias = {EOS: 100.0}
    (short,) = llm.generate("x", SamplingParams(max_new_tokens=20, logit_bias=bias))
    assert short.token_ids == [EOS]
    (longer,) = llm.generate("x", SamplingParams(max_new_tokens=20, min_new_tokens=7, logit_bias=bias))
    assert longer.token_ids[7:] == [EOS]
    assert EOS not in longer.token_ids[:7]


def test_stop_token_ids(llm: LLM) -> None:
    comma = llm.tokenizer.encode(",")[0]
    chunks, completion = stream(llm, "x", scripted(llm, "x", TEXT, stop_token_ids=[comma]))
    assert (completion.text, completion.finish_reason) == ("To be,", "stop")
    assert completion.token_ids == [chunk.token_id for chunk in chunks] == llm.tokenizer.encode("To be,")


def test_several_eos_ids(tmp_path: Path) -> None:
    llm = LLM(save_model(tmp_path, eos_token_id=[2, 50, 60]), dtype="float64", threads=1)
    for eos_id in (2, 50, 60):
        (completion,) = llm.generate([5], SamplingParams(max_new_tokens=20, logit_bias={eos_id: 100.0}))
        assert (completion.token_ids, completion.finish_reason) == ([eos_id], "stop")


def test_a_model_without_eos(tmp_path: Path) -> None:
    """transformers#27775."""
    llm = LLM(save_model(tmp_path, eos_token_id=None), dtype="float64", threads=1)
    (completion,) = llm.generate([5, 6] * 5, SamplingParams(max_new_tokens=20, min_new_tokens=3))
    assert (len(completion.token_ids), completion.finish_reason) == (20, "length")


# The context


def test_context_limit(folder: Path) -> None:
    llm = LLM(folder, dtype="float64", threads=1, context_tokens=40)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    for size in (1, 20, 39):
        (completion,) = llm.generate([7] * size, params)
        assert (size + len(completion.token_ids), completion.finish_reason) == (40, "context")
    with pytest.raises(CapacityError, match="the prompt has 40 tokens, the context holds 40: shorten it"):
        llm.generate([[7], [7] * 40], params)
    assert llm.engine.runner.cache.num_bytes == 0


# Chat


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_chat_is_generate_on_the_template(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=15)
    ids = llm.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    expected = llm.generate(ids, params)[0]
    assert same(llm.chat(MESSAGES, params), expected)
    (*_, last) = llm.stream_chat(MESSAGES, params)
    assert last.completion is not None
    assert same(last.completion, expected)


def count_prefilled(llm: LLM, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every prefilled chunk adds its size."""
    sizes: list[int] = []
    prefill = llm.engine.runner.prefill

    def counted(rows: Any) -> Tensor:
        sizes.append(len(rows.token_ids))
        return prefill(rows)

    patch.setattr(llm.engine.runner, "prefill", counted)
    return sizes


def answer(chunks: Iterator[Chunk]) -> Completion:
    (*_, last) = chunks
    assert last.completion is not None
    return last.completion


@pytest.mark.parametrize("drafter", ["none", "all"])
def test_a_conversation_computes_each_turn_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    sizes = count_prefilled(llm, monkeypatch)
    messages: list[dict[str, str]] = []
    conversation = llm.conversation()
    kept_ids: list[int] = []
    for turn in ("Hi", "Who is there?", "I see."):
        messages.append({"role": "user", "content": turn})
        params = SamplingParams(max_new_tokens=25, ignore_eos=True, bad_words_ids=[[0], [1], [2]])
        sizes.clear()
        reply = answer(conversation.stream(messages, params, drafter=drafter))
        ids = llm.tokenizer.encode_chat(messages)
        shared = next((at for at, (old, new) in enumerate(zip(kept_ids, ids, strict=False)) if old != new), None)
        expected_shared = len(kept_ids) if shared is None else shared
        assert sum(sizes) == len(ids) - 1 - min(expected_shared, len(ids) - 1)
        assert same(reply, llm.chat(messages, params))
        kept_ids = [*ids, *reply.token_ids][:-1]
        messages.append({"role": "assistant", "content": reply.text})
    conversation.close()


def test_a_conversation_that_changes_its_past(llm: LLM) -> None:
    """sglang#8726: of what was kept, only the common beginning counts."""
    params = SamplingParams(max_new_tokens=12)
    conversation = llm.conversation()
    for text in ("Hello there", "Hello you", "Hello there", "Bye", "Hello there, how are you?", "H"):
        messages = [{"role": "user", "content": text}]
        assert same(answer(conversation.stream(messages, params)), llm.chat(messages, params))
    conversation.close()


def test_a_conversation_after_an_interrupted_answer(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=30)
    conversation = llm.conversation()
    chunks = conversation.stream(MESSAGES, params)
    list(islice(chunks, 4))
    chunks.close()  # type: ignore[attr-defined]
    assert same(answer(conversation.stream(MESSAGES, params)), llm.chat(MESSAGES, params))
    conversation.close()


def test_a_conversation_after_an_error(llm: LLM) -> None:
    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -math.inf) if input_ids.shape[1] > 45 else scores

    params = SamplingParams(max_new_tokens=12)
    conversation = llm.conversation()
    answer(conversation.stream(MESSAGES, params))
    with pytest.raises(NumericsError):
        answer(conversation.stream(MESSAGES, SamplingParams(max_new_tokens=30, logits_processors=[fail])))
    with pytest.raises(ConfigError):
        answer(conversation.stream(MESSAGES, SamplingParams(stop_token_ids=[259])))
    with pytest.raises(ConfigError):
        answer(conversation.stream(MESSAGES, params, drafter="nobody"))
    with pytest.raises(CapacityError):
        answer(conversation.stream([{"role": "user", "content": "x" * 3000}], params))
    assert same(answer(conversation.stream(MESSAGES, params)), llm.chat(MESSAGES, params))
    conversation.close()


def test_a_conversation_whose_answers_overlap(llm: LLM) -> None:
    """It promises one answer at a time, but loses no slots over two."""
    params = SamplingParams(max_new_tokens=10)
    conversation = llm.conversation()
    first, second = conversation.stream(MESSAGES, params), conversation.stream(MESSAGES, params)
    next(first)
    next(second)
    assert same(answer(first), answer(second))
    conversation.close()


def test_a_closed_conversation_can_go_on(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=5)
    conversation = llm.conversation()
    conversation.close()
    replies = []
    for _ in range(2):
        replies.append(answer(conversation.stream(MESSAGES, params)))
        conversation.close()
        conversation.close()
    assert same(*replies)


# Errors


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (["a", ""], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([5, 259], "token id 259, the model has ids below 259"),
        ([-1], "token id -1"),
        ("a\ud800", "not valid Unicode"),
        ([["a", "b"]], "a prompt must be text or token ids"),
        ([[1, 2.5]], "a prompt must be text or token ids"),
        (["a", None], "a prompt must be text or token ids"),
        (5, "a prompt must be text or token ids"),
        (None, "a prompt must be text or token ids"),
    ],
    ids=repr,
)
def test_bad_prompts(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        llm.generate(prompts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [259]}, "`stop_token_ids` holds token id 259"),
        ({"logit_bias": {300: 1.0}}, "`logit_bias` holds token id 300"),
        ({"bad_words_ids": [[3, 999]]}, "`bad_words_ids` holds token id 999"),
    ],
    ids=repr,
)
def test_ids_beyond_the_vocabulary(llm: LLM, fields: dict[str, Any], message: str) -> None:
    """At the call, not at a stream's first token."""
    for call in (llm.generate, llm.stream):
        with pytest.raises(ConfigError, match=message):
            call("a", SamplingParams(**fields))


def test_an_unknown_drafter(llm: LLM, folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no drafter 'nobody': choose one of none, "):
        llm.generate("a", drafter="nobody")
    with pytest.raises(ConfigError, match="there is no drafter 'stage', did you mean 'staged'"):
        llm.generate("a", drafter="stage")
    with pytest.raises(ConfigError, match="there is no drafter 'nobody'"):
        LLM(folder, drafter="nobody")


def test_what_was_switched_off_is_said(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", threads=1, draft="none", prompts="none")
    with pytest.raises(ConfigError, match=r"`draft`='none' \(`--draft none`\) switched off: .* another drafter"):
        llm.generate("a", drafter="draft")
    with pytest.raises(ConfigError, match=r"`prompts`='none' \(`--prompts none`\) switched off"):
        llm.generate("a", drafter="prompts")
    with pytest.raises(ConfigError, match=r"`draft`='none' \(`--draft none`\) switched off: .* use 'match'"):
        llm.generate("a", SamplingParams(temperature=1.0, verification="rejection"))


def test_samples_cannot_be_streamed(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="`n`=2 cannot be streamed"):
        llm.stream("a", SamplingParams(n=2, temperature=1.0))


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "x"}], ["x"]], ids=repr)
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InputError):
        llm.chat(messages)


def test_an_error_of_a_processor_frees_every_sequence(llm: LLM) -> None:
    calls = iter(range(10**6))

    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        if next(calls) == 17:
            raise RuntimeError("out of luck")
        return scores

    params = SamplingParams(max_new_tokens=20, logits_processors=[fail], temperature=1.0, n=3)
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate(["a", "b"], params)


class Interrupted:
    """Passes calls on, and is interrupted at a given one."""

    def __init__(self, call: Callable[..., Any], at: int) -> None:
        self.call, self.num_left = call, at

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_left -= 1
        if self.num_left == 0:
            raise KeyboardInterrupt
        return self.call(*args, **options)


@pytest.mark.parametrize(("name", "at"), [("prefill", 1), ("prefill", 3), ("fork", 1), ("fork", 2)])
def test_an_interrupted_start_frees_every_sequence(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    owner: Any = {"prefill": llm.engine.runner, "fork": llm.engine.runner.cache}[name]
    monkeypatch.setattr(owner, name, Interrupted(getattr(owner, name), at))
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=1, n=3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x" * 300, "bbb"], params, drafter="none")


def test_a_conversation_whose_prompt_is_interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=5)
    conversation = llm.conversation()
    answer(conversation.stream(MESSAGES, params))
    longer = [*MESSAGES, {"role": "user", "content": "x" * 300}]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "prefill", Interrupted(llm.engine.runner.prefill, 2))
        with pytest.raises(KeyboardInterrupt):
            answer(conversation.stream(longer, params))
    assert llm.engine.runner.cache.num_bytes == 0
    assert same(answer(conversation.stream(longer, params)), llm.chat(longer, params))
    conversation.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "`dtype` must be auto"),
        ({"device": "tpu"}, "`device` must be auto, cpu"),
        ({"threads": 0}, "`threads` must be at least 1, got 0"),
        ({"context_tokens": 1}, r"`context_tokens` must be in \[2, 2048\]"),
        ({"context_tokens": 2049}, r"`context_tokens` must be in \[2, 2048\]"),
    ],
    ids=repr,
)
def test_bad_arguments(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **options)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", None], ids=["not UTF-8", "absent"])
def test_a_corpus_that_cannot_be_read(folder: Path, tmp_path: Path, content: bytes | None) -> None:
    corpus = tmp_path / "corpus.txt"
    if content is not None:
        corpus.write_bytes(content)
    with pytest.raises(InputError, match=r"corpus .* (is not UTF-8 text|cannot be read)"):
        LLM(folder, corpus=corpus)


# Settings


def test_settings(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", threads=1, drafter="suffix", context_tokens=100)
    assert dict(llm.settings) == {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "compile": "no",
        "drafter": "suffix",
        "context_tokens": 100,
        "commit": "copy",
        "draft": "none",
        "prompts": "none",
        "next_ids": "none",
        "profile": "quick measurement",
    }


def test_rows_in_bfloat16_on_a_cpu_are_canonical(folder: Path) -> None:
    assert LLM(folder, dtype="bfloat16", device="cpu", threads=1).engine.commit_policy == "canonical"


@pytest.mark.parametrize(
    ("raw", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
    ],
    ids=repr,
)
def test_generation_defaults(tmp_path: Path, raw: dict[str, Any], defaults: dict[str, Any]) -> None:
    save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **raw}), encoding="utf-8")
    llm = LLM(tmp_path, dtype="float32", threads=1)
    assert llm.generation_defaults == defaults
    SamplingParams(**llm.generation_defaults)


def test_a_tuned_profile_is_used_and_a_damaged_one_is_not(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", threads=1)
    tuned = LatencyProfile(
        key=llm.profile_key, contexts=(0,), num_rows=(1, 4), pass_s=((1.0, 2.0),), is_bit_exact=False
    )
    path = llm.profile_store.save(tuned)
    again = LLM(folder, dtype="float32", threads=1)
    assert again.profile == tuned
    assert again.settings["profile"] == "tuned"
    path.write_text("{", encoding="utf-8")
    assert LLM(folder, dtype="float32", threads=1).settings["profile"] == "quick measurement"
    path.unlink()


@pytest.mark.parametrize("sources", [5, {"all": 5}, {"all": {"x": [1, 1]}}, {"all": {"9999": [1, 1]}}, None], ids=repr)
def test_damaged_estimates_are_forgotten(folder: Path, sources: Any) -> None:
    llm = LLM(folder, dtype="float32", threads=1)
    state = {**llm.engine.calibration.to_json(), "sources": sources}
    profile = LatencyProfile.from_json({**llm.profile.to_json(), "calibration": state})
    path = llm.profile_store.save(profile)
    again = LLM(folder, dtype="float32", threads=1)
    path.unlink()
    assert again.profile == profile
    assert again.engine.calibration.to_json() == Calibration().to_json()


@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_rules_that_test_draws_repeat_with_a_seed_and_refuse_who_ranks(llm: LLM, verification: Any) -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=4, n=3, verification=verification)
    first, again = (llm.generate("abcabc", sampling, drafter="none") for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in again]
    assert len({tuple(each.token_ids) for each in first}) == 3
    for ask in (llm.generate, llm.stream):
        with pytest.raises(
            ConfigError, match="tests what a draft model drew, drafter 'suffix' runs none: choose all, "
        ):
            ask("abcabc", replace(sampling, n=1), drafter="suffix")
        with pytest.raises(ConfigError, match="tests what a draft model drew, this model has none: train one"):
            ask("abcabc", replace(sampling, n=1), drafter="all")
    greedy = SamplingParams(max_new_tokens=12, verification=verification)
    assert (
        llm.generate("abcabc", greedy)[0].token_ids
        == llm.generate("abcabc", SamplingParams(max_new_tokens=12))[0].token_ids
    )


def test_typical_acceptance_takes_any_drafter(llm: LLM) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, seed=4, verification="typical", allow_lossy=True)
    (first,), (again,) = (llm.generate("abcabcabc", sampling, drafter="lookup") for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.stats.accepted["lookup"] > 0


@pytest.fixture
def tables(folder: Path) -> Iterator[NextIdsStore]:
    """Where the model's table of likely next ids is kept; it is gone afterwards."""
    store = LLM(folder, dtype="float32", threads=1).next_ids_store
    yield store
    store.path.unlink(missing_ok=True)


@pytest.mark.parametrize("drafter", ["recycle", "all"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shift", [0, 1, 100], ids=["right", "off by one", "wrong"])
def test_a_table_of_next_ids_changes_no_output(llm: LLM, drafter: str, temperature: float, shift: int) -> None:
    sampling = SamplingParams(max_new_tokens=30, temperature=temperature, seed=3 if temperature > 0 else None)
    expected = llm.generate(TEXT, sampling, drafter="none")[0].token_ids
    table = build_next_ids(llm.engine.runner, prefixes=[llm.tokenizer.encode(TEXT)])
    before = llm.engine  # what other tests have taught it must not decide whether drafts are bought here
    try:
        llm.engine = Engine(before.runner, before.profile, Calibration(), before.commit_policy)
        (without,) = llm.generate(TEXT, sampling, drafter=drafter)
        llm.next_ids = KnownNextIds(table=(table + shift) % 259, origin="cached", path=Path())
        (with_table,) = llm.generate(TEXT, sampling, drafter=drafter)
    finally:
        llm.next_ids, llm.engine = None, before
    assert expected == without.token_ids == with_table.token_ids
    assert with_table.stats.drafter_memory_bytes - without.stats.drafter_memory_bytes >= table.nbytes - 5000
    assert with_table.stats.drafted["recycle"] > 0


def test_a_kept_table_of_next_ids_is_used_and_a_damaged_one_is_not(folder: Path, tables: NextIdsStore) -> None:
    table = np.arange(259 * 4, dtype=np.uint16).reshape(259, 4) % 259
    tables.save(table, {})
    llm = LLM(folder, dtype="float32", threads=1)
    assert llm.next_ids is not None
    assert np.array_equal(llm.next_ids.table, table)
    assert llm.settings["next_ids"] == "cached"
    tables.path.write_bytes(tables.path.read_bytes()[:-1])
    said: list[str] = []
    again = LLM(folder, dtype="float32", threads=1, notify=said.append)
    assert again.settings["next_ids"] == "none"
    (line,) = said
    assert str(tables.path) in line


def test_a_table_of_next_ids_is_for_its_model_alone(tmp_path: Path, tables: NextIdsStore) -> None:
    tables.save(np.zeros((259, 4), dtype=np.uint16), {})
    other = save_model(tmp_path, initializer_range=0.2)
    assert LLM(other, dtype="float32", threads=1).next_ids is None
