"""The acceptance rules beside match, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from foretell.params import SamplingParams, Verification
from foretell.tree.pack import PackedTree
from foretell.verify.chance import Chance, KeyedChance
from foretell.verify.choose import TokenChooser
from foretell.verify.match import Verdict
from foretell.verify.processors import Law
from foretell.verify.rejection import verify_rejection
from foretell.verify.residual import LawOf
from foretell.verify.traversal import verify_traversal
from foretell.verify.typical import verify_typical

Verify = Callable[[PackedTree, LawOf, Chance], Verdict]

_RULES: Final[dict[Verification, Verify]] = {
    "rejection": verify_rejection,
    "traversal": verify_traversal,
    "typical": verify_typical,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule with the target's law and the key of its chance. Called, it verifies the draft of one step."""

    name: Verification
    law: Callable[[Tensor, Sequence[int]], Law]
    """Given logits [V] and the token ids before, the distribution that plain decoding draws from."""
    seed: int
    sequence_key: int

    @property
    def needs_draws(self) -> bool:
        """Whether it tests how children were drawn, so that deterministic ones are refused."""
        return self.name in ("rejection", "traversal")

    def __call__(self, tree: PackedTree, law_of: LawOf, position: int) -> Verdict:
        """Return what the target says of a tree; `position` is that of the step's first token."""
        return _RULES[self.name](tree, law_of, KeyedChance("verify", self.seed, self.sequence_key, position))

    def draft_chance(self, position: int) -> Chance:
        """Return the chance that the step's draft is drawn with."""
        return KeyedChance("draft", self.seed, self.sequence_key, position)


def make_rule(sampling: SamplingParams, chooser: TokenChooser, seed: int | None, sequence_key: int) -> Rule | None:
    """Return the rule that a request asks for; None where it is match, and for greedy, of which every rule is match.

    Args:
        sampling: its own `seed` is not read.
        chooser: of the same request.
        seed: key of the chance; None only when greedy.
        sequence_key: number of the sample or branch.
    """
    if sampling.verification == "match" or sampling.is_greedy:
        return None
    assert seed is not None
    return Rule(name=sampling.verification, law=chooser.law, seed=seed, sequence_key=sequence_key)
