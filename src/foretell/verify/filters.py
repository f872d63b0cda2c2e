"""Filters that leave a few candidates of a distribution: top-k, top-p, min-p, typical.

Each takes float32 scores [K] (unnormalised log-probabilities; -inf for what an earlier step forbade) and returns the
indices of those that it keeps, ascending: int64 [M], never empty. All keep whatever reaches a threshold, so equal
scores share their fate, and the result depends on the scores alone, never on how a sort orders ties. bfloat16 logits
tie often; at the threshold transformers keeps all ties for top-k, and for top-p those that its sort puts last.

The vocabulary is never sorted as a whole where a glance at its head will do: candidates are what lies within a few nats
of the best, and the circle widens until it holds enough.
"""

from __future__ import annotations

import numpy as np

from foretell.verify.scores import Indices, Scores

# Nats below the best key. Wider circles cost one more scan (0.02 ms for 49,152 scores), narrower ones save sorting.
_CIRCLES = (4.0, 8.0, 16.0)


def keep_top_k(scores: Scores, top_k: int) -> Indices:
    """Keep the `top_k` best scores, and those equal to the last of them.

    Cost: 0.03 ms for 49,152 scores (one core), 0.3 ms if they are all within a few nats.
    """
    if top_k >= len(scores):
        return np.arange(len(scores))
    best, head = scores.max(), scores  # [K]
    for circle in _CIRCLES:
        inside = scores[scores >= best - np.float32(circle)]  # [C]
        if len(inside) >= top_k:
            head = inside
            break
    cut = len(head) - top_k
    return np.flatnonzero(scores >= np.partition(head, cut)[cut])  # [M]


def keep_top_p(scores: Scores, top_p: float) -> Indices:
    """Keep the smallest set of best scores whose probability reaches `top_p`, and scores equal to its last.

    Cost: 0.1 ms for 49,152 scores (one core) where few make up the mass, 1 ms where nearly all are needed.
    """
    weights = np.exp(scores - scores.max())  # [K], the best is 1
    needed = top_p * float(weights.sum(dtype=np.float64))
    head = weights  # [K]
    for circle in _CIRCLES:
        inside = weights[np.flatnonzero(weights >= np.exp(np.float32(-circle)))]  # [C]
        if float(inside.sum(dtype=np.float64)) >= needed:
            head = inside
            break
    head = np.sort(head)[::-1]  # [C]
    return np.flatnonzero(weights >= head[_first_reaching(head, needed)])  # [M]


def keep_min_p(scores: Scores, min_p: float) -> Indices:
    """Keep scores whose probability is at least `min_p` times the best one's; `min_p` is in (0, 1]."""
    return np.flatnonzero(scores >= scores.max() + np.float32(np.log(min_p)))  # [M]


def keep_typical(scores: Scores, typical_p: float) -> Indices:
    """Keep scores whose surprise is nearest to the entropy, until their probability reaches `typical_p`.

    Cost: 0.3 ms for 49,152 scores (one core) where few make up the mass, 5 ms where nearly all are needed.

    Source: locally typical sampling, arXiv 2202.00666.
    """
    shifted = scores - scores.max()  # [K]
    weights = np.exp(shifted)  # [K]
    log_probs = shifted - np.log(weights.sum())  # [K]
    possible = np.flatnonzero(weights)  # [P]
    entropy = -np.dot(weights[possible], log_probs[possible]) / weights.sum()
    distances = np.abs(-log_probs - entropy)  # [K]
    needed = typical_p * float(weights.sum(dtype=np.float64))
    head = np.arange(len(scores))  # [K]
    for circle in _CIRCLES:
        inside = np.flatnonzero(distances <= distances.min() + np.float32(circle))  # [C]
        if float(weights[inside].sum(dtype=np.float64)) >= needed:
            head = inside
            break
    head = head[np.argsort(distances[head])]  # [C]
    return np.flatnonzero(distances <= distances[head[_first_reaching(weights[head], needed)]])  # [M]


def _first_reaching(weights: Scores, needed: float) -> int:
    """Return the index at which the running sum of `weights` [C] reaches `needed`; the last one if it never does."""
    sums = np.cumsum(weights, dtype=np.float64)  # [C]
    return min(int(np.searchsorted(sums, needed)), len(weights) - 1)
