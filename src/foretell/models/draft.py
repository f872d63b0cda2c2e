"""Draft models: one or two Llama layers between a target's own embedding and rows of its own head.

A draft of kind `lm` reads tokens alone. One of kind `feature` also reads, beside each token, the target's final hidden
state of the token before it, where that is known; where it is not, a learned vector stands for it. So a tree of
several levels can be read in one pass, which a draft that feeds on its own states could not do.

Source: Spector and Re 2023, arXiv:2308.04623 (a draft model that is itself drafted for); EAGLE, arXiv:2401.15077
(hidden states of the target as input).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretell.models.config import ModelConfig
from foretell.models.decoder import Model, RowBatch
from foretell.models.layers import PackedLinear
from foretell.models.llama import Llama

DraftKind = Literal["lm", "feature"]


class DraftModel(Llama):
    """A decoder whose logits are over the ids that it kept.

    Args:
        config: of the body; `vocab_size` is the target's.
        tensors: the body's weights by Llama's names, with `model.embed_tokens.weight` [V, E] and `lm_head.weight`
            [K, E] of the target; for kind `feature` also `fuse.weight` [E, 2 * E] and `no_feature` [E].
        kept_ids: target ids of the logits' columns, int64 [K], ascending.
        dtype: bfloat16 or float32.
        device: where the weights go.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        kept_ids: NDArray[np.int64],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, _Tensors(tensors), dtype, device)  # type: ignore[arg-type]
        self.kept_ids = kept_ids
        self.fuse_tokens = self.fuse_features = self.no_feature = None
        if "fuse.weight" in tensors:
            fuse = tensors["fuse.weight"].to(device, dtype)  # [E, 2 * E]
            self.fuse_tokens, self.fuse_features = (PackedLinear(half.contiguous()) for half in fuse.chunk(2, -1))
            self.no_feature = tensors["no_feature"].to(device, dtype)  # [E]

    @property
    def kind(self) -> DraftKind:
        """What the draft reads."""
        return "lm" if self.no_feature is None else "feature"

    @property
    def num_bytes(self) -> int:
        """Bytes of resident weights; the target's embedding is not counted, the copied rows of its head are."""
        fuses = [fuse for fuse in (self.fuse_tokens, self.fuse_features) if fuse is not None]
        return super().num_bytes + sum(fuse.num_bytes for fuse in fuses)

    def inputs(self, batch: RowBatch) -> Tensor:
        """Return what the first layer reads, [B * N, E]: tokens and, for kind `feature`, what stands beside them."""
        tokens = self.embed(batch)  # [B * N, E]
        if self.fuse_tokens is None or self.fuse_features is None:
            return tokens
        assert batch.features is not None
        normed = F.rms_norm(tokens, tokens.shape[-1:], None, self.config.norm_eps)  # [B * N, E]
        return self.fuse_features(batch.features.view_as(tokens), self.fuse_tokens(normed))  # [B * N, E]


class _Tensors:
    """Tensors in memory where `Llama` expects a reader of files."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_mapped(self, name: str) -> Tensor:
        return self._tensors[name]

    def expect(self, shapes: Mapping[str, Any]) -> None:
        for name, shape in shapes.items():
            assert tuple(self._tensors[name].shape) == shape, name

    def release(self) -> None: ...


class ForeignDraft:
    """Any causal language model with the target's tokenizer, as a draft.

    Of two vocabularies that differ in padding at the end it proposes what both have, and reads id 0 for what only the
    target has.

    Args:
        model: the decoder.
        num_ids: ids that the target has as well.
    """

    no_feature = None
    kind: DraftKind = "lm"

    def __init__(self, model: Model, num_ids: int) -> None:
        self._model = model
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.kept_ids = np.arange(num_ids)  # [K]
        self.needs_grid = getattr(model, "needs_grid", False)

    def forward(self, batch: RowBatch, keys_values: Sequence[Tensor]) -> Tensor:
        return self._model.forward(self._known(batch), keys_values)

    def embed(self, batch: RowBatch) -> Tensor:
        return self._model.embed(self._known(batch))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)[:, : len(self.kept_ids)]

    @property
    def num_bytes(self) -> int:
        return self._model.num_bytes

    def _known(self, batch: RowBatch) -> RowBatch:
        is_unknown = batch.token_ids >= self.config.vocab_size  # [B, N]
        return replace(batch, token_ids=batch.token_ids.masked_fill(is_unknown, 0))  # [B, N]
