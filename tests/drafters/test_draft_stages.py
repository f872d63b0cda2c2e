"""A second stage, when to read on, and drawn children."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_lab import (
    CHAIN,
    EOS,
    HIDDEN,
    KEPT,
    Guesses,
    begun,
    best_choice,
    check_estimates,
    draft,
    engine,
    foresee,
    observe,
    paths,
    run_alone,
    states_of,
    tokens,
    wild,
)
from foretell.drafters.choices import rank
from foretell.drafters.draft import DraftModelDrafter
from foretell.drafters.draft_engine import PassTimes, StagePayoff
from foretell.drafters.drafter import DraftSampling, Proposal
from foretell.drafters.grow import MIN_PATH_PROBABILITY
from foretell.tree.shape import positional_shape
from foretell.tree.token_tree import TokenTree
from foretell.verify.chance import KeyedChance
from foretell.verify.draws import DrawPlan

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


def stepped(num_rows: int) -> float:
    """Return seconds of a pass: 1 for up to 4 rows, 1.6 for more."""
    return 1.0 if num_rows <= 4 else 1.6


def test_as_many_nodes_are_staged_as_save_more_than_their_rows() -> None:
    sure = TokenTree.chain([7, 1, 2, 3, 4, 5], [0.0, -0.1, -0.2, -0.3, -0.4, -0.5], "toy")
    vague = TokenTree.chain([7, 1, 2, 3, 4, 5], [0.0, -1.0, -2.5, -4.0, -5.0, -6.0], "toy")
    payoff = StagePayoff()
    for _ in range(300):
        payoff.record(TokenTree.root(7), 0, num_more=5)
    assert len(payoff.choose(sure, 0.0, 1, stepped)) == 6
    assert len(payoff.choose(vague, 0.0, 1, stepped)) == 4  # the other two would need a larger pass
    assert len(payoff.choose(vague, 0.0, 4, stepped)) == 1
    for _ in range(200):
        payoff.record(sure, 0, 5)
    assert len(payoff.choose(sure, 0.0, 4, stepped)) == 1
    for _ in range(200):
        payoff.record(sure, 5, 0)
    assert len(payoff.choose(sure, 0.0, 4, stepped)) == 6
    for _ in range(300):
        payoff.record(TokenTree.root(7), 0, num_more=0)
    assert len(payoff.choose(sure, 0.0, 1, stepped)) == 4, "passes that nobody would read are not saved"


def test_a_stage_that_saves_less_than_its_making_is_made_rarely() -> None:
    payoff = StagePayoff()
    tree = TokenTree.chain([7, 1], [0.0, -0.1], "toy")

    def made(num_met: int) -> list[bool]:
        trials = []
        for _ in range(100):
            trials.append(payoff.is_due())
            if trials[-1]:
                payoff.record(payoff.choose(tree, 0.3, 1, stepped), num_met, 1 - num_met)
        return trials

    trials = made(num_met=0)
    assert trials[0]
    assert 4 <= sum(trials[40:]) < 20
    for _ in range(200):
        payoff.record(tree, 1, 0)
    assert all(made(num_met=1)[50:])


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
