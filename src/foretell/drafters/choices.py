"""From a draft model's logits to a node's children, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.drafters.drafter import DraftSampling
from foretell.drafters.grow import MIN_PATH_PROBABILITY
from foretell.verify.noise import gumbel_noise_array

Choices = list[tuple[float, int]]
"""`(log-probability, token id)`, best first."""

_LEAST_LOG_PROB: Final = math.log(MIN_PATH_PROBABILITY)

_HEAD: Final = 256
"""Ids among which top-p looks for its mass where top-k does not say how many."""

_LEAST_TEMPERATURE: Final = torch.finfo(torch.float32).tiny

_MAX_POSITIONS: Final = 128
"""Positions whose noise is remembered."""


def rank(scores: Tensor, kept_ids: NDArray[np.int64]) -> list[Choices]:
    """Return for each row what its softmax gives at least `MIN_PATH_PROBABILITY`; of equals the smaller id first.

    Args:
        scores: [N, K], unnormalised log-probabilities.
        kept_ids: target ids of the columns, [K], ascending.

    Cost: 0.05 ms for 4 rows of 8,192 ids (one core); finding the best by `topk` takes twice as long.
    """
    log_probs = torch.log_softmax(scores, -1, dtype=torch.float32).cpu().numpy()  # [N, K]
    found = np.flatnonzero(log_probs >= _LEAST_LOG_PROB)  # [F], row by row
    values = log_probs.ravel()[found]  # [F]
    rows, columns = np.divmod(found, log_probs.shape[1])  # [F] each
    order = np.lexsort((-values, rows))  # [F], stable, so ids ascend among equals
    choices: list[Choices] = [[] for _ in range(len(log_probs))]
    token_ids = kept_ids[columns[order]]  # [F]
    for row, value, token_id in zip(rows[order].tolist(), values[order].tolist(), token_ids.tolist(), strict=True):
        choices[row].append((value, token_id))
    return choices


def filter_scores(logits: Tensor, sampling: DraftSampling) -> Tensor:
    """Return float32 scores [N, K] at the request's temperature, -inf for what its top-k and top-p leave out.

    Only nearly what the target does: the draft's logits are others, and top-p without top-k keeps at most 256 ids. The
    best score is 0 however small the temperature, so that no law of finite logits is NaN.
    """
    scores = logits.float()  # [N, K]
    scores = (scores - scores.amax(-1, keepdim=True)) / max(sampling.temperature, _LEAST_TEMPERATURE)  # [N, K]
    has_top_k, has_top_p = 0 < sampling.top_k < scores.shape[1], sampling.top_p < 1.0
    if not has_top_k and not has_top_p:
        return scores
    num_head = sampling.top_k if has_top_k else min(_HEAD, scores.shape[1])
    head = scores.topk(num_head).values  # [N, C], descending
    least = head[:, -1:]  # [N, 1]
    if has_top_p:
        total = (head if has_top_k else scores).logsumexp(-1, keepdim=True)  # [N, 1]
        mass = (head - total).exp().cumsum(-1)  # [N, C]
        num_before = (mass < sampling.top_p).sum(-1, keepdim=True).clamp(max=num_head - 1)  # [N, 1]
        least = head.gather(-1, num_before)  # [N, 1]
    return scores.masked_fill(scores < least, -torch.inf)


class NoiseMemory:
    """The target's noise on the kept ids, remembered by position: neighbours in depth and the next steps share it."""

    def __init__(self, kept_ids: NDArray[np.int64]) -> None:
        self._kept_ids = kept_ids
        self._noise: dict[tuple[int, int, int], NDArray[np.float32]] = {}

    def rows(self, sampling: DraftSampling, positions: Sequence[int]) -> Tensor:
        """Return float32 [N, K]: the noise of tokens that are drawn at these positions.

        Cost: 0.06 ms for a position that is new, with 8,192 ids (one core).
        """
        if len(self._noise) > _MAX_POSITIONS:
            self._noise.clear()
        return torch.from_numpy(np.stack([self._at(sampling, position) for position in positions]))  # [N, K]

    def _at(self, sampling: DraftSampling, position: int) -> NDArray[np.float32]:
        key = (sampling.seed, sampling.sequence_key, position)
        noise = self._noise.get(key)
        if noise is None:
            noise = self._noise[key] = gumbel_noise_array(*key, self._kept_ids).astype(np.float32)  # [K]
        return noise
