"""Typical acceptance: take what the target finds likely enough. Lossy: the output does not follow the target's law."""

from __future__ import annotations

from typing import Final

import numpy as np

from foretell.tree.pack import PackedTree
from foretell.verify.chance import Chance
from foretell.verify.match import Verdict
from foretell.verify.processors import Law
from foretell.verify.residual import LawOf, Residual

MAX_THRESHOLD: Final = 0.3
"""Likely enough is above this whatever the entropy: Medusa's epsilon."""
ENTROPY_FACTOR: Final = 0.09
"""Or above this times exp(-entropy), where that is less: Medusa's delta."""


def verify_typical(tree: PackedTree, law_of: LawOf, chance: Chance) -> Verdict:
    """Return the longest path on which every token is likely enough, of equals the likeliest; draw the token after it.

    A token is likely enough above min(0.3, 0.09 * exp(-entropy)). What a drafter proposes so becomes likelier than the
    target says, and what it does not less likely: outputs depend on the drafter in kind, not only in chance.

    Args:
        tree: rows in canonical order, from any drafter.
        law_of: called at most once for each row.
        chance: one number, for the last token.

    Cost: one law for each row with children and an acceptable path, and one for the last token.
    Source: Medusa, arXiv:2401.10774, §2.3.1, with its two constants.
    """
    laws: dict[int, Law] = {}
    paths: dict[int, list[int]] = {0: []}
    scores = {0: (0, 0.0)}  # (depth, log-probability of the path)
    for row in range(1, len(tree)):
        parent, token_id = tree.parents[row], tree.token_ids[row]
        if parent not in paths:
            continue
        if parent not in laws:
            laws[parent] = law_of(parent, paths[parent])
        log_prob = _log_prob(laws[parent], token_id)
        if log_prob > _log_threshold(laws[parent]):
            paths[row] = [*paths[parent], token_id]
            scores[row] = (tree.depths[row], scores[parent][1] + log_prob)
    best = max(scores, key=lambda row: scores[row])
    law = laws[best] if best in laws else law_of(best, paths[best])
    return Verdict(_rows_to(tree, best), Residual(law, None).draw(chance))


def _log_threshold(law: Law) -> float:
    entropy = -float(np.exp(law.log_probs) @ law.log_probs)
    return min(float(np.log(MAX_THRESHOLD)), float(np.log(ENTROPY_FACTOR)) - entropy)


def _log_prob(law: Law, token_id: int) -> float:
    place = law.find(token_id)
    return -np.inf if place is None else float(law.log_probs[place])


def _rows_to(tree: PackedTree, row: int) -> list[int]:
    """Return the rows from the root's child to `row`."""
    rows = []
    while row > 0:
        rows.append(row)
        row = tree.parents[row]
    return rows[::-1]
