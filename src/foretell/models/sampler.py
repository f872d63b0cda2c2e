"""The block between the states of prompt tokens and their guesses.

It reads, beside a prompt token's final state, the token just before the guess: that is known when the guess is needed,
though it was not when the pass ran.

Source: the sampler of multi-token prediction with gated adapters, arXiv:2507.11851, there as here a small residual
block over the state and the embedding of the token before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretell.models.layers import PackedLinear

_EPS = 1e-6


class Sampler:
    """A residual block between prompt rows' states and guesses, with rows of the target's head for the ids it kept.

    Args:
        tensors: `sampler.mix.weight` [W, 2 * E], `sampler.mix.bias` [W], `sampler.out.weight` [E, W].
        embedding: the target's, [V, E].
        head: rows of the target's head for the kept ids, [K, E].
        kept_ids: target ids of the guesses, int64 [K], ascending.
        dtype: of the weights in memory.
        device: where they go.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        kept_ids: NDArray[np.int64],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def put(name: str) -> Tensor:
            return tensors[name].to(device, dtype)

        self.mix = PackedLinear(put("sampler.mix.weight"), put("sampler.mix.bias"))
        self.out = PackedLinear(put("sampler.out.weight"))
        self.head = PackedLinear(head.to(device, dtype).contiguous())
        self.embedding, self.kept_ids = embedding, kept_ids

    def __call__(self, states: Tensor, before: Sequence[int]) -> Tensor:
        """Return logits over the kept ids, [N, K].

        Args:
            states: final states of prompt rows, [N, E].
            before: ids of the tokens before the guesses, N.
        """
        embedded = self.embedding[torch.tensor(before, device=self.embedding.device)].to(states)  # [N, E]
        return self.head(self.out(F.silu(self.mix(sampler_inputs(states, embedded))), states))

    @property
    def num_bytes(self) -> int:
        """Bytes of resident weights; the embedding is the target's."""
        return self.mix.num_bytes + self.out.num_bytes + self.head.num_bytes


def sampler_inputs(states: Tensor, before: Tensor) -> Tensor:
    """Return both, each scaled to unit root mean square, side by side: [N, 2 * E] of [N, E] each."""
    width = states.shape[-1:]
    return torch.cat([F.rms_norm(each, width, None, _EPS) for each in (states, before)], -1)  # [N, 2 * E]
