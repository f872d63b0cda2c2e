"""Verification procedures that look right and are biased: the test that must reject them, and ours, which it accepts.

Each procedure takes its randomness from a `Chance`. Enumerated, it yields its exact output law; sampled, draws for a
chi-square test. A rejection rule is exact only if the children were drawn from the very probabilities that it is given,
and are tested in the order in which they were drawn; each biased procedure breaks this in its own way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import pytest
import torch

from foretell.params import SamplingParams
from foretell.tree.pack import pack
from foretell.tree.token_tree import TokenTree
from foretell.verify.choose import TokenChooser
from foretell.verify.match import match
from foretell.verify.noise import gumbel_noise

Probs = list[float]
TARGET_PROBS = [0.55, 0.25, 0.15, 0.05]
DRAFT_PROBS = [0.30, 0.50, 0.05, 0.15]
V = len(TARGET_PROBS)


# Chance


class Chance(Protocol):
    def draw(self, probs: Sequence[float]) -> int:
        """Return an index with these probabilities."""


class Sampled:
    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)

    def draw(self, probs: Sequence[float]) -> int:
        return self.generator.choices(range(len(probs)), probs)[0]


class Scripted:
    """Follows a script of choices, then takes the first possible one and notes the others as scripts to come."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.weight = 1.0
        self.made: list[int] = []
        self.others: list[list[int]] = []

    def draw(self, probs: Sequence[float]) -> int:
        possible = [index for index, probability in enumerate(probs) if probability > 0]
        if len(self.made) < len(self.script):
            choice = self.script[len(self.made)]
        else:
            choice = possible[0]
            self.others += [[*self.made, other] for other in possible[1:]]
        self.made.append(choice)
        self.weight *= probs[choice] / sum(probs)
        return choice


def coin(chance: Chance, probability: float) -> bool:
    probability = min(max(probability, 0.0), 1.0)
    return chance.draw([probability, 1.0 - probability]) == 0


@dataclass(frozen=True)
class Emitted:
    """One step's first token, and whether a draft token was accepted."""

    token_id: int
    is_accepted: bool


Procedure = Callable[[Chance], Emitted]


@dataclass(frozen=True)
class OutputLaw:
    probs: Probs
    acceptance: float

    @property
    def distance(self) -> float:
        """Total variation from the target."""
        return sum(abs(ours - target) for ours, target in zip(self.probs, TARGET_PROBS)) / 2


def enumerate_outputs(procedure: Procedure) -> OutputLaw:
    probs, acceptance, total = [0.0] * V, 0.0, 0.0
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Scripted(scripts.pop())
        emitted = procedure(chance)
        scripts += chance.others
        probs[emitted.token_id] += chance.weight
        acceptance += chance.weight * emitted.is_accepted
        total += chance.weight
    assert total == pytest.approx(1.0)
    return OutputLaw(probs, acceptance)


# Rules


def normalized(weights: Sequence[float]) -> Probs:
    total = sum(weights)
    return [weight / total for weight in weights]


def residual(target_probs: Probs, draft_probs: Probs) -> Probs:
    rest = [max(target - draft, 0.0) for target, draft in zip(target_probs, draft_probs)]
    return normalized(rest) if sum(rest) > 1e-12 else target_probs


def without(probs: Probs, token_id: int) -> Probs:
    rest = [0.0 if other == token_id else probability for other, probability in enumerate(probs)]
    return normalized(rest) if sum(rest) > 0 else rest


def draw_without_replacement(chance: Chance, probs: Probs, count: int) -> list[int]:
    drawn = []
    for _ in range(count):
        drawn.append(chance.draw(probs))
        probs = without(probs, drawn[-1])
    return drawn


def verify_recursively(chance: Chance, children: Sequence[int], draft_probs: Probs) -> Emitted:
    """Recursive rejection without replacement: exact if `children` were drawn in this order, without replacement."""
    target_probs = TARGET_PROBS
    for child in children:
        if draft_probs[child] > 0 and coin(chance, target_probs[child] / draft_probs[child]):
            return Emitted(child, True)
        target_probs, draft_probs = residual(target_probs, draft_probs), without(draft_probs, child)
    return Emitted(chance.draw(target_probs), False)


def verify_iid(chance: Chance, children: Sequence[int], draft_probs: Probs) -> Emitted:
    """SpecInfer's multi-step rule: exact if `children` are independent draws, repetitions kept."""
    target_probs = TARGET_PROBS
    for child in children:
        if coin(chance, target_probs[child] / draft_probs[child]):
            return Emitted(child, True)
        target_probs = residual(target_probs, draft_probs)
    return Emitted(chance.draw(target_probs), False)


def best(probs: Probs, count: int) -> list[int]:
    return sorted(range(V), key=lambda token_id: -probs[token_id])[:count]


def kept_only(probs: Probs, kept: Sequence[int]) -> Probs:
    return normalized([probability if token_id in kept else 0.0 for token_id, probability in enumerate(probs)])


# The six biased procedures: what the children are tested with is not how they were drawn


def deterministic_children_as_if_drawn(chance: Chance) -> Emitted:
    return verify_recursively(chance, best(DRAFT_PROBS, 2), DRAFT_PROBS)


def draws_sorted_by_probability(chance: Chance) -> Emitted:
    drawn = draw_without_replacement(chance, DRAFT_PROBS, 2)
    return verify_recursively(chance, sorted(drawn, key=lambda child: -DRAFT_PROBS[child]), DRAFT_PROBS)


def best_two_of_three_draws(chance: Chance) -> Emitted:
    drawn = draw_without_replacement(chance, DRAFT_PROBS, 3)
    return verify_recursively(chance, sorted(drawn, key=lambda child: -DRAFT_PROBS[child])[:2], DRAFT_PROBS)


def draw_from_top_two_tested_with_all(chance: Chance) -> Emitted:
    child = chance.draw(kept_only(DRAFT_PROBS, best(DRAFT_PROBS, 2)))
    return verify_recursively(chance, [child], DRAFT_PROBS)


def unlikely_draws_dropped(chance: Chance) -> Emitted:
    child = chance.draw(DRAFT_PROBS)
    return verify_recursively(chance, [child] if DRAFT_PROBS[child] >= 0.2 else [], DRAFT_PROBS)


def equal_draws_merged(chance: Chance) -> Emitted:
    drawn = [chance.draw(DRAFT_PROBS), chance.draw(DRAFT_PROBS)]
    return verify_iid(chance, list(dict.fromkeys(drawn)), DRAFT_PROBS)


# Three more that were shipped


def greedy_child_tested_with_soft_probs(chance: Chance) -> Emitted:
    return verify_recursively(chance, best(DRAFT_PROBS, 1), DRAFT_PROBS)


def never_rejecting(chance: Chance) -> Emitted:
    return Emitted(chance.draw(DRAFT_PROBS), True)  # `u <= ratio` with u fixed at 0


def last_token_not_from_the_residual(chance: Chance) -> Emitted:
    child = chance.draw(DRAFT_PROBS)
    if coin(chance, TARGET_PROBS[child] / DRAFT_PROBS[child]):
        return Emitted(child, True)
    return Emitted(chance.draw(TARGET_PROBS), False)


# Sound ones, some of them a single word away


def match_best(count: int) -> Procedure:
    def procedure(chance: Chance) -> Emitted:
        token_id = chance.draw(TARGET_PROBS)
        return Emitted(token_id, token_id in best(DRAFT_PROBS, count))

    return procedure


def certain_children_one_after_another(chance: Chance) -> Emitted:
    """EAGLE's "q = 1": the match rule in disguise (EAGLE#329)."""
    target_probs = TARGET_PROBS
    for child in best(DRAFT_PROBS, 2):
        if coin(chance, target_probs[child]):
            return Emitted(child, True)
        target_probs = without(target_probs, child)
    return Emitted(chance.draw(target_probs), False)


def draws_in_order(count: int) -> Procedure:
    def procedure(chance: Chance) -> Emitted:
        return verify_recursively(chance, draw_without_replacement(chance, DRAFT_PROBS, count), DRAFT_PROBS)

    return procedure


def first_two_of_three_draws(chance: Chance) -> Emitted:
    return verify_recursively(chance, draw_without_replacement(chance, DRAFT_PROBS, 3)[:2], DRAFT_PROBS)


def draw_from_top_two_tested_with_top_two(chance: Chance) -> Emitted:
    draft_probs = kept_only(DRAFT_PROBS, best(DRAFT_PROBS, 2))
    return verify_recursively(chance, [chance.draw(draft_probs)], draft_probs)


def equal_draws_kept(chance: Chance) -> Emitted:
    return verify_iid(chance, [chance.draw(DRAFT_PROBS), chance.draw(DRAFT_PROBS)], DRAFT_PROBS)


@dataclass(frozen=True)
class Case:
    """A procedure with its exact acceptance and distance from the target's law, to three digits."""

    name: str
    procedure: Procedure
    acceptance: float
    distance: float = 0.0
    num_draws: int = 20_000


BIASED = [
    Case("deterministic children as if drawn", deterministic_children_as_if_drawn, 1.000, 0.250),
    Case("draws sorted by probability", draws_sorted_by_probability, 0.881, 0.164),
    Case("best two of three draws", best_two_of_three_draws, 0.965, 0.237),
    Case("drawn from top two, tested with all: transformers#47932", draw_from_top_two_tested_with_all, 0.6875, 0.111),
    Case("unlikely draws dropped", unlikely_draws_dropped, 0.550, 0.089),
    Case("equal draws merged", equal_draws_merged, 0.7725, 0.011, num_draws=150_000),
    Case("greedy child tested with soft probs: transformers#32867", greedy_child_tested_with_soft_probs, 0.500, 0.250),
    Case("never rejecting: vllm-ascend#13730", never_rejecting, 1.000, 0.350),
    Case("last token not from the residual", last_token_not_from_the_residual, 0.650, 0.105),
]
SOUND = [
    Case("match, best 1", match_best(1), 0.250),
    Case("match, best 2", match_best(2), 0.800),
    Case("match, best 3", match_best(3), 0.850),
    Case("certain children one after another", certain_children_one_after_another, 0.800),
    Case("draws in order, 1", draws_in_order(1), 0.650),
    Case("draws in order, 2", draws_in_order(2), 0.866),
    Case("draws in order, 3", draws_in_order(3), 0.950),
    Case("first two of three draws", first_two_of_three_draws, 0.866),
    Case("drawn from top two, tested with top two", draw_from_top_two_tested_with_top_two, 0.625),
    Case("equal draws kept", equal_draws_kept, 0.7725),
]


def count_outputs(case: Case) -> Counter[int]:
    chance = Sampled(seed=20230808)
    return Counter(case.procedure(chance).token_id for _ in range(case.num_draws))


@pytest.mark.parametrize("case", [*BIASED, *SOUND], ids=lambda case: case.name)
def test_enumeration_gives_the_known_figures(case: Case) -> None:
    law = enumerate_outputs(case.procedure)
    assert law.acceptance == pytest.approx(case.acceptance, abs=6e-4)
    assert law.distance == pytest.approx(case.distance, abs=6e-4 if case.distance else 1e-12)


@pytest.mark.parametrize("case", BIASED, ids=lambda case: case.name)
def test_a_biased_procedure_is_caught(case: Case, p_value: Callable[..., float]) -> None:
    assert p_value(count_outputs(case), dict(enumerate(TARGET_PROBS))) < 1e-6


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_a_sound_procedure_passes(case: Case, p_value: Callable[..., float]) -> None:
    assert p_value(count_outputs(case), dict(enumerate(TARGET_PROBS))) > 1e-3


# Ours: the match rule on trees, drawn with keyed noise, over three tokens

TARGET_ROWS = torch.tensor(
    [[0.55, 0.25, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]
)
DRAFT_ROWS = torch.tensor([[0.3, 0.5, 0.05, 0.15], [0.1, 0.3, 0.2, 0.4], [0.4, 0.1, 0.4, 0.1], [0.5, 0.2, 0.2, 0.1]])
FIRST_TOKEN = 0
NUM_TOKENS = 3
NUM_SEEDS = 2500
Rank = Callable[[int, int, int], list[int]]
"""From (seed, position, last token) to the draft's tokens at that position, best first."""


def rank_by_probability(seed: int, position: int, last_token: int) -> list[int]:
    return torch.argsort(DRAFT_ROWS[last_token], descending=True, stable=True).tolist()


def rank_by_shared_noise(seed: int, position: int, last_token: int) -> list[int]:
    noisy = DRAFT_ROWS[last_token].log() + gumbel_noise(seed, 0, position, torch.arange(V))
    return torch.argsort(noisy, descending=True).tolist()


def draft(rank: Rank, width: int, seed: int, context: Sequence[int]) -> TokenTree:
    """Return a tree of depth 2 with `width` children at each node."""
    tree = TokenTree.root(context[-1])
    for token_id in rank(seed, len(context), context[-1])[:width]:
        child = tree.add(0, token_id, -0.5 * len(tree), "toy")
        for next_id in rank(seed, len(context) + 1, token_id)[:width]:
            tree.add(child, next_id, -0.5 * len(tree), "toy")
    return tree


@dataclass(frozen=True)
class Decoded:
    token_ids: tuple[int, ...]
    num_accepted: int


def make_chooser(seed: int) -> TokenChooser:
    return TokenChooser(
        SamplingParams(temperature=1.0), num_prompt_tokens=1, eos_ids=(), seed=seed, sequence_key=0, vocab_size=V
    )


def decode(seed: int, rank: Rank, width: int) -> Decoded:
    """Decode at least `NUM_TOKENS` tokens step by step; `width` 0 is plain decoding."""
    chooser, context = make_chooser(seed), [FIRST_TOKEN]
    num_accepted = 0
    while len(context) <= NUM_TOKENS:
        packed = pack(draft(rank, width, seed, context))
        rows = [TARGET_ROWS[token_id].log() for token_id in packed.token_ids]
        verdict = match(packed, partial(choose_at, chooser, rows, tuple(context)))
        context += [packed.token_ids[row] for row in verdict.accepted] + [verdict.last_token]
        num_accepted += len(verdict.accepted)
    return Decoded(tuple(context[1 : NUM_TOKENS + 1]), num_accepted)


def choose_at(
    chooser: TokenChooser, rows: list[torch.Tensor], context: tuple[int, ...], row: int, path: list[int]
) -> int:
    return chooser.choose(rows[row], [*context, *path])


def joint_law() -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        law = {
            (*path, token_id): probability * float(TARGET_ROWS[(path or (FIRST_TOKEN,))[-1], token_id])
            for path, probability in law.items()
            for token_id in range(V)
        }
    return law


@pytest.mark.parametrize("rank", [rank_by_probability, rank_by_shared_noise])
@pytest.mark.parametrize("width", [1, 2])
def test_match_with_keyed_noise_is_exact(rank: Rank, width: int, p_value: Callable[..., float]) -> None:
    counts = Counter(decode(seed, rank, width).token_ids for seed in range(NUM_SEEDS))
    assert p_value(counts, joint_law()) > 1e-3


@pytest.mark.parametrize("rank", [rank_by_probability, rank_by_shared_noise])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_drafts_change_no_token(rank: Rank, width: int) -> None:
    for seed in range(150):
        assert decode(seed, rank, width).token_ids == decode(seed, rank, 0).token_ids


def test_acceptance_depends_on_the_seed_vllm_13196() -> None:
    accepted = [decode(seed, rank_by_probability, 2).num_accepted for seed in range(40)]
    assert len(set(accepted)) > 1
    assert accepted == [decode(seed, rank_by_probability, 2).num_accepted for seed in range(40)]


def test_typical_acceptance_is_caught(p_value: Callable[..., float]) -> None:
    """Taking a drafted child whenever the target finds it likely enough, as Medusa does, changes the distribution."""

    def decode_greedily_accepting(seed: int) -> tuple[int, ...]:
        chooser, context = make_chooser(seed), [FIRST_TOKEN]
        while len(context) <= NUM_TOKENS:
            child = rank_by_shared_noise(seed, len(context), context[-1])[0]
            is_likely = float(TARGET_ROWS[context[-1], child]) > 0.2
            context.append(child if is_likely else chooser.choose(TARGET_ROWS[context[-1]].log(), context))
        return tuple(context[1:])

    counts = Counter(decode_greedily_accepting(seed) for seed in range(NUM_SEEDS))
    assert p_value(counts, joint_law()) < 1e-6


def first_token_acceptance(rank: Rank, width: int, num_seeds: int = 3000) -> float:
    row = TARGET_ROWS[FIRST_TOKEN].log()
    hits = [
        make_chooser(seed).choose(row, [FIRST_TOKEN]) in rank(seed, 1, FIRST_TOKEN)[:width] for seed in range(num_seeds)
    ]
    return float(np.mean(hits))


def test_shared_noise_accepts_more_than_fixed_children() -> None:
    # P(match) >= (1 - distance) / (1 + distance) for one coupled child; no rule accepts more than 1 - distance.
    distance = sum(abs(ours - theirs) for ours, theirs in zip(TARGET_PROBS, DRAFT_PROBS)) / 2
    slack = 3 * 0.5 / 3000**0.5
    coupled = first_token_acceptance(rank_by_shared_noise, 1)
    assert (1 - distance) / (1 + distance) - slack <= coupled <= 1 - distance + slack
    assert coupled > first_token_acceptance(rank_by_probability, 1) + 0.2
    assert first_token_acceptance(rank_by_shared_noise, 2) > first_token_acceptance(rank_by_probability, 2)


def test_a_fixed_child_may_beat_sampled_ones_vllm_40551() -> None:
    # vllm#40551: drafts with probabilities accepted less than the draft's argmax taken as certain. Both are exact; the
    # one accepts sum(min(target, draft)), the other the target's probability of the argmax, and either may be larger.
    def accept(target_probs: Probs, draft_probs: Probs) -> tuple[float, float]:
        sampled = sum(min(target, draft_prob) for target, draft_prob in zip(target_probs, draft_probs))
        return sampled, target_probs[int(np.argmax(draft_probs))]

    sampled, fixed = accept([0.9, 0.1], [0.6, 0.4])
    assert fixed > sampled
    sampled, fixed = accept(TARGET_PROBS, DRAFT_PROBS)
    assert fixed < sampled
    assert enumerate_outputs(draws_in_order(1)).acceptance == pytest.approx(sampled)
    assert enumerate_outputs(match_best(1)).acceptance == pytest.approx(fixed)


def test_a_reduced_vocabulary_sees_the_same_noise() -> None:
    known = torch.tensor([0, 2, 3])
    for position in range(200):
        everything = gumbel_noise(5, 0, position, torch.arange(V))
        assert torch.equal(gumbel_noise(5, 0, position, known), everything[known])
