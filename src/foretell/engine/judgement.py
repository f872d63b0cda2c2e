"""Ask the target what it says of a draft, by the rule of the request."""

from __future__ import annotations

from torch import Tensor

from foretell.engine.sequence import DecodingSequence
from foretell.tree.pack import PackedTree
from foretell.verify.match import Verdict, match
from foretell.verify.processors import Law


def verify(sequence: DecodingSequence, tree: PackedTree, logits: Tensor) -> Verdict:
    """Return what the target says of a tree.

    Args:
        sequence: where the tree hangs.
        tree: rows in canonical order.
        logits: of the tree's rows, [N, V] or wider.

    Raises:
        NumericsError: a row that was looked at holds NaN or +inf, or no token is left to choose from.
    """
    context, request, rule = sequence.token_ids, sequence.request, sequence.request.rule

    # Nothing is emitted after an end, so no processor is asked (vllm#44006).
    def choose(row: int, path: list[int]) -> int:
        if path and path[-1] in request.stop_ids:
            return path[-1]
        return request.chooser.choose(logits[row], context + path if path else context)

    if rule is None:
        return match(tree, choose)
    law = rule.law

    def law_of(row: int, path: list[int]) -> Law:
        if path and path[-1] in request.stop_ids:
            return Law.certain(path[-1])
        return law(logits[row], context + path if path else context)

    return rule(tree, law_of, len(context))
