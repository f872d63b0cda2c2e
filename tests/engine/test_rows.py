"""The rows of a pass: each computes what it would alone on its own path, and leaves what a prefill would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.cache.kv_cache import BLOCK
from foretell.params import SamplingParams
from foretell.passes.rows import Rows, visible_slots
from foretell.passes.runner import Runner
from foretell.tree.pack import PackedTree, pack
from foretell.tree.token_tree import TokenTree

ATOL = 1e-10


def random_tree(seed: int, size: int) -> PackedTree:
    draw = random.Random(seed)
    tree = TokenTree.root(draw.randrange(64))
    deepen = draw.random()
    while len(tree) < size:
        parent = len(tree) - 1 if draw.random() < deepen else draw.randrange(len(tree))
        token_id = draw.randrange(64)
        if token_id not in tree.children()[parent]:
            tree.add(parent, token_id, tree.log_accept[parent] - draw.choice((0.0, 0.1, 1.0)), "random")
    return pack(tree)


def tree_rows(region: Any, tree: PackedTree) -> Rows:
    return Rows(region, tree.token_ids, tree.depths, tree.mask())


def path_to(tree: PackedTree, row: int) -> list[int]:
    path = [row]
    while tree.parents[path[-1]] >= 0:
        path.append(tree.parents[path[-1]])
    return [tree.token_ids[each] for each in path[::-1]]


def prefilled(runner: Runner, token_ids: list[int]) -> Any:
    region = runner.cache.allocate(len(token_ids) + 80)
    if token_ids:
        runner.prefill(Rows.chain(region, token_ids))
    return region


def slots_of(region: Any, start: int = 0) -> Tensor:
    """Return a region's committed slots [L, 2 * G, T, D]."""
    slots: Tensor = region.pool.tensor[:, region.index, :, start : region.length]
    return slots


@pytest.mark.parametrize("num_committed", [0, 3, 20, 505])
def test_a_row_sees_its_path_and_nothing_else(family_lab: Any, num_committed: int) -> None:
    """sglang-jax#1188: no row sees a sibling, and the root none of its descendants; windows count positions."""
    runner = Runner(family_lab.model, 2048)
    committed = family_lab.prompt(1, num_committed)
    for seed in range(3):
        tree = random_tree(seed, 14)
        region = prefilled(runner, committed)
        output = runner.decode([tree_rows(region, tree)])
        runner.cache.free(region)
        for row in range(len(tree)):
            alone = prefilled(runner, committed)
            path = path_to(tree, row)
            expected = runner.decode([Rows.chain(alone, path)])
            runner.cache.free(alone)
            torch.testing.assert_close(output.hidden[0][row], expected.hidden[0][len(path) - 1], atol=ATOL, rtol=0)
            torch.testing.assert_close(output.logits[0][row], expected.logits[0][len(path) - 1], atol=ATOL, rtol=0)


@pytest.mark.parametrize("policy", ["canonical", "copy"])
def test_the_cache_after_a_commit_is_that_of_a_fresh_prefill(family_lab: Any, policy: Any) -> None:
    """transformers#30042, #30413: positions and slots of accepted tokens are where plain decoding puts them."""
    prompt = family_lab.prompt(2, 500)  # the output crosses a block of slots
    truth = family_lab.decode(None, prompt)
    engine = family_lab.engine(policy)
    for drafter in ("RandomTrees", "Sideways"):
        sequence = engine.start(family_lab.request(prompt, getattr(family_lab, drafter)(truth, 3)))
        while not sequence.is_finished:
            engine.step([sequence])
            fresh = prefilled(engine.runner, sequence.token_ids[:-1])
            assert fresh.length == sequence.region.length
            torch.testing.assert_close(slots_of(sequence.region), slots_of(fresh), atol=ATOL, rtol=0)
            engine.runner.cache.free(fresh)
        engine.finish(sequence)


def test_prefill_in_chunks_is_prefill_at_once(family_lab: Any) -> None:
    prompt = family_lab.prompt(3, 700)
    engine = family_lab.engine()
    sequence = engine.start(family_lab.request(prompt))  # chunks of 256 rows
    whole = prefilled(engine.runner, prompt[:-1])
    torch.testing.assert_close(slots_of(sequence.region), slots_of(whole), atol=ATOL, rtol=0)


@pytest.mark.parametrize("lengths", [(3, 3), (1, 40, 7), (505, 3, 250)])
def test_sequences_in_one_pass_do_not_see_each_other(family_lab: Any, lengths: tuple[int, ...]) -> None:
    """Padding rows of the shorter trees write nothing that anyone sees."""
    runner = Runner(family_lab.model, 900)
    committed = [family_lab.prompt(seed, size) for seed, size in enumerate(lengths)]
    trees = [random_tree(seed, size) for seed, size in enumerate((9, 1, 5)[: len(lengths)])]
    regions = []
    for token_ids in committed:
        region = runner.cache.allocate(900)
        runner.prefill(Rows.chain(region, token_ids))
        regions.append(region)
    before = [slots_of(region).clone() for region in regions]
    output = runner.decode([tree_rows(region, tree) for region, tree in zip(regions, trees, strict=True)])
    assert all(torch.equal(slots_of(region), slots) for region, slots in zip(regions, before, strict=True))
    for index, (region, tree) in enumerate(zip(regions, trees, strict=True)):
        alone = runner.decode([tree_rows(region, tree)])
        size = len(tree)
        torch.testing.assert_close(output.logits[index][:size], alone.logits[0][:size], atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("sizes", "num_runs"), [((1, 1, 1, 1), 1), ((1, 1, 12, 1), 3), ((3, 12, 12, 2), 1), ((30, 1, 1, 1, 1), 2)]
)
def test_unequal_sequences_are_padded_for_attention_alone(
    family_lab: Any, sizes: tuple[int, ...], num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, batches = Runner(family_lab.model, 900), []
    regions = [runner.cache.allocate(900) for _ in sizes]
    for seed, region in enumerate(regions):
        runner.prefill(Rows.chain(region, family_lab.prompt(seed, 40 + 130 * seed)))
    trees = [random_tree(seed, size) for seed, size in enumerate(sizes)]
    forward = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda batch, slots: (batches.append(batch), forward(batch, slots))[1])
    output = runner.decode([tree_rows(region, tree) for region, tree in zip(regions, trees, strict=True)])
    if len(set(sizes)) > 1:
        assert batches[0].token_ids.shape == (1, sum(sizes))
        assert len(batches[0].runs) == num_runs
    for index, (region, tree) in enumerate(zip(regions, trees, strict=True)):
        alone = runner.decode([tree_rows(region, tree)])
        torch.testing.assert_close(output.logits[index], alone.logits[0], atol=ATOL, rtol=0)
        assert len(output.hidden[index]) == len(tree)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (12, 2, 1, 1, 1)])
def test_prompt_tokens_see_their_prefix_among_unequal_sequences(family_lab: Any, sizes: tuple[int, ...]) -> None:
    runner, vocab_size = Runner(family_lab.model, 900), family_lab.VOCAB_SIZE
    config = runner.model.config
    draw = torch.Generator().manual_seed(0)
    shape = (config.num_layers, 2 * config.num_kv_heads, 3, config.head_dim)
    runner.prompt_prefix = torch.randn(shape, generator=draw, dtype=runner.model.dtype)
    runner.prompt_embeddings = torch.randn(2, config.hidden_size, generator=draw, dtype=runner.model.dtype)
    regions = [runner.cache.allocate(900) for _ in sizes]
    for seed, region in enumerate(regions):
        runner.prefill(Rows.chain(region, family_lab.prompt(seed, 5 + 40 * seed)))
        region.pool.tensor[:, region.index, :, region.length :] = 100.0  # whatever an earlier pass left there
    rows = [
        Rows.chain(region, [*range(5, 5 + size), vocab_size, vocab_size + 1][: size + index % 3])
        for index, (region, size) in enumerate(zip(regions, sizes, strict=True))
    ]
    together = runner.decode(rows)
    for index, each in enumerate(rows):
        alone = runner.decode([each])
        num_rows = len(each.token_ids)
        torch.testing.assert_close(together.logits[index][:num_rows], alone.logits[0][:num_rows], atol=ATOL, rtol=0)


def test_stale_slots_are_of_no_consequence(lab: Any) -> None:
    """Rows that were not accepted stay behind in the region; no later row reads them."""
    runner = Runner(lab.model, 600)
    region = prefilled(runner, lab.prompt(1, 6))
    clean = runner.decode([Rows.chain(region, [9])]).logits[0][0].clone()
    runner.decode([tree_rows(region, random_tree(0, 30))])
    assert torch.equal(runner.decode([Rows.chain(region, [9])]).logits[0][0], clean)


def test_chain_rows() -> None:
    rows = Rows.chain(None, [4, 5, 6])  # type: ignore[arg-type]
    assert list(rows.depths) == [0, 1, 2]
    assert np.array_equal(rows.mask, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


def test_visible_slots_hold_all_and_end_within_the_block() -> None:
    visible = [visible_slots(num_slots) for num_slots in range(1, 3 * BLOCK + 1)]
    assert visible == sorted(visible)
    for num_slots, size in enumerate(visible, start=1):
        assert num_slots <= size <= -(-num_slots // BLOCK) * BLOCK


@pytest.mark.parametrize("edge", [512, 1024])
@pytest.mark.parametrize("policy", ["canonical", "copy"])
def test_growth_across_a_capacity(lab: Any, policy: Any, edge: int) -> None:
    """A region that is full moves to a larger pool, drafts and all."""
    params = SamplingParams(max_new_tokens=40)
    prompt = lab.prompt(5, edge - 64 - 20)  # the pass keeps room for 64 rows
    truth = lab.decode(None, prompt, params)
    for drafter in ("Oracle", "RandomTrees"):
        engine = lab.engine(policy)
        sequence = engine.start(lab.request(prompt, getattr(lab, drafter)(truth, 1), params))
        assert sequence.region.capacity == edge
        while not sequence.is_finished:
            engine.step([sequence])
        assert sequence.region.capacity == 2 * edge
        assert sequence.token_ids == truth
        engine.finish(sequence)
        assert engine.runner.cache.num_bytes == 0


def test_window_beyond_the_first_block(make_lab: Callable[..., Any]) -> None:
    """transformers#48280, #46629: sliding layers skip blocks that lie outside the window, and lose nothing in it."""
    lab = make_lab("mistral", sliding_window=520)
    prompt = lab.prompt(6, 1040)
    truth = lab.decode(None, prompt)
    assert lab.decode(lab.RandomTrees(truth, 2), prompt) == truth
    whole = make_lab("mistral", sliding_window=4096)
    assert lab.decode(None, prompt[-200:]) == whole.decode(None, prompt[-200:])
    assert truth != whole.decode(None, prompt)
