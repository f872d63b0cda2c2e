"""Passes recorded once as CUDA graphs, and replayed: on a GPU the launches of a small pass cost more than its work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Tensor

from foretell.models.decoder import RowBatch
from foretell.models.gpt2 import GPT2
from foretell.models.llama import Llama
from foretell.passes.runner import PassOutput

BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Row counts that are recorded; a pass is padded to the next one."""

MAX_GRAPHS: Final = 24
"""Graphs kept at once; one is recorded for every bucket and number of visible slots that comes up."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, the buffers that it reads, and the outputs that it fills."""

    graph: torch.cuda.CUDAGraph
    batch: RowBatch
    hidden: Tensor
    logits: Tensor


class CudaGraphPasses:
    """A decoder's passes over one sequence, recorded on first use.

    A graph reads fixed addresses, so its key holds that of the sequence's keys and values: a region that moves is
    recorded anew.

    Args:
        model: the target, on a GPU; the angles of all `context_tokens` positions are computed now.
        context_tokens: positions that the passes must handle.
    """

    num_bytes = 0
    """Nothing is kept on disk."""

    def __init__(self, model: Llama | GPT2, context_tokens: int) -> None:
        assert model.device.type == "cuda"
        self._model = model
        self._graphs: OrderedDict[tuple[int, ...], _Recorded] = OrderedDict()
        model.reserve_positions(context_tokens)

    @property
    def buckets(self) -> Sequence[int]:
        """Recorded row counts, ascending."""
        return BUCKETS

    def num_rows(self, num_rows: int) -> int | None:
        """Return the smallest bucket that holds `num_rows`, None where there is none."""
        return next((bucket for bucket in BUCKETS if bucket >= num_rows), None)

    def __call__(self, batch: RowBatch, region: Tensor) -> PassOutput:
        """Run a batch of one sequence whose rows fill a bucket; the output is overwritten by the next call."""
        assert batch.bias is not None
        num_slots = batch.bias.shape[-1]
        has_embeddings = batch.embeddings is not None
        key = (batch.num_rows, num_slots, has_embeddings, region.data_ptr(), *region.stride())
        recorded = self._graphs.pop(key, None) or self._record(batch, region[:, :, :, :num_slots])
        self._graphs[key] = recorded  # last used last
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        for name in _tensor_fields(batch):
            getattr(recorded.batch, name).copy_(getattr(batch, name))
        recorded.graph.replay()
        return PassOutput((recorded.hidden,), (recorded.logits,))

    def _record(self, batch: RowBatch, visible: Tensor) -> _Recorded:
        static = replace(batch, **{name: getattr(batch, name).clone() for name in _tensor_fields(batch)})
        layers = visible.unbind(0)  # [1, 2 * G, S, D] each
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate their workspaces on a first run, outside the graph
            self._model.logits(self._model.forward(static, layers))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = self._model.forward(static, layers)  # [N, E]
            logits = self._model.logits(hidden)  # [N, V]
        return _Recorded(graph, static, hidden, logits)


def _tensor_fields(batch: RowBatch) -> list[str]:
    return [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
