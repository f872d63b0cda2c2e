"""Rejection, traversal and typical acceptance on a toy model of four tokens: their laws, to the last digit.

A rule takes its randomness from a `Chance`. Enumerated over every decision of drawing and verifying, a step yields the
exact joint law of the first three tokens, which must be the target's. The procedures of which sound drafting is a word
away from biased go through the same test, and fail it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from foretell.params import SamplingParams
from foretell.tree.draws import DrawMode, Draws
from foretell.tree.pack import pack
from foretell.tree.token_tree import TokenTree
from foretell.verify.chance import Chance, KeyedChance
from foretell.verify.choose import TokenChooser
from foretell.verify.draws import draw_children
from foretell.verify.match import Verdict
from foretell.verify.processors import Law
from foretell.verify.rejection import verify_rejection
from foretell.verify.residual import LawOf
from foretell.verify.traversal import verify_traversal
from foretell.verify.typical import verify_typical

V = 4
IDS = np.arange(V)
FIRST, NUM_TOKENS = 0, 3
PROMPT = [2, FIRST]
TARGET_PROBS = np.array([[0.55, 0.25, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1], [0.7, 0.1, 0.0, 0.2]])
DRAFT_PROBS = np.array([[0.3, 0.5, 0.05, 0.15], [0.1, 0.3, 0.2, 0.4], [0.4, 0.1, 0.4, 0.1], [0.5, 0.0, 0.2, 0.3]])
"""Row i: probabilities of the token after token i."""
LOGITS = torch.tensor(np.log(np.maximum(TARGET_PROBS, 1e-300))).float()
LOGITS[torch.tensor(TARGET_PROBS) == 0] = -torch.inf

Verify = Callable[..., Verdict]
Paths = dict[tuple[int, ...], float]
DRAWN_RULES = [verify_rejection, verify_traversal]
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "several": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.3},
}


class Scripted:
    """Follows a script of choices, then takes the first possible one and notes the others as scripts to come."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.weight = script, 1.0
        self.made: list[int] = []
        self.others: list[list[int]] = []

    def accepts(self, target_prob: float, draft_prob: float) -> bool:
        return self.draw(np.array([min(target_prob, draft_prob), max(draft_prob - target_prob, 0.0)])) == 0

    def draw(self, weights: np.ndarray) -> int:
        possible = np.flatnonzero(weights).tolist()
        if len(self.made) < len(self.script):
            choice = self.script[len(self.made)]
        else:
            choice = possible[0]
            self.others += [[*self.made, other] for other in possible[1:]]
        self.made.append(choice)
        self.weight *= float(weights[choice] / weights.sum())
        return int(choice)


@dataclass(frozen=True, eq=False)
class Toy:
    """The target under one set of sampling parameters."""

    params: SamplingParams

    @cache  # noqa: B019  # few and short-lived
    def law(self, path: tuple[int, ...]) -> Law:
        context = [*PROMPT, *path]
        return make_chooser(self.params).law(LOGITS[context[-1]], context)

    def law_of(self, row: int, path: list[int]) -> Law:
        return self.law(tuple(path))

    def extend(self, path: tuple[int, ...], probability: float = 1.0) -> Paths:
        """Return the law of `NUM_TOKENS` tokens of which the first are given."""
        paths = {path: probability}
        for _ in range(NUM_TOKENS - len(path)):
            paths = {
                (*path, int(token_id)): probability * float(np.exp(log_prob))
                for path, probability in paths.items()
                for token_id, log_prob in zip(self.law(path).ids, self.law(path).log_probs)
            }
        return {path[:NUM_TOKENS]: probability for path, probability in paths.items()}


def make_chooser(params: SamplingParams, seed: int = 0) -> TokenChooser:
    return TokenChooser(params, num_prompt_tokens=len(PROMPT), eos_ids=(), seed=seed, sequence_key=0, vocab_size=V)


def toy(**parameters: Any) -> Toy:
    return Toy(SamplingParams(**{"temperature": 1.0, **parameters}))


DrawNode = Callable[[Chance, int, int], Draws]
"""From (chance, last token, number of children) to what a drafter says that it drew."""


def draw_soundly(mode: DrawMode, chance: Chance, last_token: int, num: int) -> Draws:
    return draw_children(IDS, DRAFT_PROBS[last_token], num, chance, mode)


IN_ORDER = partial(draw_soundly, DrawMode.WITHOUT_REPLACEMENT)
INDEPENDENT = partial(draw_soundly, DrawMode.INDEPENDENT)


def draw_tree(draw_node: DrawNode, widths: Sequence[int], chance: Chance, root: int = FIRST) -> TokenTree:
    """Return a tree with `widths[d]` draws at every node of depth d."""
    tree = TokenTree.root(root)
    tree.draws = {}
    level = [0]
    for width in widths:
        parents, level = level, []
        for node in parents:
            draws = draw_node(chance, tree.token_ids[node], width)
            for token_id in dict.fromkeys(draws.ids):
                level.append(tree.add(node, token_id, tree.log_accept[node] - 0.1 * len(tree), "toy"))
            if draws.ids:
                tree.draws[node] = draws
    return tree


def run_step(tree_of: Callable[[Chance], TokenTree], verify: Verify, law_of: LawOf, chance: Chance) -> tuple[int, ...]:
    """Return the tokens that one step emits."""
    packed = pack(tree_of(chance))
    verdict = verify(packed, law_of, chance)
    return (*(packed.token_ids[row] for row in verdict.accepted), verdict.last_token)


@dataclass(frozen=True)
class StepLaw:
    paths: Paths
    mean_accepted: float
    target: Paths

    @property
    def distance(self) -> float:
        """Total variation of the joint law of the first three tokens from the target's."""
        outcomes = self.paths.keys() | self.target.keys()
        return sum(abs(self.paths.get(path, 0.0) - self.target.get(path, 0.0)) for path in outcomes) / 2


def enumerate_outcomes(procedure: Callable[[Chance], tuple[int, ...]]) -> Paths:
    """Return the probability of each outcome; what only rounding makes possible is left out."""
    paths: Paths = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Scripted(scripts.pop())
        outcome = procedure(chance)
        scripts += chance.others
        paths[outcome] = paths.get(outcome, 0.0) + chance.weight
    assert sum(paths.values()) == pytest.approx(1.0)
    return {path: probability for path, probability in paths.items() if probability > 1e-15}


def enumerate_step(tree_of: Callable[[Chance], TokenTree], verify: Verify, target: Toy) -> StepLaw:
    """Return what a step gives; where it emits less than three tokens, plain decoding gives the others."""
    emitted = enumerate_outcomes(partial(run_step, tree_of, verify, target.law_of))
    paths: Paths = {}
    for path, probability in emitted.items():
        for longer, weight in target.extend(path, probability).items():
            paths[longer] = paths.get(longer, 0.0) + weight
    mean_accepted = sum(probability * (len(path) - 1) for path, probability in emitted.items())
    return StepLaw(paths, mean_accepted, target.extend(()))


EXACT = 1e-12


# Sound drafts


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_three_tokens_follow_the_target(verify: Verify, name: str) -> None:
    law = enumerate_step(partial(draw_tree, IN_ORDER, (2, 1)), verify, toy(**PARAMETERS[name]))
    assert law.distance < EXACT
    if name != "plain":  # the test can tell the parameter from its absence
        assert replace(law, target=toy().extend(())).distance > 0.02


@pytest.mark.parametrize("widths", [(1,), (3,), (4,), (1, 1), (1, 2), (1, 1, 1)])
@pytest.mark.parametrize("draw_node", [IN_ORDER, INDEPENDENT])
@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_any_shape_is_exact(verify: Verify, draw_node: DrawNode, widths: Sequence[int]) -> None:
    assert enumerate_step(partial(draw_tree, draw_node, widths), verify, toy()).distance < EXACT


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_independent_draws_below_repeated_ones(verify: Verify) -> None:
    """A child that was drawn twice is tested twice; what lies below it, once."""
    law = enumerate_step(partial(draw_tree, INDEPENDENT, (2, 1)), verify, toy(top_k=3))
    assert law.distance < EXACT


def test_acceptance_is_what_theory_says() -> None:
    tree_of = partial(draw_tree, IN_ORDER)
    overlap = float(np.minimum(TARGET_PROBS[FIRST], DRAFT_PROBS[FIRST]).sum())
    one = enumerate_step(partial(tree_of, (1,)), verify_rejection, toy())
    assert one.mean_accepted == pytest.approx(overlap) == pytest.approx(0.65)
    # Known figures for these two laws, from independent enumeration.
    assert enumerate_step(partial(tree_of, (2,)), verify_rejection, toy()).mean_accepted == pytest.approx(
        0.866, abs=6e-4
    )
    assert enumerate_step(partial(tree_of, (3,)), verify_rejection, toy()).mean_accepted == pytest.approx(
        0.950, abs=6e-4
    )
    # All tokens drawn cover whatever the target says.
    assert enumerate_step(partial(tree_of, (4,)), verify_rejection, toy()).mean_accepted == pytest.approx(1.0)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 1, 1)])
def test_traversal_accepts_more_than_rejection(widths: Sequence[int]) -> None:
    tree_of = partial(draw_tree, IN_ORDER, widths)
    rejection, traversal = (enumerate_step(tree_of, verify, toy()).mean_accepted for verify in DRAWN_RULES)
    assert traversal > rejection + 0.01


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_a_draw_from_a_law_that_is_nan_is_never_accepted(verify: Verify) -> None:
    tree = TokenTree.chain([FIRST, 1, 1], [0.0] * 3, "toy")
    tree.draws = {node: Draws((1,), IDS, np.full(V, np.nan)) for node in (0, 1)}
    verdict = verify(pack(tree), toy().law_of, KeyedChance("verify", 1, 0, 2))
    assert verdict.accepted == []


# One child a node: block verification


def verify_block(drawn: Sequence[int], target: Toy, chance: Chance) -> tuple[int, ...]:
    """Block verification of a chain as its paper states it (arXiv:2403.10444, algorithm 2), a slow twin."""
    weights, rests = [1.0], []
    for length in range(len(drawn) + 1):
        law, draft_probs = target.law(tuple(drawn[:length])), DRAFT_PROBS[(FIRST, *drawn)[length]]
        target_probs = np.zeros(V)
        target_probs[law.ids] = np.exp(law.log_probs)
        if length == len(drawn):
            rests.append(target_probs)
        else:
            rests.append(np.maximum(weights[-1] * target_probs - draft_probs, 0.0))
            weights.append(min(1.0, weights[-1] * target_probs[drawn[length]] / draft_probs[drawn[length]]))
    accepted = 0
    for length in range(1, len(drawn) + 1):
        mass = float(rests[length].sum())
        threshold = weights[-1] if length == len(drawn) else mass / (mass + 1.0 - weights[length])
        if chance.accepts(threshold, 1.0):
            accepted = length
    return (*drawn[:accepted], chance.draw(rests[accepted]))


@pytest.mark.parametrize("drawn", [(0, 1), (1, 1, 2), (1, 3, 3), (3, 0, 0), (2, 2, 0)])
def test_traversal_of_a_chain_is_block_verification(drawn: Sequence[int]) -> None:
    tree = TokenTree.chain([FIRST, *drawn], [0.0] * (len(drawn) + 1), "toy")
    tree.draws = {
        node: Draws((token_id,), IDS, DRAFT_PROBS[last])
        for node, (last, token_id) in enumerate(zip((FIRST, *drawn), drawn))
    }
    ours = enumerate_outcomes(partial(run_step, lambda _: tree, verify_traversal, toy().law_of))
    assert ours == pytest.approx(enumerate_outcomes(partial(verify_block, drawn, toy())))


# The biased procedures: what the children are tested with is not how they were drawn


def best(probs: np.ndarray, num: int) -> tuple[int, ...]:
    return tuple(np.argsort(-probs, kind="stable")[:num].tolist())


def ranked_as_if_drawn(chance: Chance, last_token: int, num: int) -> Draws:
    return Draws(best(DRAFT_PROBS[last_token], num), IDS, DRAFT_PROBS[last_token])


def sorted_draws(chance: Chance, last_token: int, num: int) -> Draws:
    draws = IN_ORDER(chance, last_token, num)
    return replace(draws, ids=tuple(sorted(draws.ids, key=lambda token_id: -DRAFT_PROBS[last_token, token_id])))


def best_of_more_draws(chance: Chance, last_token: int, num: int) -> Draws:
    draws = sorted_draws(chance, last_token, num + 1)
    return replace(draws, ids=draws.ids[:num])


def drawn_from_the_best_tested_with_all(chance: Chance, last_token: int, num: int) -> Draws:
    probs = DRAFT_PROBS[last_token] * np.isin(IDS, best(DRAFT_PROBS[last_token], 2))
    return replace(draw_children(IDS, probs, num, chance), law_probs=DRAFT_PROBS[last_token])


def unlikely_draws_dropped(chance: Chance, last_token: int, num: int) -> Draws:
    draws = IN_ORDER(chance, last_token, num)
    return draws if DRAFT_PROBS[last_token, draws.ids[0]] >= 0.2 else replace(draws, ids=())


def repeated_draws_dropped(chance: Chance, last_token: int, num: int) -> Draws:
    draws = INDEPENDENT(chance, last_token, num)
    return replace(draws, ids=tuple(dict.fromkeys(draws.ids)))


BIASED: dict[str, tuple[DrawNode, int, float]] = {
    "ranked children as if drawn: transformers#32867": (ranked_as_if_drawn, 2, 0.250),
    "draws sorted by probability": (sorted_draws, 2, 0.164),
    "best two of three draws": (best_of_more_draws, 2, 0.237),
    "drawn from the best two, tested with all: transformers#47932": (drawn_from_the_best_tested_with_all, 1, 0.111),
    "unlikely draws dropped": (unlikely_draws_dropped, 1, 0.089),
    "repeated draws dropped": (repeated_draws_dropped, 2, 0.011),
}
"""With the distance of the first token's law from the target's, known from independent enumeration."""


@pytest.mark.parametrize("verify", DRAWN_RULES)
@pytest.mark.parametrize("name", BIASED)
def test_a_biased_draft_is_caught(name: str, verify: Verify) -> None:
    draw_node, width, distance = BIASED[name]
    law = enumerate_step(partial(draw_tree, draw_node, (width,)), verify, toy())
    assert law.distance == pytest.approx(distance, abs=6e-4)

    def draw_first_level(chance: Chance, last_token: int, num: int) -> Draws:
        return (draw_node if num == width else IN_ORDER)(chance, last_token, num)

    two_levels = enumerate_step(partial(draw_tree, draw_first_level, (width, 1)), verify, toy())
    assert two_levels.distance > 0.005


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_a_purchase_that_looks_at_what_was_drawn_is_caught(verify: Verify) -> None:
    """Two nodes are bought or none: settled before drawing it is sound, for the worth of what was drawn it is not."""

    def tree_of(chance: Chance, is_bought: Callable[[TokenTree], bool]) -> TokenTree:
        tree = draw_tree(IN_ORDER, (1, 1), chance)
        return tree if is_bought(tree) else TokenTree.root(FIRST)

    def is_likely(tree: TokenTree) -> bool:
        return all(DRAFT_PROBS[last, token_id] >= 0.3 for last, token_id in zip(tree.token_ids, tree.token_ids[1:]))

    for is_settled in (True, False):
        assert (
            enumerate_step(partial(tree_of, is_bought=lambda _, is_it=is_settled: is_it), verify, toy()).distance
            < EXACT
        )
    assert enumerate_step(partial(tree_of, is_bought=is_likely), verify, toy()).distance > 0.02


# With the chance that the engine uses


def decode(seed: int, draw_node: DrawNode, widths: Sequence[int], verify: Verify, target: Toy) -> tuple[int, ...]:
    """Return three tokens, decoded step by step."""
    path: tuple[int, ...] = ()
    while len(path) < NUM_TOKENS:
        root, position = (FIRST, *path)[-1], len(PROMPT) + len(path)
        packed = pack(draw_tree(draw_node, widths, KeyedChance("draft", seed, 0, position), root))
        law_of = partial(law_below, target, path)
        verdict = verify(packed, law_of, KeyedChance("verify", seed, 0, position))
        path += (*(packed.token_ids[row] for row in verdict.accepted), verdict.last_token)
    return path[:NUM_TOKENS]


def law_below(target: Toy, start: tuple[int, ...], row: int, path: list[int]) -> Law:
    return target.law((*start, *path))


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_sampled_tokens_follow_the_target(verify: Verify, name: str, p_value: Callable[..., float]) -> None:
    target = toy(**PARAMETERS[name])
    counts = Counter(decode(seed, IN_ORDER, (2, 1), verify, target) for seed in range(600))
    assert p_value(counts, target.extend(())) > 1e-3


@pytest.mark.parametrize("name", list(BIASED)[:5])  # the sixth is too near for so few samples
def test_sampled_tokens_of_a_biased_draft_are_caught(name: str, p_value: Callable[..., float]) -> None:
    draw_node, width, _ = BIASED[name]
    for verify in DRAWN_RULES:
        counts = Counter(decode(seed, draw_node, (width,), verify, toy()) for seed in range(600))
        assert p_value(counts, toy().extend(())) < 1e-6


def test_a_draft_tested_with_its_own_chance_is_caught(p_value: Callable[..., float]) -> None:
    def decode_with_one_key(seed: int) -> tuple[int, ...]:
        tree = pack(draw_tree(IN_ORDER, (1,), KeyedChance("draft", seed, 0, 2)))
        verdict = verify_rejection(tree, toy().law_of, KeyedChance("draft", seed, 0, 2))
        return (*(tree.token_ids[row] for row in verdict.accepted), verdict.last_token)[:1]

    first_token = {(token_id,): probability for token_id, probability in enumerate(TARGET_PROBS[FIRST].tolist())}
    assert p_value(Counter(map(decode_with_one_key, range(600))), first_token) < 1e-6


# Typical acceptance


def deterministic_tree() -> TokenTree:
    tree = TokenTree.root(FIRST)
    for token_id in (1, 0):
        child = tree.add(0, token_id, -0.2 * len(tree), "toy")
        for next_id in (3, 2):
            tree.add(child, next_id, -0.5 * len(tree), "toy")
    return tree


def test_typical_acceptance_takes_the_longest_likely_path_and_then_draws() -> None:
    # Token 0's law has an entropy of 1.1 nats, so that all above 0.030 are likely enough: 0 and 1, both. Below 0 the
    # laws are the same: 3 (0.05) is; below 1 all are. Of the depth-2 paths 0 2, 1 3 and others the likeliest wins.
    entropy = -(TARGET_PROBS[FIRST] * np.log(TARGET_PROBS[FIRST])).sum()
    assert 0.02 < 0.09 * np.exp(-entropy) < 0.05
    joint = {(a, b): TARGET_PROBS[FIRST, a] * TARGET_PROBS[a, b] for a in (1, 0) for b in (3, 2)}
    likeliest = max(joint, key=lambda path: joint[path])
    assert likeliest == (1, 3)
    law = enumerate_step(lambda _: deterministic_tree(), verify_typical, toy())
    assert law.paths == pytest.approx({(*likeliest, last): TARGET_PROBS[3, last] for last in (0, 1, 3)})


def test_typical_acceptance_stops_at_an_unlikely_token() -> None:
    tree = TokenTree.chain([FIRST, 0, 3, 1], [0.0, -1.0, -2.0, -3.0], "toy")
    sure = toy(temperature=0.3)  # 3 after 0 has a probability of 2e-4 here
    law = enumerate_step(lambda _: tree, verify_typical, sure)
    assert law.paths == pytest.approx(sure.extend((0,)))
    assert enumerate_step(lambda _: TokenTree.root(FIRST), verify_typical, sure).distance < EXACT


@pytest.mark.parametrize("name", PARAMETERS)
def test_typical_acceptance_is_lossy_and_caught(name: str) -> None:
    assert enumerate_step(lambda _: deterministic_tree(), verify_typical, toy(**PARAMETERS[name])).distance > 0.05
