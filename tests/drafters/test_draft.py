"""The drafter that runs a draft model: every estimate against its path run alone, limits, and a sequence's life."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_lab import (
    CHAIN,
    EOS,
    HIDDEN,
    KEPT,
    MODELS,
    VOCAB_SIZE,
    Guesses,
    begun,
    best_choice,
    check_estimates,
    draft,
    engine,
    observe,
    paths,
    run_alone,
    states_of,
    tokens,
    wild,
)
from foretell.drafters.choices import rank
from foretell.drafters.draft import DraftModelDrafter
from foretell.drafters.drafter import Proposal
from foretell.drafters.expansion import TreeShape
from foretell.drafters.grow import MAX_PROBABILITY, MIN_PATH_PROBABILITY
from foretell.passes.runner import MAX_ROWS
from foretell.tree.token_tree import TokenTree

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
