"""What went wrong elsewhere, and has no better place among these tests; each names its issue.

Others are named where they belong: endings, rows, batches, numerics and drafting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from foretell.drafters.catalog import DRAFTERS, make_drafter
from foretell.drafters.drafter import Proposal
from foretell.params import SamplingParams
from foretell.tree.token_tree import TokenTree

POLICIES = ("canonical", "copy")


@pytest.mark.parametrize("policy", POLICIES)
def test_vllm_39273_steps_without_drafts_between_steps_with(lab: Any, policy: Any) -> None:
    """A step with nothing to verify left stale state behind, and the next one lost tokens."""

    class EveryOther(lab.Sideways):  # type: ignore[misc]
        def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
            if len(self.proposals) % self.seed == 0:
                super().fill(tree, future, proposal)

    for period in (2, 3):
        prompt = lab.prompt(period)
        truth = lab.decode(None, prompt)
        run = lab.run(lab.engine(policy), lab.request(prompt, EveryOther(truth, period)))
        assert run.sequence.token_ids == truth
        assert 0 < run.sequence.stats.num_plain_passes < run.sequence.stats.num_passes


@pytest.mark.parametrize("name", DRAFTERS)
def test_transformers_31301_an_eos_in_the_prompt_is_not_copied_across(lab: Any, name: str) -> None:
    """Prompt lookup drafted the EOS of an earlier turn and what followed it."""
    turn = [*lab.prompt(0, 6), 2]
    prompt = [*turn, *turn, *turn[:3]]
    truth = lab.decode(None, prompt, stop_ids=[2])
    drafter = make_drafter(name, eos_ids=frozenset({2}), corpus=[turn * 3])
    assert lab.decode(drafter, prompt, stop_ids=[2]) == truth
    drafter.begin(prompt)
    tree = drafter.propose(Proposal(root=prompt[-1], max_nodes=30, max_depth=20))
    assert all(tree.token_ids[parent] != 2 for parent in tree.parents[1:])


@pytest.mark.parametrize("name", DRAFTERS)
def test_transformers_48981_endings_are_the_engines_business(lab: Any, name: str) -> None:
    """Fixed drafter by drafter, the same ending was missed again in the next one."""
    prompt = lab.prompt(1) * 3
    free = lab.decode(None, prompt, SamplingParams(max_new_tokens=30))[len(prompt) :]
    for place in (0, 4, 11, 23):
        drafter = make_drafter(name, eos_ids=frozenset())  # it does not know
        params = SamplingParams(max_new_tokens=30)
        run = lab.run(lab.engine(), lab.request(prompt, drafter, params, stop_ids=[free[place]]))
        assert run.output_ids == free[: free.index(free[place]) + 1]


def test_vllm_9834_every_request_is_verified_with_its_own_parameters(lab: Any) -> None:
    """Tokens of all requests were accepted by the parameters of one."""
    prompt = lab.prompt(4)
    several = [
        SamplingParams(max_new_tokens=16),
        SamplingParams(max_new_tokens=16, repetition_penalty=2.0),
        SamplingParams(max_new_tokens=16, temperature=2.0, seed=0),
        SamplingParams(max_new_tokens=16, temperature=2.0, seed=0, top_k=2),
        SamplingParams(max_new_tokens=16, bad_words_ids=[[token_id] for token_id in range(40)]),
    ]
    truths = [lab.decode(None, prompt, params) for params in several]
    assert len(set(map(tuple, truths))) == len(several)
    engine = lab.engine()
    sequences = [
        engine.start(lab.request(prompt, lab.RandomTrees(truth, place), params))
        for place, (truth, params) in enumerate(zip(truths, several, strict=True))
    ]
    while active := [each for each in sequences if not each.is_finished]:
        engine.step(active)
    assert [each.token_ids for each in sequences] == truths


@pytest.mark.parametrize("policy", POLICIES)
def test_vllm_6718_a_penalty_counts_the_path_to_its_node(lab: Any, policy: Any) -> None:
    """A token drafted twice is less likely the second time, within one tree."""
    prompt = lab.prompt(3)
    loop = lab.decode(None, prompt)
    assert max(Counter(loop[5:]).values()) > 10  # this prompt makes the model repeat itself
    params = SamplingParams(max_new_tokens=24, frequency_penalty=2.0)
    truth = lab.decode(None, prompt, params)
    assert truth != loop

    class Parrot(lab.Oracle):  # type: ignore[misc]
        """Drafts as if there were no penalty."""

        def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
            for _ in range(min(proposal.max_nodes, proposal.max_depth)):
                tree.add(len(tree) - 1, loop[-1], -0.01 * len(tree), "parrot")

    run = lab.run(lab.engine(policy), lab.request(prompt, Parrot(truth), params))
    assert run.sequence.token_ids == truth


def test_vllm_ascend_13730_wrong_drafts_are_refused_when_sampling(lab: Any) -> None:
    """With a uniform number stuck at 0 every draft passed."""
    for temperature in (0.5, 1.0, 5.0):
        prompt, params = lab.prompt(6), SamplingParams(max_new_tokens=20, temperature=temperature, seed=1)
        truth = lab.decode(None, prompt, params)
        run = lab.run(lab.engine(), lab.request(prompt, lab.Liar(truth), params))
        assert run.sequence.token_ids == truth
        assert run.sequence.stats.accepted.total() == 0


def test_vllm_13196_what_is_accepted_changes_with_the_seed(lab: Any) -> None:
    prompt = lab.prompt(7)
    greedy = lab.decode(None, prompt)
    accepted = set()
    for seed in range(12):
        params = SamplingParams(max_new_tokens=24, temperature=0.3, seed=seed)
        truth = lab.decode(None, prompt, params)

        class Greedy(lab.Oracle):  # type: ignore[misc]
            """Drafts what greedy decoding would say at the same place."""

            def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
                start = self.position + len(proposal.ahead)
                for token_id in greedy[start : start + min(proposal.max_nodes, proposal.max_depth)]:
                    tree.add(len(tree) - 1, token_id, -0.1 * len(tree), "greedy")

        run = lab.run(lab.engine(), lab.request(prompt, Greedy(truth), params))
        assert run.sequence.token_ids == truth
        accepted.add(run.sequence.stats.accepted.total())
    assert len(accepted) > 2


@pytest.mark.parametrize("drafter", ["Oracle", "Sideways", "RandomTrees"])
def test_sglang_13826_slots_of_refused_rows_are_not_kept(lab: Any, drafter: str) -> None:
    """The length after a pass is what was accepted, not what was computed: nothing piles up over many requests."""
    engine = lab.engine("copy")
    prompt = lab.prompt(8)
    truth = lab.decode(None, prompt)
    for seed in range(20):
        sequence = engine.start(lab.request(prompt, getattr(lab, drafter)(truth, seed)))
        before = engine.runner.cache.num_bytes
        while not sequence.is_finished:
            engine.step([sequence])
            assert sequence.region.length == len(sequence.token_ids) - 1
            assert engine.runner.cache.num_bytes == before
        engine.finish(sequence)
        assert engine.runner.cache.num_bytes == 0


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_sglang_15360_wide_trees(lab: Any, width: int) -> None:
    """With several children a node, accepted rows lie apart; taken for neighbours they gave gibberish."""

    class Wide(lab.Oracle):  # type: ignore[misc]
        """The truth is the last and least likely child of every node."""

        def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
            node = 0
            for token_id in future:
                if len(tree) - 1 + width > proposal.max_nodes:
                    return
                for offset in reversed(range(width)):
                    child = tree.add(node, (token_id + offset) % 64, tree.log_accept[node] - 0.1, "wide")
                node = child

    prompt = lab.prompt(9)
    truth = lab.decode(None, prompt)
    for policy in POLICIES:
        run = lab.run(lab.engine(policy), lab.request(prompt, Wide(truth)))
        assert run.sequence.token_ids == truth
        assert run.sequence.stats.accepted.total() >= len(truth) - len(prompt) - run.sequence.stats.num_passes


@pytest.mark.parametrize("drafter", ["Oracle", "Sideways"])
def test_sglang_31569_nothing_leaks_past_the_length(lab: Any, drafter: str) -> None:
    """A block that ends at the limit and holds a stop id earlier ended at the limit, with tokens after the stop."""
    prompt = lab.prompt(1)
    truth = lab.decode(None, prompt, SamplingParams(max_new_tokens=40))
    output = truth[5:]
    for limit in (5, 12, 15):
        for place in range(limit):
            params = SamplingParams(max_new_tokens=limit)
            request = lab.request(prompt, getattr(lab, drafter)(truth), params, stop_ids=[output[place]])
            run = lab.run(lab.engine("copy"), request)
            assert run.output_ids == output[: output.index(output[place]) + 1]
            assert run.sequence.finish_reason == "stop"


def test_medusa_99_the_shape_of_trees_changes_nothing(lab: Any) -> None:
    prompt = lab.prompt(10)
    truth = lab.decode(None, prompt)
    outputs = {
        tuple(lab.decode(drafter(truth, seed), prompt))
        for drafter in (lab.Oracle, lab.Sideways, lab.RandomTrees, lab.Liar)
        for seed in range(5)
    }
    assert outputs == {tuple(truth)}
