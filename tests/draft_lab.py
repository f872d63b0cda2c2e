"""Random draft models in float64, a clock, a drafter that guesses, and what a draft must be worth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from foretell.drafters.calibration import Calibration
from foretell.drafters.draft import DraftModelDrafter
from foretell.drafters.draft_engine import DraftEngine
from foretell.drafters.drafter import Drafter, Outcome, Proposal, TableDrafter
from foretell.drafters.expansion import TreeShape
from foretell.drafters.grow import MAX_PROBABILITY
from foretell.models.draft import DraftModel
from foretell.passes.rows import Rows
from foretell.passes.runner import Runner
from foretell.tree.token_tree import TokenTree
from tiny import draft_body

VOCAB_SIZE, HIDDEN, EOS = 24, 16, 5
KEPT = np.array([0, 1, 3, 4, 5, 6, 8, 9, 11, 12, 15, 17, 20, 23])
CPU = torch.device("cpu")
CHAIN = TreeShape(max_children=1, max_width=1)
CONFIG = draft_body(vocab_size=VOCAB_SIZE, num_layers=2)


def draft_model(kind: str = "lm", seed: int = 0) -> DraftModel:
    """Return a random draft in float64, sure enough of itself that its trees are deep."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5

    tensors = {"model.embed_tokens.weight": draw(VOCAB_SIZE, HIDDEN), "lm_head.weight": draw(len(KEPT), HIDDEN) * 3}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
    for layer in range(CONFIG.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (("q", 16, 16), ("k", 8, 16), ("v", 8, 16), ("o", 16, 16)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = draw(rows, columns)
        for name, rows, columns in (("gate", 24, 16), ("up", 24, 16), ("down", 16, 24)):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = draw(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
    if kind == "feature":
        tensors |= {"fuse.weight": draw(HIDDEN, 2 * HIDDEN), "no_feature": draw(HIDDEN)}
    return DraftModel(CONFIG, tensors, KEPT, torch.float64, CPU)


MODELS = {kind: draft_model(kind) for kind in ("lm", "feature")}


class Clock:
    """Shows the seconds that passes took, nothing else."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_rows: list[int] = []  # of each pass

    def __call__(self) -> float:
        return self.now_s


def engine(kind: str = "lm", context_tokens: int = 512, pass_s: float = 0.0) -> DraftEngine:
    """Return an engine whose passes take `pass_s` each, by a clock of its own."""
    clock = Clock()
    shared = DraftEngine(MODELS[kind], context_tokens, Calibration(), clock=clock)
    decode = shared.runner.decode

    def timed(sequences: Sequence[Rows]) -> Any:
        clock.now_s += pass_s
        clock.num_rows.append(len(sequences[0].token_ids))
        return decode(sequences)

    shared.runner.decode = timed  # type: ignore[method-assign]
    return shared


class Guesses(TableDrafter):
    """Proposes what a function makes of the text."""

    needs: frozenset[str] = frozenset()
    memory_bytes = 7

    def __init__(self, make: Callable[[list[int], TokenTree, Proposal], None], name: str = "guesses") -> None:
        self.name, self._make = name, make
        self.text: list[int] = []

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None:
        self.text = list(prompt_ids)

    def observe(self, outcome: Outcome) -> None:
        self.text.extend(outcome.token_ids)

    def propose(self, proposal: Proposal) -> TokenTree:
        tree = TokenTree.root(proposal.tip)
        self._make([*self.text, *proposal.ahead], tree, proposal)
        return tree

    def fork(self) -> Guesses:
        twin = Guesses(self._make, self.name)
        twin.text = self.text.copy()
        return twin


def wild(text: list[int], tree: TokenTree, proposal: Proposal) -> None:
    """Add anything at all, EOS and unknown ids among it."""
    draw, depths = random.Random(str(text)), [0]
    for _ in range(draw.randrange(20)):
        parent, token_id = draw.randrange(len(tree)), draw.randrange(VOCAB_SIZE)
        fits = depths[parent] < proposal.max_depth and len(tree) <= proposal.max_nodes
        if fits and token_id not in tree.children()[parent] and (parent == 0 or tree.token_ids[parent] != EOS):
            tree.add(parent, token_id, tree.log_accept[parent] - draw.random(), "wild")
            depths.append(depths[parent] + 1)


def foresee(shared: DraftEngine, hidden: Tensor | None = None) -> Callable[[list[int], TokenTree, Proposal], None]:
    """Return a function that adds the draft model's own greedy chain, as far as it is allowed."""

    def add(text: list[int], tree: TokenTree, proposal: Proposal) -> None:
        for _ in range(min(proposal.max_depth, proposal.max_nodes)):
            ((value, token_id),) = [best_choice(shared.model, text, hidden)]
            text = [*text, token_id]
            tree.add(len(tree) - 1, token_id, tree.log_accept[-1] + value, "oracle")

    return add


def states_of(text: Sequence[int]) -> Tensor:
    """Return what a target's hidden states might be, [T, E]: a function of the text up to each token."""
    rows = []
    for end in range(1, len(text) + 1):
        generator = torch.Generator().manual_seed(hash(tuple(text[:end])) % 2**31)
        rows.append(torch.randn(HIDDEN, generator=generator, dtype=torch.float64))
    return torch.stack(rows) if rows else torch.empty(0, HIDDEN, dtype=torch.float64)  # [T, E]


def run_alone(model: DraftModel, text: Sequence[int], hidden: Tensor | None) -> Tensor:
    """Return the log-probabilities after each token of a text in a cache of its own, [T, K]; the slow twin.

    `hidden`: states of the text's first tokens, [M, E].
    """
    runner = Runner(model, 512)
    region = runner.cache.allocate(len(text) + 64)
    features = None
    if model.no_feature is not None:
        features = model.no_feature.repeat(len(text), 1)  # [T, E]
        if hidden is not None:
            known = hidden[: len(text) - 1]  # [M, E]
            features[1 : 1 + len(known)] = known
    return runner.decode([Rows.chain(region, text, features)]).logits[0][: len(text)].log_softmax(-1)  # [T, K]


def best_choice(model: DraftModel, text: Sequence[int], hidden: Tensor | None) -> tuple[float, int]:
    log_probs = run_alone(model, text, hidden)[-1]  # [K]
    return float(log_probs.max()), int(KEPT[int(log_probs.argmax())])


def check_estimates(tree: TokenTree, model: DraftModel, text: list[int], hidden: Tensor | None) -> None:
    """Assert that the draft's nodes are estimated as their paths run alone are, and that siblings are its best."""
    for node in range(1, len(tree)):
        if not tree.sources[node].startswith("draft"):
            continue
        path = [tree.token_ids[each] for each in tree.path(node)]
        law = run_alone(model, [*text, *path[:-1]], hidden)[len(text) - 1 :]  # [D, K]
        columns = [int(np.searchsorted(KEPT, token_id)) for token_id in path]
        values = [min(float(law[depth, column]), math.log(MAX_PROBABILITY)) for depth, column in enumerate(columns)]
        assert tree.log_accept[node] == pytest.approx(sum(values), abs=1e-5)


def draft(drafter: Drafter, root: int, max_nodes: int = 15, max_depth: int = 8, **others: Any) -> TokenTree:
    return drafter.propose(Proposal(root=root, max_nodes=max_nodes, max_depth=max_depth, **others))


def begun(shared: DraftEngine, prompt: Sequence[int], **options: Any) -> DraftModelDrafter:
    drafter = DraftModelDrafter(shared, "d", eos_ids=options.pop("eos_ids", frozenset()), **options)
    drafter.begin(prompt, states_of(prompt)[:-1])
    return drafter


def observe(drafter: Drafter, text: list[int], new: Sequence[int], ahead: Sequence[int] = ()) -> None:
    """Tell what followed a text; extends it."""
    states = states_of([*text, *new, *ahead])
    size, end = len(text), len(text) + len(new)
    text.extend(new)
    drafter.observe(
        Outcome(new, hidden=states[size - 1 : end - 1], ahead_hidden=states[end - 1 : -1] if ahead else None)
    )


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.token_ids[i] for i in tree.path(node)): tree.log_accept[node] for node in range(1, len(tree))}


tokens = st.integers(0, VOCAB_SIZE - 1)
