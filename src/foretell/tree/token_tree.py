"""A draft: a tree of tokens below the last committed token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.tree.draws import Draws


@dataclass(slots=True)
class TokenTree:
    """Candidate continuations, flat, parents before children.

    Node 0 is the root: the last committed token, whose keys and values are not in the cache yet.
    Invariants: `parents[0] == -1`, `parents[i] < i`, siblings carry distinct tokens,
    `log_accept[i] <= log_accept[parents[i]]`, `log_accept[0] == 0`.
    """

    token_ids: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    log_accept: list[float] = field(default_factory=lambda: [0.0])
    """Estimated log-probability that the whole path to the node is accepted."""
    sources: list[str] = field(default_factory=lambda: [""])
    """Name of the drafter that proposed the node; "" for the root."""
    draws: dict[int, Draws] | None = None
    """For each node whose children were drawn, how; None where none were. `add` knows nothing of it."""
    num_prompts: list[int] | None = None
    """Prompt tokens behind each node where the drafter has settled them, and the nodes, itself; None leaves both to the
    engine. Trees made of this one know nothing of it."""

    @classmethod
    def root(cls, token_id: int) -> TokenTree:
        """Return the tree of one node: plain decoding."""
        return cls([token_id])

    @classmethod
    def chain(cls, token_ids: Sequence[int], log_accept: Sequence[float], source: str) -> TokenTree:
        """Return a tree without branches; `token_ids[0]` is the root, `log_accept` is cumulative and starts with 0."""
        assert len(token_ids) == len(log_accept) >= 1
        assert log_accept[0] == 0.0
        size = len(token_ids)
        return cls(list(token_ids), list(range(-1, size - 1)), list(log_accept), ["", *[source] * (size - 1)])

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, log_accept: float, source: str) -> int:
        """Append a node and return its index. `log_accept` is that of the whole path."""
        assert 0 <= parent < len(self.token_ids)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.log_accept.append(min(log_accept, self.log_accept[parent]))
        self.sources.append(source)
        return len(self.token_ids) - 1

    def depths(self) -> list[int]:
        """Return each node's distance from the root."""
        return depths(self.parents)

    def children(self) -> list[dict[int, int]]:
        """Return for each node its children as `{token id: node}`."""
        children: list[dict[int, int]] = [{} for _ in self.token_ids]
        for node in range(1, len(self)):
            children[self.parents[node]][self.token_ids[node]] = node
        return children

    def path(self, node: int) -> list[int]:
        """Return the node indices from the root's child to `node`; empty for the root."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


def depths(parents: Sequence[int]) -> list[int]:
    """Return the distance from the root of each node, given its parent's index; the root comes first."""
    distances = [0]
    for node in range(1, len(parents)):
        distances.append(distances[parents[node]] + 1)
    return distances
