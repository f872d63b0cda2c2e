"""The drafter of prompt tokens: what it makes of guesses, with and without a sampler, greedy and with noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.drafters.drafter import DraftSampling, Guesses, Outcome, Proposal
from foretell.drafters.fixed_prompts import RULES, FixedPromptsDrafter
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.drafters.prompts import PromptsDrafter
from foretell.hardware.prompt_policy import GuessRanks
from foretell.models.sampler import Sampler
from foretell.tree.token_tree import TokenTree
from foretell.verify.noise import gumbel_noise_array

VOCAB_SIZE, WIDTH, EOS, TIP = 24, 8, 5, 7
KEPT = np.array([0, 1, 3, 5, 6, 8, 9, 11, 12, 15, 17, 20, 23])


def tokens_of(*, has_sampler: bool, num_chains: int = 1) -> PromptTokens:
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    counts = np.ones((5, 5, 5), dtype=np.int64)
    counts[0, 0, 0] = 200
    sampler = None
    if has_sampler:
        tensors = {
            "sampler.mix.weight": draw(WIDTH, 2 * WIDTH),
            "sampler.mix.bias": draw(WIDTH),
            "sampler.out.weight": draw(WIDTH, WIDTH),
        }
        sampler = Sampler(
            tensors, draw(VOCAB_SIZE, WIDTH), draw(len(KEPT), WIDTH), KEPT, torch.float64, torch.device("cpu")
        )
    return PromptTokens(draw(num_chains, 3, WIDTH), GuessRanks(counts), sampler)


def guesses_of(num_chains: int = 1, num_slots: int = 3) -> Guesses:
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(num_chains, num_slots, WIDTH, generator=random, dtype=torch.float64)
    logits = torch.randn(num_chains, num_slots, VOCAB_SIZE + 2, generator=random, dtype=torch.float64)
    return Guesses(hidden, 2 * logits)  # a padded vocabulary


def told(drafter: Any, guesses: Guesses | None, num_tokens: int = 4) -> Any:
    drafter.begin([1] * (num_tokens - 1))
    drafter.observe(Outcome([TIP], guesses=guesses))
    return drafter


def children(tree: TokenTree, node: int) -> dict[int, float]:
    """Return a node's children with their probabilities, given the node's."""
    return {
        tree.token_ids[child]: float(np.exp(tree.log_accept[child] - tree.log_accept[node]))
        for child in range(1, len(tree))
        if tree.parents[child] == node
    }


@pytest.mark.parametrize("has_sampler", [False, True])
def test_probabilities_are_those_of_the_slot_and_of_the_token_before(has_sampler: bool) -> None:
    tokens, guesses = tokens_of(has_sampler=has_sampler, num_chains=2), guesses_of(num_chains=2)
    drafter = told(PromptsDrafter(tokens, VOCAB_SIZE, eos_ids=frozenset()), guesses)
    tree = drafter.propose(Proposal(root=TIP, max_nodes=40, max_depth=8))
    assert max(tree.depths()) == 3
    num_checked = 0
    for node, depth in enumerate(tree.depths()):
        found = children(tree, node)
        if depth == 3 or not found:
            continue
        if tokens.sampler is None:
            scores, ids = guesses.logits[:, depth, :VOCAB_SIZE].mean(0), np.arange(VOCAB_SIZE)
        else:
            scores, ids = tokens.sampler(guesses.hidden.mean(0)[depth, None], [tree.token_ids[node]])[0], KEPT
        expected = dict(zip(ids.tolist(), scores.softmax(-1).tolist(), strict=True))
        assert found == pytest.approx({token_id: min(expected[token_id], 0.99) for token_id in found}, rel=1e-4)
        num_checked += 1
    assert num_checked > 2


@pytest.mark.parametrize("ahead", [(), (9, 11)])
def test_sampled_drafts_rank_by_the_targets_own_noise(ahead: tuple[int, ...]) -> None:
    guesses = guesses_of()
    drafter = told(PromptsDrafter(tokens_of(has_sampler=False), VOCAB_SIZE, eos_ids=frozenset()), guesses, num_tokens=4)
    sampling = DraftSampling(seed=3, sequence_key=1, temperature=0.7)
    tree = drafter.propose(Proposal(root=TIP, max_nodes=30, max_depth=3, ahead=ahead, sampling=sampling))
    node = 0
    for slot in range(3):
        noise = gumbel_noise_array(3, 1, 4 + len(ahead) + slot, np.arange(VOCAB_SIZE))
        best = int((guesses.logits[0, slot, :VOCAB_SIZE] / 0.7 + torch.from_numpy(noise)).argmax())
        found = children(tree, node)
        assert max(found, key=found.__getitem__) == best
        node = next(each for each in range(len(tree)) if tree.parents[each] == node and tree.token_ids[each] == best)


def test_nothing_is_drafted_without_guesses_below_eos_or_beyond_limits() -> None:
    drafter = PromptsDrafter(tokens_of(has_sampler=True), VOCAB_SIZE, eos_ids=frozenset(KEPT.tolist()))
    proposal = Proposal(root=TIP, max_nodes=9, max_depth=8)
    assert len(told(drafter, None).propose(proposal)) == 1
    tree = told(drafter, guesses_of()).propose(proposal)
    assert max(tree.depths()) == 1, "every id ends the text"
    assert len(told(drafter, guesses_of()).propose(Proposal(root=TIP, max_nodes=0, max_depth=8))) == 1
    twin = drafter.fork()
    drafter.begin([1, 2])
    assert len(drafter.propose(proposal)) == 1
    assert twin.propose(proposal) == tree


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_slots", [0, 1, 3])
def test_settled_trees_are_filled_with_guesses_by_rank(name: str, num_slots: int) -> None:
    tokens = tokens_of(has_sampler=True)
    trees = RULES[name](tokens, [1.0 + 0.01 * row for row in range(16)])
    drafter = FixedPromptsDrafter(tokens, trees, VOCAB_SIZE, name, eos_ids=frozenset())
    told(drafter, guesses_of(num_slots=num_slots) if num_slots else None)
    tree = drafter.propose(Proposal(root=TIP, max_nodes=15, max_depth=8))
    assert tree.num_prompts is not None
    assert len(tree) == len(tree.num_prompts) == len(trees[num_slots].paths)
    assert len(tree) + sum(tree.num_prompts) <= 16
    assert max(tree.depths()) <= num_slots
    small = drafter.propose(Proposal(root=TIP, max_nodes=3, max_depth=1))
    assert small.num_prompts is not None
    assert max(small.depths()) <= 1
    ranked = children(tree, 0)
    assert list(ranked.values()) == sorted(ranked.values(), reverse=True) or name == "prompts-random"
