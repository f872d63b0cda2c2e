"""Where an output ends: at every index of an accepted block, and wherever in a tree the last token stood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foretell.errors import CapacityError, InputError
from foretell.params import SamplingParams

POLICIES = ("canonical", "copy")
DRAFTERS = ("Oracle", "Sideways", "RandomTrees")
NUM_TOKENS = 18


@pytest.fixture(scope="module")
def truth(lab: Any) -> list[int]:
    """Prompt and output of plain decoding; the output's first `NUM_TOKENS` tokens hold many different ids."""
    prompt = lab.prompt(1)
    ids: list[int] = lab.decode(None, prompt, SamplingParams(max_new_tokens=40))
    assert len(set(ids[5 : 5 + NUM_TOKENS])) > 10
    return ids


class Countdown:
    """Ends an output after `place` tokens and one."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.asked: list[int] = []

    def __call__(self, token_id: int) -> bool:
        self.asked.append(token_id)
        return len(self.asked) > self.place


def check(run: Any, expected: list[int], reason: str) -> None:
    """What ended is emitted, committed, counted and told to the drafter up to its last token, and no further."""
    sequence = run.sequence
    assert run.output_ids == expected
    assert sequence.finish_reason == reason
    assert sequence.stats.num_output_tokens == len(expected)
    observed = [token_id for outcome in sequence.request.drafter.outcomes for token_id in outcome.token_ids]
    assert observed == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_id(lab: Any, truth: list[int], drafter: str, policy: Any) -> None:
    """transformers#47912: an EOS inside an accepted block ends the output there."""
    output, params = truth[5:], SamplingParams(max_new_tokens=30)
    for place, stop_id in enumerate(output[:NUM_TOKENS]):
        drafting = getattr(lab, drafter)(truth, place)
        run = lab.run(lab.engine(policy), lab.request(truth[:5], drafting, params, stop_ids=[stop_id]))
        check(run, output[: output.index(stop_id) + 1], "stop")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_callback(lab: Any, truth: list[int], drafter: str, policy: Any) -> None:
    """transformers#48039: what a caller decides token by token is asked once per token, in order, inside the block."""
    params = SamplingParams(max_new_tokens=30)
    for place in range(NUM_TOKENS):
        drafting, countdown = getattr(lab, drafter)(truth, place), Countdown(place)
        run = lab.run(lab.engine(policy), lab.request(truth[:5], drafting, params, should_stop=countdown))
        check(run, truth[5 : 6 + place], "stop")
        assert countdown.asked == run.output_ids


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_max_new_tokens(lab: Any, truth: list[int], drafter: str, policy: Any) -> None:
    """transformers#28555: drafts do not carry an output past its limit."""
    for place in range(NUM_TOKENS):
        drafting = getattr(lab, drafter)(truth, place)
        params = SamplingParams(max_new_tokens=place + 1)
        run = lab.run(lab.engine(policy), lab.request(truth[:5], drafting, params))
        check(run, truth[5 : 6 + place], "length")
        assert all(proposal.max_depth <= place - len(proposal.ahead) for proposal in drafting.proposals)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_context_limit(lab: Any, truth: list[int], drafter: str, policy: Any) -> None:
    params = SamplingParams(max_new_tokens=40)
    for place in range(NUM_TOKENS):
        drafting = getattr(lab, drafter)(truth, place)
        engine = lab.engine(policy, context_tokens=6 + place)
        run = lab.run(engine, lab.request(truth[:5], drafting, params))
        check(run, truth[5 : 6 + place], "context")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_beats_length(lab: Any, truth: list[int], drafter: str) -> None:
    """sglang#31599: an output that ends by itself in the last token it may have was not cut."""
    output = truth[5:]
    for stop_id in dict.fromkeys(output[:NUM_TOKENS]):
        size = output.index(stop_id) + 1
        params = SamplingParams(max_new_tokens=size)
        drafting = getattr(lab, drafter)(truth, size)
        engine = lab.engine(context_tokens=5 + size)
        check(lab.run(engine, lab.request(truth[:5], drafting, params, stop_ids=[stop_id])), output[:size], "stop")


def test_stop_id_is_shown_to_the_callback(lab: Any, truth: list[int]) -> None:
    """The callback keeps the text: a token that it never saw would be missing from the result."""
    countdown = Countdown(99)
    run = lab.run(lab.engine(), lab.request(truth[:5], stop_ids=[truth[5 + 3]], should_stop=countdown))
    assert countdown.asked == run.output_ids


def test_several_stop_ids(lab: Any, truth: list[int]) -> None:
    output = truth[5:]
    late, early = output[14], output[9]
    first = min(output.index(late), output.index(early))
    for stop_ids in ([late, early], [early, late], [early, late, 63]):
        request = lab.request(truth[:5], lab.Oracle(truth), SamplingParams(max_new_tokens=30), stop_ids=stop_ids)
        check(lab.run(lab.engine(), request), output[: first + 1], "stop")


def test_no_stop_id(lab: Any, truth: list[int]) -> None:
    """transformers#27775: a model without EOS runs to its length."""
    request = lab.request(truth[:5], lab.Oracle(truth), SamplingParams(max_new_tokens=30))
    check(lab.run(lab.engine(), request), truth[5:35], "length")


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_asked_about_what_follows_the_end(lab: Any, truth: list[int], policy: Any) -> None:
    """vllm#44006: a draft may go on below an EOS; no processor is shown it, and none can object."""
    output = truth[5:]
    stop_id = output[9]
    expected = output[: output.index(stop_id) + 1]

    def processor(input_ids: Any, scores: Any) -> Any:
        assert stop_id not in input_ids[0, 5:], "asked for a token after the end"
        return scores

    params = SamplingParams(max_new_tokens=30, logits_processors=[processor])
    for drafter in DRAFTERS:
        drafting = getattr(lab, drafter)(truth)
        run = lab.run(lab.engine(policy), lab.request(truth[:5], drafting, params, stop_ids=[stop_id]))
        check(run, expected, "stop")


@pytest.mark.parametrize("policy", POLICIES)
def test_logprobs_end_with_the_tokens(lab: Any, truth: list[int], policy: Any) -> None:
    """vllm#47616, and the log-probabilities of a drafted token are those of the row that chose it."""
    params = SamplingParams(max_new_tokens=NUM_TOKENS, logprobs=3)
    plain = lab.run(lab.engine(policy), lab.request(truth[:5], None, params))
    expected = [each.logprobs for block in plain.blocks for each in block]
    for place in (2, 7, 13, 17):
        for drafter in DRAFTERS:
            drafting = getattr(lab, drafter)(truth)
            run = lab.run(lab.engine(policy), lab.request(truth[:5], drafting, params, should_stop=Countdown(place)))
            found = [each.logprobs for block in run.blocks for each in block]
            assert [each.token_id for each in found] == run.output_ids == truth[5 : 6 + place]
            for ours, theirs in zip(found, expected, strict=False):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
                assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]


# Prompts and contexts at their edges


def test_one_token_prompt(family_lab: Any) -> None:
    truth = family_lab.decode(None, [7])
    assert family_lab.decode(family_lab.Oracle(truth), [7]) == truth


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_prompt_one_below_the_context(lab: Any, truth: list[int], drafter: str) -> None:
    drafting = getattr(lab, drafter)(truth)
    run = lab.run(lab.engine(context_tokens=6), lab.request(truth[:5], drafting))
    check(run, truth[5:6], "context")
    assert drafting.proposals == []


@pytest.mark.parametrize("size", [6, 7, 100])
def test_prompt_that_fills_the_context(lab: Any, size: int) -> None:
    engine = lab.engine(context_tokens=6)
    with pytest.raises(CapacityError, match=f"the prompt has {size} tokens, the context holds 6: shorten it"):
        engine.start(lab.request(lab.prompt(0, size)))
    assert engine.runner.cache.num_bytes == 0


def test_empty_prompt(lab: Any) -> None:
    engine = lab.engine()
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.start(lab.request([]))
    assert engine.runner.cache.num_bytes == 0


@pytest.mark.parametrize("token_id", [-1, 64, 10**9])
def test_prompt_with_an_unknown_id(lab: Any, token_id: int) -> None:
    engine = lab.engine()
    with pytest.raises(InputError, match=f"token id {token_id}, the model has ids below 64"):
        engine.start(lab.request([3, token_id, 4]))
    assert engine.runner.cache.num_bytes == 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_models_last_position(make_lab: Callable[..., Any], family: str, policy: Any) -> None:
    """A model of 24 positions has no 25th to give to a draft (vllm#23072); the last one is used."""
    small = make_lab(family, max_position_embeddings=24)
    for size in (1, 11, 22, 23):
        prompt, params = small.prompt(size, size), SamplingParams(max_new_tokens=100)
        plain = small.run(small.engine(policy, context_tokens=24), small.request(prompt, None, params))
        truth = plain.sequence.token_ids
        assert len(truth) == 24
        assert plain.sequence.finish_reason == "context"
        for drafter in DRAFTERS:
            drafting = getattr(small, drafter)(truth + [0] * 30, size)
            run = small.run(small.engine(policy, context_tokens=24), small.request(prompt, drafting, params))
            check(run, truth[size:], "context")


def test_drafter_that_proposes_nothing(lab: Any, truth: list[int]) -> None:
    """vllm#7047, #20531: an empty proposal is a plain pass."""
    drafting = lab.Silent(truth)
    run = lab.run(lab.engine(), lab.request(truth[:5], drafting, SamplingParams(max_new_tokens=10)))
    check(run, truth[5:15], "length")
    assert len(drafting.proposals) > 0
    assert run.sequence.stats.num_plain_passes == run.sequence.stats.num_passes == 10
