"""Prompt tokens behind many places of a text at once: one pass over the text, one over the prompt rows alone.

Rows of the text never see a prompt token, so they carry no gradient: their keys and values are computed once, and the
prompt rows of all places, which see the text up to their own and themselves, are a second, small pass.

Source: packed anchors, BiTA, arXiv:2401.12522; the layout of arXiv:2405.18628 with 64 places a text in place of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.models.config import ModelConfig
from foretell.models.decoder import Model, RowBatch
from foretell.train.examples import Batch


@dataclass(frozen=True, slots=True)
class Anchors:
    """Places of texts behind which prompt tokens are put."""

    places: Tensor
    """int64 [B, A]; 0 where a text has too few."""
    is_real: Tensor
    """bool [B, A]."""

    def after(self, num_slots: int, first: int) -> Tensor:
        """Return the places `first`, `first` + 1, … behind each anchor, [B, A, m]."""
        return self.places[:, :, None] + torch.arange(first, first + num_slots)  # [B, A, m]


def choose_anchors(batch: Batch, num_anchors: int, num_slots: int, generator: torch.Generator) -> Anchors:
    """Return places drawn from the answers of a batch, ascending, behind which the target says m + 1 tokens more."""
    num_texts, length = batch.token_ids.shape
    places = torch.zeros(num_texts, num_anchors, dtype=torch.int64)  # [B, A]
    is_real = torch.zeros(num_texts, num_anchors, dtype=torch.bool)  # [B, A]
    for text in range(num_texts):
        last = int(batch.is_real[text].sum()) - 1 - num_slots
        possible = (batch.is_answer[text] & (torch.arange(length) <= last)).nonzero()[:, 0]  # [P]
        chosen = possible[torch.randperm(len(possible), generator=generator)[:num_anchors]].sort().values  # [≤ A]
        places[text, : len(chosen)] = chosen
        is_real[text, : len(chosen)] = True
    return Anchors(places, is_real)


def take_along(values: Tensor, places: Tensor) -> Tensor:
    """Return what stands at places [B, A, m] of [B, T] or [B, T, E]: [B, A, m] or [B, A, m, E]."""
    texts = torch.arange(len(values)).view(-1, 1, 1)  # [B, 1, 1]
    return values[texts, places]


@torch.no_grad()
def read_texts(model: Model, token_ids: Tensor, features: Tensor | None = None) -> list[Tensor]:
    """Return every layer's keys and values of texts, [B, 2 * G, T, D] each.

    `features`: what a draft model of kind `feature` reads beside them, [B, T, E].
    """
    num_texts, length = token_ids.shape
    config = model.config
    shape = (num_texts, 2 * config.num_kv_heads, length, config.head_dim)
    keys_values = [torch.zeros(shape, dtype=model.dtype) for _ in range(config.num_layers)]
    place = torch.arange(length)  # [T]
    distance = (place[:, None] - place[None]).expand(num_texts, -1, -1)  # [B, T, T]
    batch = _row_batch(config, model.dtype, place.expand(num_texts, -1).contiguous(), distance, distance >= 0, 0)
    model.forward(replace(batch, token_ids=token_ids, features=features), keys_values)
    return keys_values


def run_prompts(
    model: Model,
    text: Sequence[Tensor],
    anchors: Anchors,
    embeddings: Tensor,
    prefix: Tensor | None = None,
    *,
    is_adapted: bool = False,
    no_feature: Tensor | None = None,
) -> Tensor:
    """Return the final states of prompt rows, averaged over the chains, [B, A, m, E]; gradients reach the parameters.

    Args:
        model: a decoder whose weights are plain.
        text: by `read_texts`.
        anchors: where the prompt tokens stand.
        embeddings: [C, m, E].
        prefix: keys and values that prompt rows see before all others, [L, 2 * G, P, D].
        is_adapted: send the rows through the model's adapters.
        no_feature: what a draft model of kind `feature` reads beside prompt tokens, [E].
    """
    num_chains, num_slots, width = embeddings.shape
    num_texts, num_anchors = anchors.places.shape
    length, num_prefix = text[0].shape[2], 0 if prefix is None else prefix.shape[2]
    num_rows = num_anchors * num_chains * num_slots
    place = torch.arange(length)  # [T]
    starts = anchors.places.repeat_interleave(num_chains * num_slots, 1)  # [B, N]
    positions = starts + torch.arange(1, num_slots + 1).repeat(num_anchors * num_chains)  # [B, N]
    own = torch.kron(torch.eye(num_anchors * num_chains), torch.ones(num_slots, num_slots).tril()).bool()  # [N, N]
    sees = torch.cat(
        (
            place <= starts[:, :, None],  # [B, N, T]
            own.expand(num_texts, -1, -1),
            torch.ones(num_texts, num_rows, num_prefix, dtype=torch.bool),
        ),
        -1,
    )  # [B, N, T + N + P]
    key_positions = torch.cat((place.expand(num_texts, -1), positions), 1)  # [B, T + N]
    distance = positions[:, :, None] - key_positions[:, None]  # [B, N, T + N]
    distance = torch.nn.functional.pad(distance, (0, num_prefix))  # [B, N, S]
    batch = _row_batch(model.config, model.dtype, positions, distance, sees, length)
    rows = embeddings.to(model.dtype).flatten(0, 1).repeat(num_anchors, 1).expand(num_texts, -1, -1)  # [B, N, E]
    keys_values = []
    for layer, known in enumerate(text):
        slots = torch.nn.functional.pad(known, (0, 0, 0, num_rows + num_prefix))  # [B, 2 * G, S, D]
        if prefix is not None:
            slots[:, :, length + num_rows :] = prefix[layer].to(model.dtype)
        keys_values.append(slots)
    adapted = torch.arange(num_texts * num_rows) if is_adapted else None  # [B * N]
    features = None if no_feature is None else no_feature.expand_as(rows)  # [B, N, E]
    batch = replace(batch, embeddings=rows, features=features, adapted=adapted)
    hidden = model.forward(batch, keys_values)  # [B * N, E]
    return hidden.view(num_texts, num_anchors, num_chains, num_slots, width).mean(2)  # [B, A, m, E]


def _row_batch(
    config: ModelConfig, dtype: torch.dtype, positions: Tensor, distance: Tensor, sees: Tensor, first_slot: int
) -> RowBatch:
    """Return rows [B, N] written from `first_slot` on, where each sees what `sees` [B, N, S] says."""
    num_texts, num_rows = positions.shape
    queries_per_kv = config.num_heads // config.num_kv_heads

    def fold(visible: Tensor) -> Tensor:
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)[:, None]  # [B, 1, N, S]
        return bias.expand(-1, queries_per_kv, -1, -1).reshape(num_texts, 1, -1, visible.shape[-1])

    window = config.sliding_window
    return RowBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        last_position=int(positions.max()),
        slots=(first_slot + torch.arange(num_rows)).expand(num_texts, -1).contiguous(),
        bias=fold(sees),
        local_bias=None if window is None else fold(sees & (distance < window)),
    )
