"""Traversal verification: test whole paths, the deepest first, and take the longest one that stands."""

from __future__ import annotations

from foretell.tree.pack import PackedTree
from foretell.verify.chance import Chance
from foretell.verify.match import Verdict
from foretell.verify.residual import NO_MASS, LawOf, Residual, drawn_children


def verify_traversal(tree: PackedTree, law_of: LawOf, chance: Chance) -> Verdict:
    """Walk down along first children to a leaf, and back up until a node is accepted; go down again at every sibling.

    A node's weight is its path's probability under the target over that under the draft, cut at 1 at every step; a node
    without further children is accepted with that probability. A rejected one is taken out, and its parent's law and
    weight are what it left of them. A token that fails by itself can so be accepted for what follows it. The output
    follows the target's law. With one seed it repeats only as long as the drafts do, as under `verify_rejection`.

    Args:
        tree: rows in canonical order, all children drawn.
        law_of: called at most once for each row; also for rows that are not accepted in the end.
        chance: one number for each node that is tested, and one for the last token.

    Raises:
        ConfigError: a node has children that were not drawn.

    Cost: up to one law per row; tests cost what they cost in `verify_rejection`.
    Source: traversal verification, arXiv:2505.12398; with one child a node it is block verification, arXiv:2403.10444.
    """
    path = [_Node(tree, law_of, 0, [], 1.0)]
    while True:
        node = path[-1]
        child = node.next_child()
        if child is not None:
            path.append(child)
        elif len(path) == 1 or chance.accepts(node.weight, 1.0):
            return Verdict([visited.row for visited in path[1:]], node.residual.draw(chance))
        else:
            path.pop()
            path[-1].reject_child()


class _Node:
    """A node on the path that is being tested. Its law is asked for where a child or the last token needs it."""

    def __init__(
        self, tree: PackedTree, law_of: LawOf, row: int, path: list[int], weight: float, *, is_repeated: bool = False
    ) -> None:
        """`is_repeated`: its token was drawn at the same node before, and what lies below was tested with that draw."""
        self.row, self.weight = row, weight
        self._tree, self._law_of, self._path = tree, law_of, path
        self._draws = None if is_repeated else drawn_children(tree, row)
        self._num_rejected = 0
        self._residual: Residual | None = None

    @property
    def residual(self) -> Residual:
        if self._residual is None:
            self._residual = Residual(self._law_of(self.row, self._path), self._draws)
        return self._residual

    def next_child(self) -> _Node | None:
        """Return the first child that was not taken out; None where none is left, or none could be accepted."""
        if self._draws is None or self._num_rejected == len(self._draws.ids) or self.weight == 0.0:
            return None
        token_id = self._draws.ids[self._num_rejected]
        ratio = self.residual.target_prob(token_id) / self.residual.draft_prob(token_id)
        return _Node(
            self._tree,
            self._law_of,
            self._tree.children[self.row][token_id],
            [*self._path, token_id],
            min(self.weight * ratio, 1.0),  # in this order NaN stays NaN, and is never accepted
            is_repeated=token_id in self._draws.ids[: self._num_rejected],
        )

    def reject_child(self) -> None:
        """Take the first child out."""
        assert self._draws is not None
        mass = self.residual.reject(self._draws.ids[self._num_rejected], self.weight)
        self._num_rejected += 1
        rejected = mass + 1.0 - self.weight
        if rejected > NO_MASS:  # else the laws are equal, and the child failed only by rounding
            self.weight = mass / rejected
