"""Prompt tokens: trained embeddings whose rows, behind any token, guess what follows the next one.

A chain of m prompt tokens rides behind a row of the target's own pass. The state of slot j guesses the token j + 1
places after the row's.

Source: parallel prompt decoding, arXiv:2405.18628 §3.1-3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretell.hardware.prompt_policy import GuessRanks
from foretell.models.sampler import Sampler
from foretell.tree.pack import PromptIds


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Trained prompt tokens of a target."""

    embeddings: Tensor
    """[C, m, E] in the target's dtype: chains of an ensemble, and the slots of each."""
    ranks: GuessRanks
    """How good their guesses were on text that was held out."""
    sampler: Sampler | None = None
    prefix: Tensor | None = None
    """[L, 2 * G, P, D]: keys and values that prompt tokens see before all others, in the target's dtype."""

    @property
    def num_slots(self) -> int:
        """Prompt tokens of a chain, m."""
        return self.embeddings.shape[1]

    @property
    def num_chains(self) -> int:
        """Chains of an ensemble, C."""
        return self.embeddings.shape[0]

    @property
    def num_prefix(self) -> int:
        """Slots of the prefix, P; 0 without one."""
        return 0 if self.prefix is None else self.prefix.shape[2]

    def ids(self, vocab_size: int) -> PromptIds:
        """Return their ids, behind the vocabulary."""
        return PromptIds(vocab_size, self.num_slots, self.num_chains)

    @property
    def num_bytes(self) -> int:
        """Bytes that they add to the target's."""
        prefix_bytes = 0 if self.prefix is None else self.prefix.nbytes
        return self.embeddings.nbytes + prefix_bytes + (0 if self.sampler is None else self.sampler.num_bytes)
