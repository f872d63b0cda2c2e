"""The drafter that runs a draft model: every estimate against its path run alone, limits, stages, and when it stops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretell.drafters.calibration import Calibration
from foretell.drafters.catalog import DRAFTERS, MODEL_DRAFTERS, check_drafter_name, make_drafter
from foretell.drafters.choices import NoiseMemory, filter_scores, rank
from foretell.drafters.draft import DraftModelDrafter
from foretell.drafters.draft_engine import DraftEngine, PassTimes, StagePayoff
from foretell.drafters.drafter import Drafter, DraftSampling, Outcome, Proposal, TableDrafter
from foretell.drafters.expansion import TreeShape
from foretell.drafters.grow import MAX_PROBABILITY, MIN_PATH_PROBABILITY
from foretell.errors import ConfigError
from foretell.models.draft import DraftModel
from foretell.passes.rows import Rows
from foretell.passes.runner import MAX_ROWS, Runner
from foretell.tree.shape import positional_shape
from foretell.tree.token_tree import TokenTree
from foretell.verify.chance import KeyedChance
from foretell.verify.draws import DrawPlan
from foretell.verify.filters import keep_top_k, keep_top_p
from foretell.verify.noise import gumbel_noise_array
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
    return runner.decode([Rows.chain(region, text, features)]).logits[0, : len(text)].log_softmax(-1)  # [T, K]


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


# What is proposed


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["lm", "feature"]),
    st.sampled_from([TreeShape(), TreeShape(max_children=3, max_width=2), CHAIN]),
    st.sampled_from(["none", "inner", "beside", "both"]),
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(st.lists(tokens, max_size=4), max_size=3),
    st.data(),
)
def test_drafts_keep_within_limits_and_estimate_each_path_as_if_alone(
    kind: str, shape: TreeShape, helpers: str, prompt: list[int], chunks: list[list[int]], data: st.DataObject
) -> None:
    """Masks, positions, features, committed slots and the second stage all show in the estimates."""
    shared = engine(kind)
    named = {"none": (), "both": ("inner", "beside")}.get(helpers, (helpers,))
    drafter = begun(shared, prompt, eos_ids=frozenset({EOS}), shape=shape, **{name: Guesses(wild) for name in named})
    text = prompt.copy()
    for chunk in [[], *chunks]:
        ahead = data.draw(st.lists(tokens, max_size=2)) if chunk else []
        observe(drafter, text, chunk, ahead)
        limits = data.draw(st.integers(0, 18)), data.draw(st.integers(0, 6))
        pass_s = data.draw(st.sampled_from([(), [1.0] * 30, [1.0 + 0.1 * n for n in range(10)]]))
        proposal = Proposal(text[-1], *limits, ahead=tuple(ahead), pass_s=pass_s)
        tree = drafter.propose(proposal)
        assert tree.token_ids[0] == proposal.tip
        assert (tree.parents[0], tree.log_accept[0], tree.sources[0]) == (-1, 0.0, "")
        assert len(tree) <= limits[0] + 1
        assert max(tree.depths()) <= limits[1]
        assert len(paths(tree)) == len(tree) - 1, "siblings carry the same token"
        for node, parent in enumerate(tree.parents[1:], start=1):
            assert 0 <= parent < node
            assert tree.log_accept[node] < tree.log_accept[parent]
            assert parent == 0 or tree.token_ids[parent] != EOS
            if tree.sources[node].startswith("draft"):
                assert tree.token_ids[node] in KEPT
                assert "beside" in named or tree.log_accept[node] >= math.log(MIN_PATH_PROBABILITY)
            else:
                assert (tree.sources[node], "beside" in named) == ("wild", True)
        check_estimates(tree, shared.model, text + ahead, states_of(text + ahead)[:-1])
    drafter.close()
    assert shared.runner.cache.num_bytes == 0


@pytest.mark.parametrize("kind", ["lm", "feature"])
def test_the_best_nodes_of_all_are_proposed(kind: str) -> None:
    """Free passes read all that counts: no path outside the tree is likelier than one inside."""
    shared = engine(kind)
    drafter = begun(shared, [1, 2, 3])
    tree = draft(drafter, 3, max_nodes=12, max_depth=3, pass_s=[1.0] * 13)
    hidden, model, every = states_of([1, 2, 3])[:-1], shared.model, {}
    level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(3):
        following = []
        for path, value in level:
            law = run_alone(model, [1, 2, 3, *path], hidden)[-1].clamp(max=math.log(MAX_PROBABILITY)).tolist()
            following += [((*path, int(token_id)), value + law[column]) for column, token_id in enumerate(KEPT)]
        level = [each for each in following if each[1] > math.log(MIN_PATH_PROBABILITY)]
        every.update(level)
    best = sorted(every, key=every.__getitem__, reverse=True)[:12]
    assert set(paths(tree)) == set(best)
    assert set(tree.sources[1:]) == {"draft"}


@pytest.mark.parametrize("max_nodes", [4, 9, 14])
def test_the_likeliest_node_is_read_first(max_nodes: int) -> None:
    """One node a pass, until there are nodes enough."""
    model = MODELS["lm"]
    drafter = begun(engine(), [1, 2, 3], shape=TreeShape(max_children=3, max_width=1))
    tree = draft(drafter, 3, max_nodes=max_nodes)
    unread, every = {(): 0.0}, {}
    for _ in range(drafter.work.num_passes):
        path = max(unread, key=unread.__getitem__)
        value = unread.pop(path)
        for log_prob, token_id in rank(run_alone(model, [1, 2, 3, *path], None)[-1:], KEPT)[0][:3]:
            child = value + min(log_prob, math.log(MAX_PROBABILITY))
            if child > math.log(MIN_PATH_PROBABILITY):
                unread[(*path, token_id)] = every[(*path, token_id)] = child
    best = sorted(every, key=every.__getitem__, reverse=True)[:max_nodes]
    assert set(paths(tree)) == set(best)


def test_no_more_is_read_than_the_cache_has_room_for() -> None:
    drafter = begun(engine(), [1, 2, 3])
    draft(drafter, 3, max_nodes=1000, max_depth=100)
    assert MAX_ROWS - 16 < drafter.work.num_rows <= MAX_ROWS


def test_a_chain_is_the_drafts_own_choice_again_and_again() -> None:
    drafter = begun(engine(), [1, 2, 3], shape=CHAIN)
    tree = draft(drafter, 3, max_nodes=5)
    assert tree.parents == [-1, 0, 1, 2, 3, 4][: len(tree)]
    text = [1, 2, 3]
    for token_id in tree.token_ids[1:]:
        assert token_id == best_choice(MODELS["lm"], text, None)[1]
        text.append(token_id)
    assert len(tree) > 2


def test_hidden_states_of_the_prompts_end_are_enough() -> None:
    """Where a prefix was not computed again, its states are not known."""
    prompt, shared = [4, 8, 1, 9, 3], engine("feature")
    drafter = DraftModelDrafter(shared, "d", eos_ids=frozenset())
    drafter.begin(prompt, states_of(prompt)[2:-1])
    tree = draft(drafter, 3)
    known = MODELS["feature"].no_feature.repeat(4, 1)  # type: ignore[union-attr]
    known[2:] = states_of(prompt)[2:-1]
    check_estimates(tree, shared.model, prompt, known)
    drafter.begin(prompt)
    check_estimates(draft(drafter, 3), shared.model, prompt, None)
    assert len(tree) > 1


def test_a_draft_that_was_asked_twice_answers_twice() -> None:
    for kind in ("lm", "feature"):
        drafter = begun(engine(kind), [1, 2, 3])
        tree = draft(drafter, 3)
        assert paths(draft(drafter, 3)) == pytest.approx(paths(tree))


@pytest.mark.parametrize(("num_tokens", "num_passes"), [(15, 1), (40, 2), (300, 3)])
def test_tokens_that_were_emitted_without_drafting_are_read_later(num_tokens: int, num_passes: int) -> None:
    shared = engine("feature")
    drafter, text = begun(shared, [1, 2], shape=CHAIN), [1, 2]
    draw = random.Random(num_tokens)
    observe(drafter, text, [draw.randrange(VOCAB_SIZE) for _ in range(num_tokens - 2)])
    tree = draft(drafter, text[-1], max_depth=1)
    check_estimates(tree, shared.model, text, states_of(text)[:-1])
    assert (drafter.work.num_passes, drafter.work.num_rows) == (num_passes, num_tokens - 1)


def test_every_token_is_read_once() -> None:
    drafter, text = begun(engine("feature"), [1, 2, 3], shape=CHAIN), [1, 2, 3]
    for new in ([], [4], [8, 9, 1], [5, 5]):
        observe(drafter, text, new)
        draft(drafter, text[-1], max_depth=1)
        assert drafter.work.num_rows == len(text) - 2


def test_a_text_may_fill_the_context() -> None:
    """The region grows on the way, and nothing is read at a position that the model does not have."""
    shared = engine("feature")  # its context is all that the model has
    text = [token_id % VOCAB_SIZE for token_id in range(440)]
    drafter = begun(shared, text, inner=Guesses(wild))
    for size in (1, 40, 25, 1, 1, 2, 1, 1, 1):
        tree = draft(drafter, text[-1], max_nodes=8)
        if len(text) in (440, 481, 507, 512):
            check_estimates(tree, shared.model, text, states_of(text)[:-1])
            assert len(tree) > 1
        observe(drafter, text, [len(text) % VOCAB_SIZE] * size)
    assert drafter.is_exhausted


# Second stage


def test_a_foreseen_walk_takes_one_pass_and_changes_no_estimate() -> None:
    shared = engine()
    alone, helped = (
        begun(shared, [1, 2, 3], shape=CHAIN),
        begun(shared, [1, 2, 3], shape=CHAIN, inner=Guesses(foresee(shared))),
    )
    plain, staged = draft(alone, 3, 5, 5), draft(helped, 3, 5, 5)
    assert paths(staged) == pytest.approx(paths(plain))
    assert len(plain) == 6, "the paths are likely enough for the test to mean something"
    assert plain.sources[1:] == ["draft"] * 5
    assert staged.sources[1:] == ["draft<oracle"] * 4 + ["draft"]  # a node as deep as may be is not read
    assert (alone.work.num_passes, alone.work.num_rows, alone.work.num_staged_passes) == (5, 5, 0)
    assert (helped.work.num_passes, helped.work.num_rows, helped.work.num_staged_passes) == (1, 5, 1)
    assert (alone.work.num_confirmed, helped.work.num_confirmed) == (0, 4)
    shape = shared.runner.cache.shape
    weights, slots = shared.model.num_bytes, 128 * shape.slot_bytes
    assert alone.work.num_bytes == 5 * (weights + slots)
    assert helped.work.num_bytes == weights + slots


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["lm", "feature"]), st.lists(tokens, min_size=1, max_size=8), st.integers(1, 12))
def test_whatever_the_second_stage_says_the_draft_decides(kind: str, prompt: list[int], max_nodes: int) -> None:
    shared = engine(kind)
    alone, helped = begun(shared, prompt, shape=CHAIN), begun(shared, prompt, shape=CHAIN, inner=Guesses(wild))
    plain, staged = (paths(draft(drafter, prompt[-1], max_nodes)) for drafter in (alone, helped))
    assert staged == pytest.approx(plain)
    saved = alone.work.num_passes - helped.work.num_passes
    assert saved == helped.work.num_confirmed
    alone, helped = begun(shared, prompt), begun(shared, prompt, inner=Guesses(wild))
    plain, staged = (paths(draft(drafter, prompt[-1], 40)) for drafter in (alone, helped))
    for path in plain.keys() & staged.keys():
        assert staged[path] == pytest.approx(plain[path])
    assert plain.keys() & staged.keys()


def test_only_the_drafts_best_walk_counts_as_confirmed() -> None:
    """Other foreseen nodes are read as well, but no pass is saved by them."""
    shared = engine()
    best, second = (token_id for _, token_id in rank(run_alone(shared.model, [1, 2, 3], None)[-1:], KEPT)[0][:2])
    below_best, below_second = (best_choice(shared.model, [1, 2, 3, each], None)[1] for each in (best, second))

    def add_second(text: list[int], tree: TokenTree, proposal: Proposal) -> None:
        tree.add(0, second, -0.1, "oracle")
        tree.add(1, below_second, -0.2, "oracle")

    def add_both(text: list[int], tree: TokenTree, proposal: Proposal) -> None:
        add_second(text, tree, proposal)
        tree.add(0, best, -0.3, "oracle")
        tree.add(3, below_best, -0.4, "oracle")

    for add, paths_confirmed in ((add_second, set()), (add_both, {(best,), (best, below_best)})):
        drafter = begun(shared, [1, 2, 3], inner=Guesses(add))
        tree = draft(drafter, 3, max_nodes=20, max_depth=4)
        confirmed = {path for path, node in zip(paths(tree), range(1, len(tree))) if tree.sources[node] != "draft"}
        assert confirmed == paths_confirmed
        assert {tree.sources[node] for node in range(1, len(tree))} <= {"draft", "draft<oracle"}
        assert drafter.work.num_confirmed == len(paths_confirmed)
        assert (second, below_second) in paths(tree)


def test_nothing_is_drafted_below_eos_even_if_foreseen() -> None:
    shared = engine()
    eos_id = best_choice(shared.model, [1, 2, 3], None)[1]
    drafter = begun(shared, [1, 2, 3], eos_ids=frozenset({eos_id}), inner=Guesses(foresee(shared)))
    tree = draft(drafter, 3, max_nodes=40)
    assert (eos_id,) in paths(tree)
    assert not any(eos_id in path[:-1] for path in paths(tree))


def test_a_stage_that_costs_more_than_it_saves_is_tried_rarely() -> None:
    payoff = StagePayoff()
    trials = []
    for _ in range(60):
        if is_due := payoff.is_due(pass_s=1.0):
            payoff.record(0, extra_s=0.5)
        trials.append(is_due)
    assert 4 <= sum(trials) < 20
    assert trials[:3] == [True] * 3
    twin = payoff.copy()
    assert [twin.is_due(1.0) for _ in range(20)] == [payoff.is_due(1.0) for _ in range(20)]
    for _ in range(40):
        payoff.record(2, extra_s=0.5)
    assert all(payoff.is_due(1.0) for _ in range(20))


def test_the_tree_beside_reaches_the_target_under_its_own_name() -> None:
    def add_unknown(text: list[int], tree: TokenTree, proposal: Proposal) -> None:
        tree.add(0, 2, -0.01, "beside")  # the draft does not keep this id
        tree.add(1, 7, -0.02, "beside")

    drafter = begun(engine(), [1, 2, 3], beside=Guesses(add_unknown))
    tree = draft(drafter, 3)
    assert {(2,), (2, 7)} <= paths(tree).keys()
    assert {"beside", "draft"} <= set(tree.sources[1:])
    assert drafter.work.num_staged_passes == 0


@pytest.mark.parametrize("helper", ["inner", "beside"])
def test_a_second_stage_keeps_to_its_rows(helper: str) -> None:
    def fan(text: list[int], tree: TokenTree, proposal: Proposal) -> None:
        for token_id in KEPT.tolist()[: proposal.max_nodes]:
            tree.add(0, token_id, -0.1 * token_id - 0.1, "fan")

    shared, text = engine(), [1, 2, 3]
    drafter = begun(shared, text, **{helper: Guesses(fan)})
    for num_new in (0, 3, 14):
        observe(drafter, text, [8] * num_new)
        draft(drafter, text[-1], max_nodes=20)
    first = [num_rows for num_rows in shared.clock.num_rows if num_rows > 8]  # type: ignore[attr-defined]
    assert first == [12, 12, 14], "what must be read is read, and a stage rides where there is room"
    assert drafter.work.num_staged_passes == 2
    draft(drafter, text[-1], max_nodes=1)
    draft(drafter, text[-1], max_depth=1)
    assert drafter.work.num_staged_passes == 2, "no node that could be read would have children"


# When to stop


def test_passes_are_read_while_they_pay() -> None:
    """Dear passes are few, and free ones as many as the target could use."""
    num_passes = []
    for pass_s in (0.0, 0.02, 0.1, 0.5, 2.0):
        shared = engine(pass_s=pass_s)
        for _ in range(3):
            drafter = begun(shared, [1, 2, 3])  # the price of a pass is known from the second time on
            draft(drafter, 3, max_nodes=15, pass_s=[1.0] * 16)
        num_passes.append(drafter.work.num_passes)
    assert num_passes == sorted(num_passes, reverse=True)
    assert num_passes[0] > num_passes[2] > num_passes[-1] == 1


def test_tokens_ahead_make_time_dearer() -> None:
    """They are emitted whatever is drafted: a second that drafting takes costs them as well."""
    num_passes = []
    for ahead in ((), (8,) * 6):
        shared = engine(pass_s=0.15)
        for _ in range(3):
            drafter = begun(shared, [1, 2, 3])
            draft(drafter, 3, pass_s=[1.0] * 16, ahead=ahead)
        num_passes.append(drafter.work.num_passes)
    assert num_passes[0] > num_passes[1] == 1


def test_a_draft_that_proves_better_than_it_thinks_goes_deeper() -> None:
    shared = engine()
    before = draft(begun(shared, [1, 2, 3], shape=CHAIN), 3, max_nodes=40, max_depth=40)
    for _ in range(300):
        shared.calibration.update(before, before.token_ids[1:])
    after = draft(begun(shared, [1, 2, 3], shape=CHAIN), 3, max_nodes=40, max_depth=40)
    assert len(before) < len(after)
    assert after.log_accept[: len(before)] == before.log_accept, "the estimates are still the draft's own"
    assert after.log_accept[-1] < math.log(MIN_PATH_PROBABILITY)


def test_a_sure_tree_beside_needs_no_draft_model() -> None:
    def be_sure(text: list[int], tree: TokenTree, proposal: Proposal) -> None:
        for _ in range(min(proposal.max_depth, proposal.max_nodes)):
            tree.add(len(tree) - 1, 1, tree.log_accept[-1] - 0.02, "sure")

    def be_silent(text: list[int], tree: TokenTree, proposal: Proposal) -> None: ...

    passes = {}
    for make in (be_sure, be_silent):
        shared = engine("feature", pass_s=0.3)
        drafter, text = begun(shared, [1, 2, 3], beside=Guesses(make)), [1, 2, 3]
        for _ in range(4):
            before = drafter.work.num_passes
            tree = draft(drafter, text[-1], max_depth=8, pass_s=[1.0] * 16)
            observe(drafter, text, [8, 9])
        passes[make] = drafter.work.num_passes - before
        assert make is be_silent or set(tree.sources[1:]) == {"sure"}
        check_estimates(draft(drafter, 9), shared.model, text, states_of(text)[:-1])
    assert passes[be_sure] == 0 < passes[be_silent]


def test_pass_times_are_known_by_rows() -> None:
    times = PassTimes()
    assert times.expect(4) == 0.0
    times.record(4, 1.0)
    assert times.expect(1) == times.expect(16) == 1.0, "unknown sizes are hoped to cost no more"
    for _ in range(50):
        times.record(13, 2.0)
    assert (times.expect(4), times.expect(16), times.expect(20)) == (1.0, 2.0, 2.0)
    times.record(4, 100.0)
    assert 1.0 < times.expect(4) <= 1.1, "an interruption hardly counts"
    for _ in range(100):
        times.record(13, 0.5)
    assert times.expect(4) == pytest.approx(0.5, abs=1e-3), "fewer rows never cost more"


# Drawn children


@pytest.mark.parametrize("kind", ["lm", "feature"])
def test_children_are_drawn_from_the_law_of_their_path(kind: str) -> None:
    shared = engine(kind)
    text, sampling = [1, 2, 3], DraftSampling(seed=1, sequence_key=0, temperature=0.9, top_k=5)
    drafter = begun(shared, text, eos_ids=frozenset({EOS}), inner=Guesses(wild))
    plan = DrawPlan(positional_shape((0.6, 0.3, 0.2), 12, 4), KeyedChance("draft", 1, 0, 3))
    for _ in range(3):
        tree = drafter.draw(Proposal(text[-1], 12, 4, sampling=sampling), plan)
        assert tree.draws is not None
        assert max(tree.depths()) > 1
        for node, draws in tree.draws.items():
            path = [tree.token_ids[each] for each in tree.path(node)]
            law = run_alone(shared.model, [*text, *path], states_of(text)[:-1])[-1] / 0.9  # [K]
            law[law < law.topk(5).values[-1]] = -torch.inf
            assert draws.law_probs == pytest.approx(law.softmax(-1).numpy(), abs=1e-6)
            assert draws.law_ids.tolist() == KEPT.tolist()
            assert EOS not in path
        observe(drafter, text, [4, 8])
        check_estimates(draft(drafter, 8), shared.model, text, states_of(text)[:-1])
    assert set(tree.sources[1:]) == {"draft"}


def test_nothing_is_drawn_beyond_the_drafts_context() -> None:
    plan = DrawPlan(positional_shape((0.6,), 3, 3), KeyedChance("draft", 1, 0, 3))
    for size, num_nodes in ((6, 3), (7, 0), (9, 0)):
        drafter = begun(engine(context_tokens=8), [1] * size)
        assert len(drafter.draw(Proposal(1, 3, 3), plan)) == 1 + num_nodes
        assert drafter.work.num_exhausted_steps == (num_nodes == 0)


def test_nothing_is_drawn_from_a_law_that_is_nan() -> None:
    plan = DrawPlan(positional_shape((0.6,), 3, 3), KeyedChance("draft", 1, 0, 3))
    drafter = DraftModelDrafter(engine("feature"), "d", eos_ids=frozenset())
    drafter.begin([1, 2, 3], torch.full((2, HIDDEN), torch.nan))
    assert len(drafter.draw(Proposal(3, 3, 3), plan)) == 1
    drafter.close()


# Life of a sequence


def test_sequences_and_forks_are_independent() -> None:
    shared = engine("feature")
    prompts = [[1, 2, 3], [9, 8], [4] * 20]
    drafters = [begun(shared, prompt, inner=Guesses(wild)) for prompt in prompts]
    for drafter, prompt in zip(drafters, prompts, strict=True):
        draft(drafter, prompt[-1])
        observe(drafter, prompt, [7, 1], ahead=[3])
    forks = [drafter.fork() for drafter in drafters]
    for drafter, prompt in zip([*drafters, *forks], prompts * 2, strict=True):
        tree = draft(drafter, prompt[-1], ahead=(3,))
        check_estimates(tree, shared.model, [*prompt, 3], states_of([*prompt, 3])[:-1])
    texts = [[*prompt] for prompt in prompts * 2]
    for index, (drafter, text) in enumerate(zip([*drafters, *forks], texts, strict=True)):
        observe(drafter, text, [index, index + 3])
    drafters.pop(0).close()
    texts.pop(0)
    for drafter, text in zip([*drafters, *forks], texts, strict=True):
        tree = draft(drafter, text[-1])
        check_estimates(tree, shared.model, text, states_of(text)[:-1])
        assert len(tree) > 1
    assert forks[0].work.num_passes > 0
    for drafter in [*drafters, *forks]:
        drafter.close()
        drafter.close()
    assert shared.runner.cache.num_bytes == 0


def test_a_drafter_may_begin_again() -> None:
    shared = engine("feature")
    drafter, text = begun(shared, [1, 2, 3]), [1, 2, 3]
    draft(drafter, 3)
    observe(drafter, text, [4, 4])
    drafter.begin([7, 7], states_of([7, 7])[:-1])
    assert drafter.work.num_passes == 0
    tree = draft(drafter, 7)
    check_estimates(tree, shared.model, [7, 7], states_of([7, 7])[:-1])
    drafter.close()
    assert shared.runner.cache.num_bytes == 0


@pytest.mark.parametrize("helper", ["inner", "beside"])
def test_a_text_beyond_the_drafts_context_is_left_to_the_others(helper: str) -> None:
    shared = engine("feature", context_tokens=8)
    options: dict[str, Any] = {helper: Guesses(wild)}
    drafter, text = begun(shared, [1, 2, 3], **options), [1, 2, 3]
    bare = begun(shared, [1, 2, 3])
    sizes = []
    while len(text) < 11:
        assert drafter.is_exhausted == (len(text) > 8)
        tree = draft(drafter, text[-1], ahead=(1,), max_nodes=6)
        check_estimates(tree, shared.model, [*text, 1], states_of(text)[:-1])
        sizes.append(sum(source.startswith("draft") for source in tree.sources))
        before = text.copy()
        observe(drafter, text, [5])
        observe(bare, before, [5])
    assert sizes[0] > 0
    assert sizes[5:] == [0, 0, 0], "the tip is at position 8"
    assert draft(bare, 5) == TokenTree.root(5)
    assert draft(drafter, 5) == draft(options[helper], 5)
    assert shared.runner.cache.num_bytes == 0
    long = begun(shared, list(range(9)), **options)
    assert long.is_exhausted
    assert shared.runner.cache.num_bytes == 0
    fork = long.fork()
    assert draft(fork, 8) == draft(long, 8)


def test_nan_does_not_outlive_a_sequence() -> None:
    """What a broken target's states leave in the slots is gone when another sequence gets them."""
    shared = engine("feature")
    keeper, broken = begun(shared, [1]), DraftModelDrafter(shared, "d", eos_ids=frozenset())
    broken.begin([1, 2, 3], torch.full((2, HIDDEN), torch.nan))
    assert draft(broken, 3) == TokenTree.root(3)
    broken.close()
    after = begun(shared, [9])
    assert len(draft(after, 9)) > 1
    keeper.close()


def test_memory_is_weights_slots_and_helpers() -> None:
    shared = engine()
    drafter = begun(shared, [1, 2, 3], inner=Guesses(wild), beside=Guesses(wild))
    assert drafter.memory_bytes == shared.model.num_bytes + shared.runner.cache.num_bytes + 14
    assert drafter.needs == frozenset()
    assert begun(engine("feature"), [1]).needs == {"hidden"}


# Choices


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 1000))
def test_ranks_are_those_of_a_sort(num_rows: int, seed: int) -> None:
    scores = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (num_rows, len(KEPT))).round(1))  # [N, K]
    for row, choices in zip(scores, rank(scores, KEPT), strict=True):
        probs = row.softmax(-1).tolist()
        order = sorted(range(len(KEPT)), key=lambda column: -probs[column])
        expected = [column for column in order if probs[column] >= MIN_PATH_PROBABILITY]
        assert [token_id for _, token_id in choices] == [int(KEPT[column]) for column in expected]
        assert [math.exp(value) for value, _ in choices] == pytest.approx([probs[column] for column in expected])


@pytest.mark.parametrize("num_kept", [14, 1000])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (5, 0.7), (99, 0.9), (1, 0.5)])
def test_filters_leave_what_the_target_would_leave(num_kept: int, top_k: int, top_p: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (4, num_kept)))  # [N, K]
    sampling = DraftSampling(seed=1, sequence_key=0, temperature=0.7, top_k=top_k, top_p=top_p)
    for row, filtered in zip(logits.numpy(), filter_scores(logits, sampling), strict=True):
        scores = (row / 0.7).astype(np.float32)  # [K]
        kept = keep_top_k(scores, top_k) if top_k else np.arange(len(scores))
        kept = kept[keep_top_p(scores[kept], top_p)] if top_p < 1 else kept
        assert np.flatnonzero(np.isfinite(filtered.numpy())).tolist() == kept.tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (5, 0.7)])
def test_the_least_temperatures_leave_the_best_token(top_k: int, top_p: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 30, (4, 300)))  # [N, K]
    for temperature in (1e-38, 5e-324):
        scores = filter_scores(logits, DraftSampling(1, 0, temperature, top_k, top_p))  # [N, K]
        assert scores.softmax(-1).tolist() == torch.nn.functional.one_hot(logits.argmax(-1), 300).tolist()


def test_noise_is_the_targets_own() -> None:
    memory = NoiseMemory(KEPT)
    for key in (0, 1, 0):
        sampling = DraftSampling(seed=7, sequence_key=key, temperature=1.0)
        noise = memory.rows(sampling, [3, 4, 3, *range(200)])  # [N, K]
        assert torch.equal(noise[0], noise[2])
        for row, position in zip(noise[:2], (3, 4), strict=True):
            assert row.numpy() == pytest.approx(gumbel_noise_array(7, key, position, KEPT), abs=1e-5)


def test_sampled_drafts_rank_by_noisy_scores() -> None:
    """Each child's estimate is the softmax of logits over temperature plus the noise of its own position."""
    shared = engine()
    sampling = DraftSampling(seed=3, sequence_key=2, temperature=0.8)
    tree = draft(begun(shared, [1, 2, 3]), 3, sampling=sampling)
    for path, value in paths(tree).items():
        law = run_alone(shared.model, [1, 2, 3, *path], None)[2:-1]  # [D, K]
        expected = 0.0
        for depth, token_id in enumerate(path):
            noisy = law[depth] / 0.8 + torch.from_numpy(gumbel_noise_array(3, 2, 3 + depth, KEPT))  # [K]
            expected += min(float(noisy.log_softmax(-1)[KEPT.tolist().index(token_id)]), math.log(MAX_PROBABILITY))
        assert value == pytest.approx(expected, abs=1e-4)
    assert max(tree.depths()) > 1


# Catalog


def test_drafters_that_run_a_model_ask_for_one() -> None:
    for name in (*DRAFTERS, *MODEL_DRAFTERS):
        check_drafter_name(name)
    for name in MODEL_DRAFTERS:
        with pytest.raises(ConfigError, match=r"`foretell train draft`.*`--draft`"):
            make_drafter(name, eos_ids=frozenset())
    with pytest.raises(ConfigError, match=r"no drafter 'eagle': choose one of none, .*, staged"):
        check_drafter_name("eagle")


@pytest.mark.parametrize("name", [*MODEL_DRAFTERS, "all"])
@pytest.mark.parametrize("has_table", [False, True])
def test_every_name_makes_a_drafter_that_drafts(name: str, has_table: bool) -> None:
    shared = engine("feature")
    made: list[frozenset[int]] = []

    def make_table(eos_ids: frozenset[int]) -> Drafter:
        made.append(eos_ids)
        return Guesses(wild, "katz")

    table = make_table if has_table else None
    drafter = make_drafter(name, eos_ids=frozenset({EOS}), draft=shared, ngram_table=table)
    drafter.begin([1, 2, 3, 1, 2], states_of([1, 2, 3, 1, 2])[:-1])
    tree = draft(drafter, 2)
    assert drafter.name == name
    assert "draft" in {source.split("<")[0] for source in tree.sources}
    assert all(source.split("<")[0] in ("", "draft", "suffix", "recycle") for source in tree.sources)
    assert bool(made) == (has_table and name not in ("draft", "draft-chain"))
    if name.endswith("chain"):
        assert tree.parents == list(range(-1, len(tree) - 1))
    drafter.close()
