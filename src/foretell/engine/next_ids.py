"""Ask the target what it would say after each token of its vocabulary, for drafters that need no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from foretell.cache.kv_cache import Region
from foretell.drafters.next_ids import NextIds, id_dtype
from foretell.errors import CapacityError
from foretell.passes.rows import Rows
from foretell.passes.runner import Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

HEAD_ROWS: Final = 64
"""Rows whose logits exist at once: 64 MiB in float32 where the vocabulary has 256k tokens."""


@torch.inference_mode()
def build_next_ids(
    runner: Runner,
    *,
    prefixes: Sequence[Sequence[int]],
    num_ids_kept: int = 4,
    batch_rows: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> NextIds:
    """Return for every token id the target's most likely next ids after fixed prefixes and that token.

    Each token is a row of its own behind a prefix, which it alone sees besides itself. Ids are ranked by the sum of
    their log-probabilities over the prefixes: what the token asks for stays, what one prefix asks for averages out.
    Nothing is trained and no text is read: the table holds the target's own predictions. Passes are eager, whatever
    the runner has compiled.

    Args:
        runner: the target; its context must hold the longest prefix and one more token.
        prefixes: what comes before every token; at least one, which may be empty.
        num_ids_kept: ids per token, K.
        batch_rows: tokens of a pass; fewer where the cache's longest region has less room.
        progress: called after each batch with the number of tokens done and the vocabulary's size.

    Returns:
        [V, K], best first.

    Raises:
        CapacityError: a prefix does not fit the context.

    Cost: for each prefix one prefill of the vocabulary: 49,152 tokens take a 135M model two minutes on one core.
    """
    longest, limit = max(map(len, prefixes)), runner.context_tokens
    if longest + 1 > limit:
        raise CapacityError(f"the prefix has {longest} tokens, the context holds {limit}: take a longer context")
    vocab_size, cache = runner.model.config.vocab_size, runner.cache
    num_rows = min(batch_rows, cache.shape.max_slots - longest)
    table = np.empty((vocab_size, num_ids_kept), dtype=id_dtype(vocab_size))  # [V, K]
    regions: list[Region] = []
    try:
        for prefix_ids in prefixes:
            regions.append(cache.allocate(longest + num_rows))
            if prefix_ids:
                runner.prefill(Rows.chain(regions[-1], prefix_ids))
        for start in range(0, vocab_size, num_rows):
            token_ids = range(start, min(start + num_rows, vocab_size))
            table[start : token_ids.stop] = _likeliest(runner, regions, token_ids, num_ids_kept)
            if progress is not None:
                progress(token_ids.stop, vocab_size)
    finally:
        for region in regions:
            cache.free(region)
    return table


def _likeliest(
    runner: Runner, regions: Sequence[Region], token_ids: Sequence[int], num_ids_kept: int
) -> NDArray[np.int64]:
    """Return the likeliest next ids [N, K] of tokens over all prefixes."""
    hidden = [torch.split(_siblings(runner, region, token_ids), HEAD_ROWS) for region in regions]
    vocab_size = runner.model.config.vocab_size
    ranked = []
    for rows in zip(*hidden, strict=True):  # [64, E] for each prefix
        # A row's log-probabilities are its logits less one number, which does not change the ranking of a sum.
        logits = runner.model.logits(rows[0]).float()  # [64, V]
        for others in rows[1:]:
            logits += runner.model.logits(others)
        ranked.append(logits[:, :vocab_size].topk(num_ids_kept).indices)  # [64, K]
    return torch.cat(ranked).cpu().numpy()


def _siblings(runner: Runner, region: Region, token_ids: Sequence[int]) -> Tensor:
    """Return the hidden states [N, E] of tokens below a region's last one, and leave the region as it was."""
    num_rows, length = len(token_ids), region.length
    rows = Rows(region, token_ids, [0] * num_rows, np.eye(num_rows, dtype=np.bool_))
    hidden = runner.prefill(rows)
    runner.cache.truncate(region, length)
    return hidden
