"""Prompt tokens behind the nodes of a tree: which rows they are, and who sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretell.tree.pack import PromptIds, pack
from foretell.tree.shape import prune
from foretell.tree.token_tree import TokenTree

VOCAB_SIZE = 50


@st.composite
def drafts(draw: Any) -> TokenTree:
    """Draw a tree whose nodes are distinct tokens."""
    tree = TokenTree.root(0)
    for token_id in range(1, 1 + draw(st.integers(0, 8))):
        parent = draw(st.integers(0, len(tree) - 1))
        tree.add(parent, token_id, tree.log_accept[parent] - draw(st.sampled_from([0.0, 0.1, 0.7])), "a")
    return tree


@given(drafts(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_chains_ride_behind_all_nodes_and_nobody_sees_them(
    tree: TokenTree, num_slots: int, num_chains: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(st.integers(0, num_slots), min_size=len(tree), max_size=len(tree)))
    bare, packed = pack(tree), pack(tree, wanted, PromptIds(VOCAB_SIZE, num_slots, num_chains))
    size = len(bare)
    assert packed.num_nodes == size
    for name in ("token_ids", "parents", "depths"):
        assert getattr(packed, name)[:size] == getattr(bare, name)
    for name in ("children", "chain_length", "sources", "log_accept"):
        assert getattr(packed, name) == getattr(bare, name)
    mask = packed.mask()
    assert (mask[:size, :size] == bare.mask()).all()
    assert not mask[:size, size:].any()
    first = size
    for row, node in enumerate(packed.token_ids[:size]):  # a node's token is its number
        if wanted[node] == 0:
            assert row not in packed.prompts
            continue
        rows = packed.prompts[row]
        assert (rows.start, len(rows)) == (first, num_chains * wanted[node])
        first = rows.stop
        for place, prompt in enumerate(rows):
            chain, slot = divmod(place, wanted[node])
            assert packed.token_ids[prompt] == VOCAB_SIZE + chain * num_slots + slot
            assert packed.depths[prompt] == packed.depths[row] + 1 + slot
            seen = {*np.flatnonzero(mask[row]), *range(prompt - slot, prompt + 1)}
            assert set(np.flatnonzero(mask[prompt])) == seen
    assert first == len(packed) == len(packed.token_ids) == len(packed.parents) == len(packed.depths)


def test_two_chains_behind_two_nodes() -> None:
    tree = TokenTree.chain([7, 8], [0.0, -0.1], "a")
    packed = pack(tree, [2, 1], PromptIds(VOCAB_SIZE, 2, 2))
    assert packed.token_ids == [7, 8, 50, 51, 52, 53, 50, 52]
    assert packed.parents == [-1, 0, 0, 2, 0, 4, 1, 1]
    assert packed.depths == [0, 1, 1, 2, 1, 2, 2, 2]
    assert packed.prompts == {0: range(2, 6), 1: range(6, 8)}


def test_without_prompt_tokens_rows_are_the_nodes() -> None:
    tree = prune(TokenTree.chain([7, 8, 9], [0.0, -0.1, -0.2], "a"), 2)
    assert len(pack(tree, [0, 0], PromptIds(VOCAB_SIZE, 2))) == len(pack(tree)) == 2
