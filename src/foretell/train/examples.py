"""Texts and the target's hidden states as batches to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.errors import InputError
from foretell.llm import LLM
from foretell.passes.rows import Rows
from foretell.train.text import Documents, hidden_path
from foretell.train.whole_file import whole_file

HELD_OUT: Final = 24
"""One document in so many is never learned from."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents of about one length, padded at their ends."""

    token_ids: Tensor
    """int64 [B, T]."""
    hidden: Tensor
    """bfloat16 [B, T, E]: the target's final states; zeros where not known."""
    is_real: Tensor
    """bool [B, T]: rows whose next token the target has a say about."""
    is_answer: Tensor
    """bool [B, T]: rows whose next token is part of the target's answer."""

    @property
    def features(self) -> Tensor:
        """The state before each token, bfloat16 [B, T, E]."""
        return torch.cat((torch.zeros_like(self.hidden[:, :1]), self.hidden[:, :-1]), 1)


class Examples:
    """Documents with the target's hidden states, mapped from disk.

    Args:
        shards: files by `write_text`, each with hidden states beside it.

    Raises:
        InputError: a shard or its hidden states are damaged.
    """

    def __init__(self, shards: Sequence[Path]) -> None:
        parts = [Documents.load(path) for path in shards]
        self.documents = Documents.join(parts)
        self._hidden = [_load_hidden(path, len(part.token_ids)) for path, part in zip(shards, parts, strict=True)]
        self._places = [
            (shard, int(start)) for shard, part in enumerate(parts) for start in part.starts[:-1]
        ]  # where each document begins

    def training(self) -> NDArray[np.int64]:
        """Return the numbers of the documents to learn from."""
        numbers = np.arange(len(self.documents))
        chosen: NDArray[np.int64] = numbers[(numbers % HELD_OUT != 0) & (self.documents.lengths > 2)]
        return chosen

    def held_out(self, kind: int) -> NDArray[np.int64]:
        """Return the numbers of greedy documents of a kind that are not learned from."""
        documents = self.documents
        numbers = np.arange(len(documents))
        is_greedy = (documents.temperatures == 0) & (documents.kinds == kind)
        chosen: NDArray[np.int64] = numbers[(numbers % HELD_OUT == 0) & is_greedy & (documents.lengths > 2)]
        return chosen

    def batches(
        self, numbers: NDArray[np.int64], batch_size: int, seed: int | None = None, *, skip: int = 0
    ) -> Iterator[Batch]:
        """Yield every document once, those of like length together; in another order for each seed.

        `skip`: batches to leave out at the start.
        """
        lengths = self.documents.lengths[numbers]
        if seed is None:
            order = np.argsort(lengths, kind="stable")
            starts = np.arange(0, len(order), batch_size)
        else:
            random = np.random.default_rng(seed)
            order = np.argsort(lengths + random.uniform(0, 24, len(lengths)), kind="stable")
            starts = random.permutation(np.arange(0, len(order) - batch_size + 1, batch_size))
        for start in starts[skip:]:
            yield self.batch(numbers[order[start : start + batch_size]])

    def batch(self, numbers: Sequence[int] | NDArray[np.int64]) -> Batch:
        """Return these documents as one batch."""
        documents = self.documents
        lengths = [int(documents.lengths[number]) for number in numbers]
        size, longest = len(lengths), max(lengths)
        width = self._hidden[0].shape[1]
        token_ids = torch.zeros(size, longest, dtype=torch.int64)  # [B, T]
        hidden = torch.zeros(size, longest, width, dtype=torch.bfloat16)  # [B, T, E]
        places = torch.arange(longest)[None]  # [1, T]
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            token_ids[row, :length] = torch.from_numpy(documents[int(number)].astype(np.int64))
            shard, start = self._places[int(number)]
            states = np.array(self._hidden[shard][start : start + length])  # [T, E], a copy that may be written
            hidden[row, :length] = torch.from_numpy(states).view(torch.bfloat16)
        is_real = places < torch.tensor(lengths)[:, None] - 1  # [B, T]
        answers = torch.from_numpy(documents.answer_starts[np.asarray(numbers)].astype(np.int64))[:, None]  # [B, 1]
        return Batch(token_ids, hidden, is_real, is_real & (places >= answers - 1))


def add_hidden(llm: LLM, shard: Path, progress: Callable[[int], None] | None = None) -> None:
    """Compute the hidden states of a shard's documents and write them beside it.

    Cost: 1,200 tokens/s for a 135M model on two cores.
    """
    documents = Documents.load(shard)
    runner = llm.engine.runner
    width = llm.config.hidden_size
    hidden = np.zeros((len(documents.token_ids), width), dtype=np.uint16)  # [M, E]
    for number in range(len(documents)):
        start, end = documents.starts[number], documents.starts[number + 1]
        region = runner.cache.allocate(int(end - start))
        states = runner.prefill(Rows.chain(region, documents[number][:-1].tolist()))  # [T - 1, E]
        runner.cache.free(region)
        hidden[start : end - 1] = states.bfloat16().view(torch.uint16).numpy()
        if progress is not None:
            progress(int(end))
    with whole_file(hidden_path(shard)) as file:
        np.save(file, hidden)


def _load_hidden(shard: Path, num_tokens: int) -> NDArray[np.uint16]:
    path = hidden_path(shard)
    try:
        hidden: NDArray[np.uint16] = np.load(path, mmap_mode="r")  # [M, E]
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path} is missing or damaged ({error}): delete it, and it is computed again") from None
    if hidden.ndim != 2 or len(hidden) != num_tokens:
        raise InputError(
            f"{path} has shape {hidden.shape}, {shard.name} {num_tokens} tokens: delete it, and it is computed again"
        )
    return hidden
