"""A tiny draft and texts for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.models.draft import DraftKind, DraftModel
from foretell.train.examples import Examples
from foretell.train.text import CHAT, RAW, Documents, hidden_path
from tiny import draft_body

V, E, EOS = 60, 16, 3
KEPT = np.array([EOS, *range(10, 50)])
CPU = torch.device("cpu")


def build_draft(kind: DraftKind = "feature", window: int | None = None, seed: int = 0) -> DraftModel:
    """Return a draft of random weights in float64."""
    random = torch.Generator().manual_seed(seed)
    config = draft_body(vocab_size=V, window=window, max_positions=4096, eos_ids=(EOS,))
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, E),
        "lm_head.weight": (len(KEPT), E),
        "model.norm.weight": (E,),
        f"{layer}input_layernorm.weight": (E,),
        f"{layer}post_attention_layernorm.weight": (E,),
        f"{layer}self_attn.q_proj.weight": (16, E),
        f"{layer}self_attn.k_proj.weight": (8, E),
        f"{layer}self_attn.v_proj.weight": (8, E),
        f"{layer}self_attn.o_proj.weight": (E, 16),
        f"{layer}mlp.gate_proj.weight": (24, E),
        f"{layer}mlp.up_proj.weight": (24, E),
        f"{layer}mlp.down_proj.weight": (E, 24),
    }
    if kind == "feature":
        shapes |= {"fuse.weight": (E, 2 * E), "no_feature": (E,)}
    tensors = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return DraftModel(config, tensors, KEPT, torch.float64, CPU)


def build_examples(folder: Path, lengths: list[int], answer_start: int = 5) -> Examples:
    """Return random texts, no two tokens of which follow each other twice, with random hidden states."""
    random = np.random.default_rng(len(lengths))
    texts: list[list[int]] = [[4] for _ in lengths]
    pairs = set()
    for text, length in zip(texts, lengths, strict=True):
        while len(text) < length:
            token_id = int(random.integers(4, V))
            if (text[-1], token_id) not in pairs:
                pairs.add((text[-1], token_id))
                text.append(token_id)
    size = len(texts)
    documents = Documents.of(
        texts, [CHAT, RAW] * (size // 2) + [CHAT] * (size % 2), [answer_start] * size, [0.0] * size
    )
    path = folder / "shard-0000.npz"
    documents.save(path)
    hidden = torch.from_numpy(random.standard_normal((len(documents.token_ids), E))).bfloat16()
    np.save(hidden_path(path), hidden.view(torch.uint16).numpy())
    return Examples([path])


@pytest.fixture(scope="session")
def make_draft() -> Callable[..., DraftModel]:
    """A draft by kind, window and seed; it keeps EOS, which is 3, and 10 to 49 of 60 ids."""
    return build_draft


@pytest.fixture(scope="session")
def make_examples() -> Callable[..., Examples]:
    """Texts by folder and lengths, greedy, the answer from token 5 on."""
    return build_examples
