"""Typical acceptance on a toy model of four tokens: what it takes, and that it is lossy."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.tree.token_tree import TokenTree
from foretell.verify.typical import verify_typical
from toy import EXACT, FIRST, PARAMETERS, TARGET_PROBS, enumerate_step, toy


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
