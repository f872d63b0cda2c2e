"""A toy model of four tokens, its draft, and the exact law of what a step emits.

A rule takes its randomness from a `Chance`. Enumerated over every decision of drawing and verifying, a step yields the
exact joint law of the first three tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
