"""How good the guesses of prompt tokens are on given texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.drafters.prompt_tokens import PromptTokens
from foretell.models.decoder import Model
from foretell.train.anchors import Anchors, read_texts, run_prompts

RANKS: Final = 10
"""Ranks that are told apart."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target said."""

    token_ids: Sequence[int]
    num_prompt_tokens: int


@torch.inference_mode()
def rank_texts(tokens: PromptTokens, model: Model, texts: Sequence[Text]) -> list[NDArray[np.int64]]:
    """Return which rank the target's own tokens have among the guesses, at every place of what it said: [A, m] a text.

    Args:
        tokens: installed in the target's runner.
        model: the target.
        texts: too short ones are passed over.

    Cost: a pass over each text, and one over its places times their prompt tokens.
    """
    num_slots, vocab_size = tokens.num_slots, model.config.vocab_size
    kept = torch.arange(vocab_size) if tokens.sampler is None else torch.from_numpy(tokens.sampler.kept_ids)  # [K]
    columns = torch.full((vocab_size,), -1, dtype=torch.int64)  # [V], -1 for ids that are not guessed
    columns[kept] = torch.arange(len(kept))
    ranked = []
    for text in texts:
        places = torch.arange(text.num_prompt_tokens - 1, len(text.token_ids) - 1 - num_slots)  # [A]
        if len(places) == 0:
            continue
        token_ids = torch.tensor(text.token_ids, device=model.device)
        anchors = Anchors(places[None], torch.ones(1, len(places), dtype=torch.bool))
        known = read_texts(model, token_ids[None])
        states = run_prompts(
            model, known, anchors, tokens.embeddings, tokens.prefix, is_adapted=bool(tokens.adapters)
        )  # [1, A, m, E]
        ranks = []
        for slot in range(num_slots):
            right = columns[token_ids[places + slot + 2].cpu()]  # [A]
            ranks.append(rank_right(_scores(tokens, model, states[0, :, slot], token_ids[places + slot + 1]), right))
        ranked.append(torch.stack(ranks, 1).numpy())  # [A, m]
    return ranked


def count_ranks(ranked: Sequence[NDArray[np.int64]], num_slots: int) -> NDArray[np.int64]:
    """Return how often the right tokens of all slots had which ranks, [R + 1] * m, from ranks by place, [A, m] each."""
    counts = np.zeros([RANKS + 1] * num_slots, dtype=np.int64)
    for ranks in ranked:
        np.add.at(counts, tuple(ranks.T), 1)
    return counts


def rank_right(scores: Tensor, right: Tensor) -> Tensor:
    """Return how many of scores [R, K] exceed that of the right column [R]; `RANKS` at most, and where it is -1."""
    right = right.to(scores.device)
    own = scores.gather(1, right[:, None].clamp(min=0))  # [R, 1]
    rank = (scores > own).sum(1).clamp(max=RANKS)  # [R]
    return torch.where(right >= 0, rank, RANKS).cpu()


def _scores(tokens: PromptTokens, model: Model, states: Tensor, before: Tensor) -> Tensor:
    """Return the scores of a slot's guesses, [A, K], after these tokens [A]."""
    if tokens.sampler is None:
        return model.logits(states)[:, : model.config.vocab_size].float()
    return tokens.sampler(states, before.tolist()).float()
