"""The table of likely next ids against one plain pass per token and prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foretell.engine import next_ids
from foretell.engine.next_ids import build_next_ids
from foretell.errors import CapacityError
from foretell.passes.rows import Rows
from foretell.passes.runner import MAX_ROWS, Runner

PREFIXES = {"none": [[]], "one": [[5, 9, 11]], "two": [[5, 9, 11], [7]], "with none": [[], [3, 4, 8, 8, 2, 60]]}


def naive(lab: Any, prefixes: Sequence[Sequence[int]], num_ids_kept: int) -> list[list[int]]:
    """Decode every token behind every prefix in a pass of its own."""
    runner, table = Runner(lab.model, 512), []
    for token_id in range(lab.VOCAB_SIZE):
        total = torch.zeros(lab.VOCAB_SIZE, dtype=torch.float64)
        for prefix_ids in prefixes:
            region = runner.cache.allocate(MAX_ROWS)
            text = [*prefix_ids, token_id]
            logits = runner.decode([Rows.chain(region, text)]).logits[0][len(text) - 1]  # [V]
            total += logits.double().log_softmax(-1)
            runner.cache.free(region)
        table.append(total.topk(num_ids_kept).indices.tolist())
    return table


@pytest.mark.parametrize("prefixes", PREFIXES.values(), ids=PREFIXES)
def test_the_table_is_what_plain_passes_say(family_lab: Any, prefixes: list[list[int]]) -> None:
    table = build_next_ids(Runner(family_lab.model, 512), prefixes=prefixes, num_ids_kept=3, batch_rows=24)
    assert (table.dtype, table.shape) == (np.uint16, (family_lab.VOCAB_SIZE, 3))
    assert table.tolist() == naive(family_lab, prefixes, 3)


@pytest.mark.parametrize("batch_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("head_rows", [3, 64])
def test_batches_do_not_matter(lab: Any, monkeypatch: pytest.MonkeyPatch, batch_rows: int, head_rows: int) -> None:
    monkeypatch.setattr(next_ids, "HEAD_ROWS", head_rows)
    table = build_next_ids(Runner(lab.model, 512), prefixes=[[5, 9]], num_ids_kept=8, batch_rows=batch_rows)
    assert table.tolist() == naive(lab, [[5, 9]], 8)


def test_progress_is_told_and_the_cache_left_empty(lab: Any) -> None:
    runner, calls = Runner(lab.model, 512), []
    build_next_ids(runner, prefixes=[[5], []], batch_rows=30, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(30, 64), (60, 64), (64, 64)]
    assert runner.cache.num_bytes == 0


def test_an_interrupted_build_leaves_the_cache_empty(lab: Any) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    runner = Runner(lab.model, 512)
    with pytest.raises(KeyboardInterrupt):
        build_next_ids(runner, prefixes=[[5]], progress=interrupt)
    assert runner.cache.num_bytes == 0


def test_a_context_that_holds_prefix_and_token_is_enough(make_lab: Callable[..., Any]) -> None:
    lab = make_lab(max_position_embeddings=4)
    table = build_next_ids(Runner(lab.model, 4), prefixes=[[5, 9, 11]], num_ids_kept=2)
    assert len(table) == lab.VOCAB_SIZE
    with pytest.raises(CapacityError, match="the prefix has 4 tokens, the context holds 4"):
        build_next_ids(Runner(lab.model, 4), prefixes=[[1], [5, 9, 11, 3]])


def test_compiled_passes_are_not_used(lab: Any) -> None:
    class Refusing:
        def num_rows(self, num_rows: int) -> int | None:
            raise AssertionError

        def __call__(self, *args: Any) -> Any:
            raise AssertionError

    table = build_next_ids(Runner(lab.model, 512, Refusing()), prefixes=[[5, 9]], num_ids_kept=4)
    assert table.tolist() == naive(lab, [[5, 9]], 4)
