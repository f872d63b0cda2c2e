"""Whether a model honours masks, positions and slots: a small tree against its paths run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from foretell.models.decoder import Model, RowBatch

WINDOW: Final = 4
"""A window short enough to matter in the probe's tree."""

_SLOTS: Final = 512
_STALE: Final = 10.0
"""What unwritten slots hold: a row that sees one of them is far off."""
_CHUNKS: Final = (range(0, 8), range(8, 12), range(12, 17))
"""Nodes of each pass: the prompt in two chunks, then the tree."""
_TREE: Final = (-1, 0, 0, 2, 1)
"""Parents in the tree: two branches, their nodes in interleaved slots."""


def tree_error(model: Model, window: int | None, path_logits: Callable[[list[int]], Tensor]) -> float:
    """Return by how much a tree's logits are off, as a share of the largest logit; NaN where logits are NaN.

    Args:
        model: runs the prompt and the tree, in slots that hold stale values beforehand.
        window: positions that sliding layers see; None where the model has none.
        path_logits: gives the logits [V] that the model should give after a list of tokens.
    """
    prompt = _CHUNKS[-1].start
    parents = [*range(-1, prompt - 1), *(prompt - 1 if parent < 0 else prompt + parent for parent in _TREE)]
    token_ids = [(7 * node + 3) % model.config.vocab_size for node in range(len(parents))]
    paths = [_path(parents, node) for node in range(len(parents))]
    rows = _run(model, token_ids, paths, window)  # [N, V]
    tree_paths = [[token_ids[node] for node in path] for path in paths[prompt:]]
    expected = torch.stack([path_logits(path).float() for path in tree_paths])  # [N, V]
    return ((rows - expected).abs().max() / expected.abs().max()).item()


def _path(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def _run(model: Model, token_ids: list[int], paths: list[list[int]], window: int | None) -> Tensor:
    """Return the logits of the last chunk's rows, [N, V]."""
    config = model.config
    shape = (1, 2 * config.num_kv_heads, _SLOTS, config.head_dim)
    stale = torch.full(shape, _STALE, dtype=model.dtype, device=model.device)
    keys_values = [stale.clone() for _ in range(config.num_layers)]
    hidden = torch.empty(0)
    for nodes in _CHUNKS:
        hidden = model.forward(_batch(model, token_ids, [paths[node] for node in nodes], window), keys_values)  # [N, E]
    return model.logits(hidden).float()


def _batch(model: Model, token_ids: list[int], paths: list[list[int]], window: int | None) -> RowBatch:
    """Return the pass over the nodes at the ends of these paths; a node's slot is its number."""
    nodes = [path[-1] for path in paths]
    queries_per_kv = model.config.num_heads // model.config.num_kv_heads
    bias = torch.full((1, 1, len(nodes), _SLOTS), -torch.inf, dtype=model.dtype)
    local_bias = bias.clone()
    for row, path in enumerate(paths):
        bias[0, 0, row, path] = 0
        local_bias[0, 0, row, path[-window if window else 0 :]] = 0
    return RowBatch(
        token_ids=torch.tensor([[token_ids[node] for node in nodes]], device=model.device),
        positions=torch.tensor([[len(path) - 1 for path in paths]], device=model.device),
        last_position=max(map(len, paths)) - 1,
        slots=torch.tensor([nodes], device=model.device),
        bias=bias.repeat(1, 1, queries_per_kv, 1).to(model.device),  # [1, 1, H / G * N, S]
        local_bias=None if window is None else local_bias.repeat(1, 1, queries_per_kv, 1).to(model.device),
    )
