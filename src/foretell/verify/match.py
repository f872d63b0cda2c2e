"""The acceptance rule: draw the target's own token at a node, and descend while a child carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.tree.pack import PackedTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of a tree."""

    accepted: list[int]
    """Rows of the accepted path below the root, in order."""
    last_token: int
    """The token drawn at the end of that path, which no child carried."""


def match(tree: PackedTree, choose: Callable[[int, list[int]], int]) -> Verdict:
    """Walk from the root along the target's own choices.

    Exact for any tree and any drafter, greedy or sampling, because every emitted token is the target's draw given
    the tokens before it. Only visited rows are looked at.

    Args:
        tree: rows in canonical order.
        choose: given a row and the token ids from the root's child to that row, returns the target's next token.

    Cost: one choice per emitted token.
    Source: "naive sampling" of SpecInfer, arXiv:2305.09781; keyed noise makes it drafter-invariant, arXiv:2408.07978.
    """
    row, accepted, path = 0, [], []  # type: int, list[int], list[int]
    while True:
        token_id = choose(row, path)
        child = tree.children[row].get(token_id)
        if child is None:
            return Verdict(accepted, token_id)
        row = child
        accepted.append(row)
        path.append(token_id)
