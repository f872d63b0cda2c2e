"""Lay a tree out as the rows of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foretell.tree.draws import Draws
from foretell.tree.shape import best_first
from foretell.tree.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A tree's nodes as rows in canonical order: the first chain, then every other node, parents first, best first.

    Row 0 is the root; rows `0 .. chain_length - 1` are each the child of the row before.
    """

    token_ids: list[int]
    parents: list[int]
    """Row of the parent; -1 for the root, always smaller than the row itself."""
    depths: list[int]
    """Distance from the root: a row's position is the root's plus this."""
    chain_length: int
    """Rows of the first chain, root included."""
    children: list[dict[int, int]]
    """For each row its children as `{token id: row}`."""
    sources: list[str]
    log_accept: list[float]
    draws: dict[int, Draws] | None = None
    """For each row whose children were drawn, how; None where none were."""
    prompts: dict[int, range] = field(default_factory=dict)
    """For each row with prompt tokens behind it the rows of those: chain after chain, each slot after slot."""

    @property
    def num_nodes(self) -> int:
        """Rows that are nodes of the tree; prompt tokens come after them."""
        return len(self.sources)

    def __len__(self) -> int:
        return len(self.token_ids)

    def mask(self) -> NDArray[np.bool_]:
        """Return bool [N, N]: row i sees column j iff j is i or an ancestor of i."""
        return unpack_bits(ancestor_bits(self.parents), len(self.parents))


@dataclass(frozen=True, slots=True)
class PromptIds:
    """Ids of prompt tokens: they follow the vocabulary, so that no choice of the target's meets one."""

    first_id: int
    num_slots: int
    """Prompt tokens of a chain, m."""
    num_chains: int = 1
    """Chains behind a node: an ensemble, whose guesses are averaged."""


def pack(tree: TokenTree, num_prompts: Sequence[int] = (), ids: PromptIds | None = None) -> PackedTree:
    """Return the rows of `tree` in canonical order, and behind them the prompt tokens of each node, if any.

    The first chain starts at the root and goes on to the most likely child until a leaf; of equals, the one added
    first. Tokens that are already accepted but have to be computed again come in with `log_accept` 0: no other node can
    exceed that, so they lead the chain as long as they were added before any other certain node.

    `num_prompts` are for each node how many prompt tokens follow it in every chain, and `ids` what they are called; no
    row but those behind them sees them (arXiv:2405.18628 §3.1).

    Rows of the first chain commit by raising the cache's length, so the more of a path lies in it the less is copied or
    computed again.
    """
    order = _canonical_order(tree)
    token_ids = [tree.token_ids[node] for node in order.nodes]
    rows = [0] * len(order.nodes)
    for row, node in enumerate(order.nodes):
        rows[node] = row
    parents, depths = [-1], [0]
    children: list[dict[int, int]] = [{} for _ in token_ids]
    for row in range(1, len(token_ids)):
        parent = rows[tree.parents[order.nodes[row]]]
        parents.append(parent)
        depths.append(depths[parent] + 1)
        children[parent][token_ids[row]] = row
    packed = PackedTree(
        token_ids,
        parents,
        depths,
        order.chain_length,
        children,
        [tree.sources[node] for node in order.nodes],
        [tree.log_accept[node] for node in order.nodes],
        None if tree.draws is None else {rows[node]: draws for node, draws in tree.draws.items()},
    )
    return packed if ids is None else _add_prompts(packed, [num_prompts[node] for node in order.nodes], ids)


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """Return for each node the bits of itself and its ancestors; bit i is node i's, the root is node 0."""
    bits = [1]
    for node in range(1, len(parents)):
        bits.append(bits[parents[node]] | 1 << node)
    return bits


def unpack_bits(bits: Sequence[int], num_columns: int) -> NDArray[np.bool_]:
    """Return [N, M]: row i has column j iff bit j of `bits[i]` is set."""
    width = (num_columns + 7) // 8
    packed = np.frombuffer(b"".join([row.to_bytes(width, "little") for row in bits]), dtype=np.uint8)
    columns = np.unpackbits(packed.reshape(len(bits), width), axis=1, count=num_columns, bitorder="little")  # [N, M]
    return columns.view(np.bool_)


@dataclass(frozen=True, slots=True)
class _CanonicalOrder:
    nodes: list[int]
    chain_length: int


def _canonical_order(tree: TokenTree) -> _CanonicalOrder:
    ranked = best_first(tree)
    best_child: dict[int, int] = {}
    for node in ranked:
        best_child.setdefault(tree.parents[node], node)
    chain = [0]
    while (child := best_child.get(chain[-1])) is not None:
        chain.append(child)
    in_chain = set(chain)
    return _CanonicalOrder(chain + [node for node in ranked if node not in in_chain], len(chain))


def _add_prompts(tree: PackedTree, num_prompts: Sequence[int], ids: PromptIds) -> PackedTree:
    """Return the rows of a tree and, behind them, chain by chain the prompt tokens of each row."""
    token_ids, parents, depths = list(tree.token_ids), list(tree.parents), list(tree.depths)
    prompts = {}
    for row, size in enumerate(num_prompts):
        if size == 0:
            continue
        prompts[row] = range(len(token_ids), len(token_ids) + ids.num_chains * size)
        for chain in range(ids.num_chains):
            parent = row
            for slot in range(size):
                token_ids.append(ids.first_id + chain * ids.num_slots + slot)
                parents.append(parent)
                depths.append(tree.depths[row] + 1 + slot)
                parent = len(token_ids) - 1
    return replace(tree, token_ids=token_ids, parents=parents, depths=depths, prompts=prompts)
