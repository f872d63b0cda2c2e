"""Prompt tokens in the target's passes: whatever they guess, wherever they ride, the text is plain decoding's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.drafters.combined import CombinedDrafter
from foretell.drafters.fixed_prompts import RULES, FixedPromptsDrafter
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.drafters.prompts import PromptsDrafter
from foretell.engine import drafting
from foretell.engine.prompting import Prompting, Use, known_ranks, use_of
from foretell.hardware.profile import LatencyProfile
from foretell.hardware.prompt_policy import GuessRanks
from foretell.hardware.prompt_rows import PromptWorth, RowPurchase
from foretell.models.sampler import Sampler
from foretell.params import SamplingParams
from foretell.passes.rows import Rows
from foretell.verify.rule import make_rule

POLICIES = ("canonical", "copy")
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.3, seed=5)
GUESSES = frozenset({"guesses"})
ALONE = Use("prompts", False, 1.0)


def tokens_of(lab: Any, num_chains: int = 1, *, is_sampled: bool = False, num_slots: int = 3) -> PromptTokens:
    """Return random prompt tokens of a model, whose guesses were right half of the time or so."""
    random_ = torch.Generator().manual_seed(num_chains)
    model, width = lab.model, lab.model.config.hidden_size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_, dtype=model.dtype)

    counts = np.random.default_rng(0).integers(1, 9, (4,) * num_slots)
    counts[(0,) * num_slots] += 50
    sampler = None
    if is_sampled:
        kept_ids = np.arange(0, lab.VOCAB_SIZE, 2)
        tensors = {
            "sampler.mix.weight": draw(width, 2 * width),
            "sampler.mix.bias": draw(width),
            "sampler.out.weight": draw(width, width),
        }
        sampler = Sampler(tensors, model.embedding, draw(len(kept_ids), width), kept_ids, model.dtype, model.device)
    return PromptTokens(draw(num_chains, num_slots, width), GuessRanks(counts), sampler)


def drafter_of(lab: Any, tokens: PromptTokens, eos_ids: Sequence[int] = ()) -> PromptsDrafter:
    return PromptsDrafter(tokens, lab.VOCAB_SIZE, eos_ids=frozenset(eos_ids))


def engine_of(lab: Any, tokens: PromptTokens, policy: Any = "copy", **options: Any) -> Any:
    return lab.engine(policy, prompting=Prompting(tokens, lab.VOCAB_SIZE), **options)


def num_prompt_rows(stats: Any) -> int:
    """Return the rows that were neither roots, nor computed again, nor drafted."""
    rows: int = stats.num_rows - stats.num_passes - stats.num_refed_rows - stats.drafted.total()
    return rows


@pytest.fixture
def any_purchase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chance decide which nodes and prompt tokens are bought."""
    draw = random.Random(0)

    def buy(
        log_accept: Sequence[float],
        parents: Sequence[int],
        pass_s: Sequence[float],
        draft_s: float,
        worth: PromptWorth,
        num_certain: int,
    ) -> RowPurchase:
        size = draw.randint(num_certain, min(len(log_accept), len(pass_s)))
        num_prompts = [0] * size
        for node in draw.sample(range(size), size):
            left = (len(pass_s) - size) // worth.num_chains - sum(num_prompts)
            num_prompts[node] = draw.randint(0, min(left, worth.num_slots))
        return RowPurchase(tuple(num_prompts), size + worth.num_chains * sum(num_prompts), 1.0, 0.0)

    monkeypatch.setattr(drafting, "buy_rows", buy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_chains", "is_sampled"), [(1, True), (2, False)])
def test_guesses_of_prompt_tokens(family_lab: Any, num_chains: int, is_sampled: bool, policy: Any) -> None:
    tokens = tokens_of(family_lab, num_chains, is_sampled=is_sampled)
    engine = engine_of(family_lab, tokens, policy)
    for seed, params in enumerate((GREEDY, SAMPLED)):
        prompt = family_lab.prompt(seed, 1 + 8 * seed)
        truth = family_lab.decode(None, prompt, params)
        run = family_lab.run(engine, family_lab.request(prompt, drafter_of(family_lab, tokens), params))
        assert run.sequence.token_ids == truth
        assert run.sequence.stats.drafted["prompts"] > 0
        assert num_prompt_rows(run.sequence.stats) > 0


@pytest.mark.usefixtures("any_purchase")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_chains", [1, 2])
def test_prompt_tokens_anywhere_in_a_tree(family_lab: Any, num_chains: int, policy: Any) -> None:
    """What rides behind the last accepted row is what a fresh pass over the text and one chain computes."""
    tokens = tokens_of(family_lab, num_chains)
    engine, fresh = engine_of(family_lab, tokens, policy), engine_of(family_lab, tokens)
    num_checked = 0
    for seed, params in enumerate((GREEDY, SAMPLED)):
        prompt = family_lab.prompt(seed, 7)
        truth = family_lab.decode(None, prompt, params)
        drafter = family_lab.RandomTrees(truth, seed, GUESSES)
        sequence = engine.start(family_lab.request(prompt, drafter, params))
        while not sequence.is_finished:
            engine.step([sequence])
            guesses = drafter.outcomes[-1].guesses
            if guesses is None or sequence.is_finished:
                continue
            text = (sequence.token_ids + sequence.provisional)[:-1]
            for chain, (hidden, logits) in enumerate(zip(guesses.hidden, guesses.logits, strict=True)):
                num_checked += 1
                first = family_lab.VOCAB_SIZE + chain * tokens.num_slots
                rows = [*text, *range(first, first + len(hidden))]
                region = fresh.runner.cache.allocate(len(rows) + 8)
                output = fresh.runner.decode([Rows.chain(region, rows)])
                fresh.runner.cache.free(region)
                torch.testing.assert_close(hidden, output.hidden[0][len(text) : len(rows)], atol=1e-8, rtol=1e-6)
                torch.testing.assert_close(logits, output.logits[0][len(text) : len(rows)], atol=1e-8, rtol=1e-6)
        assert sequence.token_ids == truth
        assert sequence.stats.accepted.total() > 0
        engine.finish(sequence)
    assert num_checked > 5 * num_chains


def test_rows_do_not_change_beside_prompt_tokens(family_lab: Any) -> None:
    engine = engine_of(family_lab, tokens_of(family_lab))
    region = engine.runner.cache.allocate(64)
    engine.runner.prefill(Rows.chain(region, family_lab.prompt(0, 20)))
    mask = np.tril(np.ones((5, 5), dtype=np.bool_))
    mask[4, 2:4] = False  # two tokens, a chain of two behind the first, one behind the second
    mask[2:4, 1] = False
    ids = [5, 0, family_lab.VOCAB_SIZE, family_lab.VOCAB_SIZE + 1, family_lab.VOCAB_SIZE]
    beside = engine.runner.decode([Rows(region, ids, [0, 1, 1, 2, 2], mask)])
    alone = engine.runner.decode([Rows.chain(region, [5, 0])])
    torch.testing.assert_close(beside.logits[0][:2], alone.logits[0][:2], atol=1e-9, rtol=1e-9)
    assert not torch.allclose(beside.logits[0][2], alone.logits[0][1])


@pytest.mark.usefixtures("any_purchase")
@pytest.mark.parametrize("policy", POLICIES)
def test_ends_come_where_they_come_in_plain_decoding(lab: Any, policy: Any) -> None:
    """EOS within a block, the context's last position, a limit of one token, and token id 0 as content."""
    tokens = tokens_of(lab, 2)
    for seed in range(4):
        prompt = [0, *lab.prompt(seed, 5), 0]
        free = lab.decode(None, prompt)
        for params, stop_ids, context_tokens in (
            (GREEDY, [free[len(prompt) + 5]], 2048),
            (GREEDY, [], len(prompt) + 7),
            (GREEDY, [], len(prompt) + 1),
            (replace(SAMPLED, max_new_tokens=1), [], 2048),
            (replace(GREEDY, max_new_tokens=2), [], 2048),
            (replace(GREEDY, logit_bias={0: 6.0}), [], 2048),
        ):
            request = lab.request(prompt, None, params, stop_ids=stop_ids)
            plain = lab.run(lab.engine(context_tokens=context_tokens), request).sequence
            engine = engine_of(lab, tokens, policy, context_tokens=context_tokens)
            drafter = lab.RandomTrees(plain.token_ids, seed, GUESSES)
            run = lab.run(engine, lab.request(prompt, drafter, params, stop_ids=stop_ids))
            assert run.sequence.token_ids == plain.token_ids
            assert run.sequence.finish_reason == plain.finish_reason
            assert engine.runner.cache.num_bytes == 0
            if params.logit_bias:
                assert run.output_ids.count(0) > 3


def test_no_prompt_token_is_bought_that_comes_too_late(lab: Any) -> None:
    """A guess is used one step later at the earliest: two tokens leave room for none."""
    tokens = tokens_of(lab)
    for limit, num_rows in ((1, 0), (2, 0), (3, 1)):
        params = SamplingParams(max_new_tokens=limit)
        request = lab.request(lab.prompt(0), drafter_of(lab, tokens), params)
        assert num_prompt_rows(lab.run(engine_of(lab, tokens), request).sequence.stats) == num_rows


@pytest.mark.parametrize("policy", POLICIES)
def test_several_sequences_and_samples(lab: Any, policy: Any) -> None:
    tokens = tokens_of(lab, is_sampled=True)
    engine = engine_of(lab, tokens, policy)
    prompts = [lab.prompt(seed, size) for seed, size in ((1, 3), (2, 9))]
    requests = [lab.request(prompt, drafter_of(lab, tokens), SAMPLED) for prompt in prompts]
    sequences = [engine.start(request) for request in requests]
    fork = lab.request(prompts[0], requests[0].drafter.fork(), SAMPLED, sequence_key=1)
    sequences.append(engine.fork(sequences[0], fork))
    expected = [lab.decode(None, prompt, SAMPLED) for prompt in prompts]
    expected.append(lab.decode(None, prompts[0], SAMPLED, sequence_key=1))
    while active := [sequence for sequence in sequences if not sequence.is_finished]:
        engine.step(active)
    assert [sequence.token_ids for sequence in sequences] == expected
    assert len(set(map(tuple, expected))) == 3
    assert all(num_prompt_rows(sequence.stats) > 0 for sequence in sequences)


@pytest.mark.parametrize("name", RULES)
def test_settled_trees_keep_to_the_rows_of_a_pass(lab: Any, name: str) -> None:
    """The root's chains alone take more."""
    tokens, prompt = tokens_of(lab, 16, num_slots=4), lab.prompt(0)
    larger = LatencyProfile(key={}, contexts=(0,), num_rows=(1, 40), pass_s=((1.0, 1.0),))
    truth = lab.decode(None, prompt)
    num_rows = {}
    for profile in (lab.FLAT, larger):
        engine = engine_of(lab, tokens, profile=profile)
        trees = RULES[name](tokens, engine.drafting.curve(0))
        drafter = FixedPromptsDrafter(tokens, trees, lab.VOCAB_SIZE, name, eos_ids=frozenset())
        run = lab.run(engine, lab.request(prompt, drafter))
        assert run.sequence.token_ids == truth
        num_rows[profile.max_rows] = num_prompt_rows(run.sequence.stats)
    assert num_rows[16] == 0 < num_rows[40]


def test_rows_that_cost_a_pass_each_are_not_bought(lab: Any) -> None:
    tokens = tokens_of(lab)
    dear, cheap = (
        LatencyProfile(key={}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.0 + 15 * row_s),))
        for row_s in (1.0, 0.02)
    )
    truth = lab.decode(None, lab.prompt(0))
    rows = {}
    for name, profile in (("dear", dear), ("cheap", cheap)):
        request = lab.request(lab.prompt(0), drafter_of(lab, tokens))
        run = lab.run(engine_of(lab, tokens, profile=profile), request)
        assert run.sequence.token_ids == truth
        rows[name] = num_prompt_rows(run.sequence.stats)
    assert rows["dear"] == 0 < rows["cheap"]


def test_what_was_measured_before_does_not_decide_a_lossy_draft(lab: Any) -> None:
    """Typical acceptance lets the draft decide what a seed gives: the same seed must see the same rows again."""
    tokens = tokens_of(lab)
    profile = LatencyProfile(key={}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.75),))
    engine = engine_of(lab, tokens, profile=profile)
    params = replace(SAMPLED, verification="typical", allow_lossy=True)
    outputs, rows = [], []
    for is_measured in (False, True):
        request = lab.request(lab.prompt(0), drafter_of(lab, tokens), params)
        request = replace(request, rule=make_rule(params, request.chooser, 5, 0))
        if is_measured:
            for _ in range(100):
                engine.prompting.record(replace(ALONE, is_sampled=True), 1000, 1.0)
        run = lab.run(engine, request)
        outputs.append(run.sequence.token_ids)
        rows.append(run.sequence.stats.num_rows)
    assert outputs[0] == outputs[1]
    assert rows[0] == rows[1]


def test_the_measured_rate_takes_over_by_and_by(lab: Any) -> None:
    prompting = Prompting(tokens_of(lab), lab.VOCAB_SIZE)
    pass_s = [1.0 + 0.05 * row for row in range(8)]
    before = prompting.worth(pass_s, ALONE)
    assert before == prompting.policy(pass_s).worth
    for _ in range(500):
        prompting.record(ALONE, 3, 1.0)
    assert before.tokens_per_s < prompting.worth(pass_s, ALONE).tokens_per_s < 3.0
    assert prompting.worth(pass_s, ALONE).values == before.values
    assert prompting.worth(pass_s, replace(ALONE, is_sampled=True)) == before


def test_guesses_beside_other_drafts_are_worth_less(lab: Any) -> None:
    prompting = Prompting(tokens_of(lab), lab.VOCAB_SIZE)
    pass_s = [1.0 + 0.05 * row for row in range(8)]
    alone = prompting.worth(pass_s, ALONE).values
    for use in (Use("all", False, 0.3), Use("all", True, 0.1)):
        assert prompting.worth(pass_s, use).values == tuple(use.share * value for value in alone)
    engine = engine_of(lab, tokens_of(lab))
    shares = []
    for drafter in (drafter_of(lab, tokens_of(lab)), CombinedDrafter([drafter_of(lab, tokens_of(lab))], "all")):
        sequence = engine.start(lab.request(lab.prompt(0), drafter))
        shares.append(use_of(sequence).share)
        engine.finish(sequence)
    assert shares[0] == 1.0 > shares[1] > 0


def test_ranks_that_a_tuning_found_decide(lab: Any) -> None:
    tokens = tokens_of(lab)
    kept = {"digest": tokens.digest, "counts": np.zeros_like(tokens.ranks.counts).tolist()}
    found = known_ranks(kept, tokens)
    assert found is not None
    pass_s = [1.0 + 0.05 * row for row in range(8)]
    assert Prompting(tokens, lab.VOCAB_SIZE, found).policy(pass_s).tokens_per_pass < 1.1
    for other in ({}, kept | {"digest": "another"}, kept | {"counts": [[1]]}):
        assert known_ranks(other, tokens) is None


DAMAGED: dict[str, Any] = {
    "none": None,
    "ragged": [[1, 2], [3]],
    "text": "many",
    "a dict": {"1": 2},
    "texts": np.full((4, 4, 4), "7").tolist(),
    "huge": np.full((4, 4, 4), 10**30).tolist(),
    "overflowing": np.full((4, 4, 4), 2**62).tolist(),
    "negative": np.full((4, 4, 4), -1).tolist(),
    "fractional": np.full((4, 4, 4), 0.5).tolist(),
    "not finite": np.full((4, 4, 4), np.nan).tolist(),
    "truths": np.full((4, 4, 4), True).tolist(),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_ranks_are_left_aside(lab: Any, name: str) -> None:
    tokens = tokens_of(lab)
    assert known_ranks({"digest": tokens.digest, "counts": DAMAGED[name]}, tokens) is None
    assert known_ranks({"digest": tokens.digest}, tokens) is None
