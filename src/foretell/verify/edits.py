"""Edits of one row of logits that depend on the tokens before it: biases, penalties and bans.

Each works in place on float32 scores [V] by the few ids that it concerns, and builds nothing as wide as the vocabulary.
Ids of the context at or above V (rows of an embedding wider than the vocabulary) can't be chosen, and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from foretell.errors import ConfigError
from foretell.params import LogitsProcessor
from foretell.verify.scores import Indices, Scores


class Context:
    """The tokens before one row: prompt, output and the draft path, of which only the prompt is told apart."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        assert len(token_ids) >= num_prompt_tokens
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @cached_property
    def ids(self) -> Indices:
        """All of them as one array, [T]: made only for the edits that look at every token."""
        return np.fromiter(self.token_ids, np.int64, len(self.token_ids))  # [T]

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        """Say whether the last tokens are these."""
        size = len(token_ids)
        return size <= len(self.token_ids) and list(self.token_ids[len(self.token_ids) - size :]) == list(token_ids)


def add_logit_bias(scores: Scores, logit_bias: Mapping[int, float]) -> None:
    """Add to the score of each id its bias."""
    scores[list(logit_bias)] += np.fromiter(logit_bias.values(), np.float32, len(logit_bias))  # [K]


def penalize_repetition(scores: Scores, context: Context, penalty: float) -> None:
    """Divide positive scores of ids in prompt or output by `penalty`, and multiply negative ones by it.

    Source: arXiv 1909.05858, as transformers' `RepetitionPenaltyLogitsProcessor` has it.
    """
    ids = context.ids[context.ids < len(scores)]  # [T], repeated ids get the same value again
    seen = scores[ids]  # [T]
    scores[ids] = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))  # [T]


def penalize_presence(scores: Scores, context: Context, presence: float, frequency: float) -> None:
    """Subtract from ids in the output `presence`, and `frequency` for each time that they occur.

    Source: OpenAI's `presence_penalty` and `frequency_penalty`, which leave the prompt out.
    """
    output_ids = context.ids[context.num_prompt_tokens :]  # [T]
    ids, counts = np.unique(output_ids[output_ids < len(scores)], return_counts=True)  # [K], [K]
    scores[ids] -= (presence + frequency * counts).astype(np.float32)  # [K]


def forbid_repeated_ngrams(scores: Scores, context: Context, size: int) -> None:
    """Forbid ids that would complete an n-gram of `size` tokens that prompt and output already hold."""
    num_windows = len(context.token_ids) - size + 1
    if num_windows <= 0:
        return
    prefix = context.ids[len(context.ids) - (size - 1) :]  # [size - 1]
    is_match = np.ones(num_windows, dtype=np.bool_)  # [T - size + 1]
    for offset, token_id in enumerate(prefix):
        is_match &= context.ids[offset : offset + num_windows] == token_id
    banned = context.ids[size - 1 :][is_match]  # [K]
    scores[banned[banned < len(scores)]] = -np.inf


def forbid_tokens(scores: Scores, token_ids: Sequence[int]) -> None:
    """Forbid these ids wherever they come."""
    scores[list(token_ids)] = -np.inf


def forbid_words(scores: Scores, context: Context, words: Sequence[Sequence[int]]) -> None:
    """Forbid the last id of each token sequence whose other ids end the context."""
    banned = [word[-1] for word in words if context.ends_with(word[:-1])]
    scores[banned] = -np.inf


def forbid_end(scores: Scores, context: Context, end_ids: Sequence[int], min_new_tokens: int) -> None:
    """Forbid the ids that end an output before it holds `min_new_tokens` tokens."""
    if context.num_output_tokens < min_new_tokens:
        scores[list(end_ids)] = -np.inf


def call_logits_processor(scores: Scores, context: Context, processor: LogitsProcessor, device: torch.device) -> Scores:
    """Return what a transformers `LogitsProcessor` makes of the scores; it gets, on `device`, tensors of its own.

    Raises:
        ConfigError: it returned anything but a tensor of the shape [1, V].
    """
    input_ids = torch.from_numpy(context.ids.copy())[None].to(device)  # [1, T]
    result = processor(input_ids, torch.from_numpy(scores)[None].to(device))  # [1, V]
    if not isinstance(result, torch.Tensor) or result.shape != (1, len(scores)):
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ConfigError(
            f"logits processor {processor!r} returned {shape}, expected scores of shape (1, {len(scores)}): "
            "return one score for each token id"
        )
    edited: Scores = result[0].detach().to("cpu", torch.float32).numpy()  # [V]
    return edited
