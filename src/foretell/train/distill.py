"""What a draft learns: the target's distribution over the kept ids, and how well it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretell.train.draft_module import DraftModule
from foretell.train.examples import Batch
from foretell.train.text import Documents

CHUNK_ROWS: Final = 256
"""Rows whose logits exist at once: 8 MiB in float32 for 8,192 kept ids."""

RANKS: Final = (1, 2, 4, 8)
"""Agreement is told for so many of the draft's best ids."""


def choose_kept_ids(
    documents: Documents, numbers: NDArray[np.int64], num_kept: int, always: Iterable[int]
) -> NDArray[np.int64]:
    """Return the `num_kept` most frequent ids of these documents, `always` among them, ascending."""
    text = np.concatenate([documents[int(number)] for number in numbers])  # [M]
    counts = np.bincount(text)  # [V]
    counts[[token_id for token_id in always if token_id < len(counts)]] = np.iinfo(counts.dtype).max
    best = np.argsort(-counts, kind="stable")[:num_kept]
    return np.sort(best[counts[best] > 0])


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a chunked loss gives."""

    loss: float
    """Mean over rows, in nats."""
    hidden: Tensor
    """Its derivative by the draft's hidden states, [R, E]."""


@torch.no_grad()
def distill(hidden: Tensor, target_hidden: Tensor, weights: Tensor, head: Tensor, *, sharpness: float) -> Gradient:
    """Return the cross-entropy of the target's distribution over kept ids under the draft's, and its gradient.

    Both distributions come from the same frozen rows of the target's head, so the gradient is two products away and no
    logits are kept: chunks of rows go through one by one.

    Args:
        hidden: the draft's final states, [R, E].
        target_hidden: the target's, bfloat16 [R, E].
        weights: of the rows, float32 [R]; the loss is their weighted mean.
        head: rows of the target's head, bfloat16 [K, E].
        sharpness: weight, from 0 to 1, of the target's best id beside its whole distribution: greedy decoding asks for
            that one alone.
    """
    gradient = torch.empty_like(hidden, dtype=torch.bfloat16)  # [R, E]
    total = 0.0
    weights = weights / weights.sum()
    for start in range(0, len(hidden), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        wanted = F.linear(target_hidden[rows], head).float()  # [C, K]
        best = wanted.argmax(-1, keepdim=True)  # [C, 1]
        wanted = torch.softmax(wanted, -1).mul_(1 - sharpness)
        wanted.scatter_add_(1, best, torch.full_like(wanted[:, :1], sharpness))
        scores = F.linear(hidden[rows].bfloat16(), head).float()  # [C, K]
        log_probs = torch.log_softmax(scores, -1)  # [C, K]
        total -= float(torch.linalg.vecdot(wanted, log_probs) @ weights[rows])
        slope = log_probs.exp_().sub_(wanted).mul_(weights[rows, None])  # [C, K]
        gradient[rows] = slope.bfloat16() @ head
    return Gradient(total, gradient.to(hidden.dtype))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the target's own choice is among the draft's best, on greedy text."""

    by_depth: list[list[float]]
    """`[depth][rank]`, for the ranks of `RANKS`; depth 0 knows the target's last state."""
    coverage: float
    """Share of choices that are kept ids at all."""
    chain_tokens_per_pass: float
    """Tokens of a pass that verifies the draft's best chain, one id at each depth, and the target's own token."""
    num_choices: int


@torch.no_grad()
def measure_agreement(
    module: DraftModule,
    batches: Iterable[Batch],
    embedding: Tensor,
    target_head: Tensor,
    kept_ids: NDArray[np.int64],
    num_streams: int,
) -> Agreement:
    """Compare a draft with the target's own choices; an id that was not kept counts as a miss.

    Args:
        module: the draft.
        batches: greedy documents.
        embedding: the target's, [V, E].
        target_head: the target's whole head, [V, E].
        kept_ids: ids that the draft knows, [K].
        num_streams: depths to look at, D.
    """
    head = target_head[kept_ids]  # [K, E]
    hits = torch.zeros(num_streams, len(RANKS))  # [D, R]
    chains = torch.zeros(num_streams)  # [D]
    num_kept = num_choices = 0
    is_kept = torch.zeros(len(target_head), dtype=torch.bool)
    is_kept[kept_ids] = True
    for batch in batches:
        hidden = run_module(module, batch, embedding, num_streams)  # [B, D, T, E]
        for row in range(len(batch.token_ids)):
            places = batch.is_answer[row].nonzero()[:, 0]  # [A]
            if len(places) <= num_streams:
                continue
            places = places[num_streams - 1 :]  # those above which the whole chain lies in the answer
            choices = batch.token_ids[row, places + 1]  # [A]
            best = F.linear(hidden[row][:, places].bfloat16(), head).float().topk(max(RANKS)).indices  # [D, A, 8]
            is_right = torch.from_numpy(kept_ids)[best] == choices[None, :, None]  # [D, A, 8]
            for index, rank in enumerate(RANKS):
                hits[:, index] += is_right[:, :, :rank].any(-1).sum(-1)
            # A chain from place t has depth d at place t + d.
            alive = torch.ones(len(places) - num_streams + 1, dtype=torch.bool)  # [A - D + 1]
            for depth in range(num_streams):
                alive = alive & is_right[depth, depth : depth + len(alive), 0]
                chains[depth] += float(alive.float().mean()) * len(places)
            num_kept += int(is_kept[choices].sum())
            num_choices += len(places)
    total = max(num_choices, 1)
    return Agreement(
        by_depth=(hits / total).tolist(),
        coverage=num_kept / total,
        chain_tokens_per_pass=1.0 + float(chains.sum()) / total,
        num_choices=num_choices,
    )


def run_module(module: DraftModule, batch: Batch, embedding: Tensor, num_streams: int) -> Tensor:
    """Return the draft's final states for a batch, [B, D, T, E]."""
    features = batch.features if module.kind == "feature" else None  # [B, T, E]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden: Tensor = module(embedding[batch.token_ids], features, num_streams)
    return hidden
