"""What every drafter promises, and what each one proposes."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.drafters.catalog import DRAFTERS, make_drafter
from foretell.drafters.combined import CombinedDrafter
from foretell.drafters.corpus import Corpus
from foretell.drafters.drafter import Drafter, NoDrafter, Outcome, Proposal, TableDrafter
from foretell.drafters.grow import MAX_PROBABILITY, MIN_PATH_PROBABILITY
from foretell.errors import ConfigError
from foretell.tree.token_tree import TokenTree

EOS = 0
VOCAB_SIZE = 6
CORPUS = Corpus([[1, 2, 3, 4, 5, 1, 2, 3, 0], [2, 2, 5, 5, 4]])
NEXT_IDS = np.array([[(row + k) % VOCAB_SIZE for k in range(1, 4)] for row in range(VOCAB_SIZE)], dtype=np.int32)
MATERIALS: list[dict[str, Any]] = [{}, {"corpus": CORPUS, "next_ids": NEXT_IDS}]

names = st.sampled_from(sorted(DRAFTERS))
materials = st.sampled_from(MATERIALS)
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)


def make(name: str, material: dict[str, Any] | None = None, eos_ids: Sequence[int] = (EOS,)) -> Drafter:
    return make_drafter(name, eos_ids=frozenset(eos_ids), **(material or {}))


def draft(drafter: Drafter, root: int, max_nodes: int = 15, max_depth: int = 8, ahead: Sequence[int] = ()) -> TokenTree:
    return drafter.propose(Proposal(root=root, max_nodes=max_nodes, max_depth=max_depth, ahead=tuple(ahead)))


def outcome(token_ids: Sequence[int]) -> Outcome:
    """Return an outcome whose rankings depend on the tokens alone."""
    return Outcome(token_ids, top_ids=[[token_id, (token_id + 2) % VOCAB_SIZE] for token_id in token_ids])


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Return `{token path: probability}` without the root."""
    return {
        tuple(tree.token_ids[i] for i in tree.path(node)): math.exp(tree.log_accept[node])
        for node in range(1, len(tree))
    }


def check_draft(tree: TokenTree, proposal: Proposal, eos_ids: Sequence[int]) -> None:
    """Assert what the protocol promises of any draft."""
    assert tree.token_ids[0] == proposal.tip
    assert (tree.parents[0], tree.log_accept[0], tree.sources[0]) == (-1, 0.0, "")
    assert len(tree) - 1 <= max(0, proposal.max_nodes)
    assert len(tree.parents) == len(tree.log_accept) == len(tree.sources) == len(tree)
    assert len(paths(tree)) == len(tree) - 1, "siblings carry the same token"
    depths = tree.depths()
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert depths[node] <= proposal.max_depth
        assert tree.log_accept[node] < tree.log_accept[parent], "a draft is never certain"
        assert tree.sources[node] in DRAFTERS
        assert parent == 0 or tree.token_ids[parent] not in eos_ids, "drafted below EOS"


# What every drafter promises


@settings(max_examples=300)
@given(names, materials, prompts, st.lists(texts, max_size=4), st.data())
def test_drafts_keep_within_their_limits(
    name: str, material: dict[str, Any], prompt: list[int], chunks: list[list[int]], data: st.DataObject
) -> None:
    drafter = make(name, material)
    drafter.begin(prompt)
    root = prompt[-1]
    for chunk in [[], *chunks]:
        drafter.observe(outcome(chunk))
        root = chunk[-1] if chunk else root
        proposal = Proposal(
            root=root,
            max_nodes=data.draw(st.integers(0, 20)),
            max_depth=data.draw(st.integers(0, 6)),
            ahead=tuple(data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))),
        )
        before = copy.deepcopy(astuple(proposal))
        tree = drafter.propose(proposal)
        check_draft(tree, proposal, (EOS,))
        assert astuple(proposal) == before
        assert drafter.propose(proposal) == tree, "proposing changed the drafter"
    assert drafter.memory_bytes >= 0


@given(names, materials, prompts, prompts, st.lists(texts, max_size=4))
def test_observing_equals_a_rebuild(
    name: str, material: dict[str, Any], other: list[int], prompt: list[int], chunks: list[list[int]]
) -> None:
    """Neither another sequence before, nor how the text is cut into steps, leaves a trace."""
    used = make(name, material)
    used.begin(other)
    used.observe(outcome(other))
    used.begin(prompt)
    for chunk in chunks:
        used.observe(outcome(chunk))
    fresh = make(name, material)
    fresh.begin(prompt)
    text = [token_id for chunk in chunks for token_id in chunk]
    fresh.observe(outcome(text))
    root = [*prompt, *text][-1]
    assert draft(used, root) == draft(fresh, root)
    if "top_ids" not in fresh.needs:
        rebuilt = make(name, material)
        rebuilt.begin([*prompt, *text])
        assert draft(used, root) == draft(rebuilt, root)


@given(names, materials, prompts, texts, texts)
def test_forks_are_independent(
    name: str, material: dict[str, Any], prompt: list[int], left: list[int], right: list[int]
) -> None:
    original = make(name, material)
    original.begin(prompt)
    fork = original.fork()
    assert draft(fork, prompt[-1]) == draft(original, prompt[-1])
    original.observe(outcome(left))
    fork.observe(outcome(right))
    for drafter, text in ((original, left), (fork, right)):
        alone = make(name, material)
        alone.begin(prompt)
        alone.observe(outcome(text))
        root = [*prompt, *text][-1]
        assert draft(drafter, root) == draft(alone, root)


@given(st.sampled_from(["suffix", "ngram"]), materials, prompts, st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_tokens_ahead_are_only_looked_past(
    name: str, material: dict[str, Any], prompt: list[int], ahead: list[int]
) -> None:
    """The draft below unobserved tokens names what followed the same tokens before, and forgets them."""
    drafter = make(name, material)
    drafter.begin(prompt)
    before = draft(drafter, prompt[-1])
    below = draft(drafter, prompt[-1], ahead=ahead)
    assert below.token_ids[0] == ahead[-1]
    assert draft(drafter, prompt[-1]) == before


@pytest.mark.parametrize("name", sorted(DRAFTERS))
@pytest.mark.parametrize("limits", [(0, 5), (5, 0), (0, 0)])
def test_nothing_allowed_gives_the_root_alone(name: str, limits: tuple[int, int]) -> None:
    drafter = make(name, MATERIALS[1])
    drafter.begin([1, 2, 3, 1, 2, 3, 1, 2])
    assert draft(drafter, 2, *limits) == TokenTree.root(2)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_a_prompt_of_one_token_is_enough(name: str) -> None:
    """vllm#20531, vllm#7047: proposing nothing is an ordinary answer."""
    drafter = make(name)
    drafter.begin([4])
    assert draft(drafter, 4) == TokenTree.root(4)
    drafter.observe(Outcome([]))
    assert draft(drafter, 4) == TokenTree.root(4)


@pytest.mark.parametrize("name", sorted(set(DRAFTERS) - {"none"}))
def test_depth_is_limited(name: str) -> None:
    """transformers#28555: drafts went past the length limit."""
    drafter = make(name, eos_ids=())
    drafter.begin([1])
    drafter.observe(outcome([2, 3, 4] * 6))
    deep = draft(drafter, 4, max_nodes=10, max_depth=9)
    assert max(deep.depths()) > 1
    assert max(draft(drafter, 4, max_nodes=10, max_depth=1).depths()) == 1


@pytest.mark.parametrize("name", ["lookup", "suffix", "ngram", "all"])
def test_nothing_is_copied_across_eos(name: str) -> None:
    """transformers#31301: prompt lookup copied what followed an EOS token."""
    text = [1, 2, 3, EOS, 4, 5, 1, 2]
    drafter = make(name)
    drafter.begin(text)
    assert (3, EOS) in paths(draft(drafter, 2))
    assert not any(EOS in path[:-1] for path in paths(draft(drafter, 2)))


@pytest.mark.parametrize("name", ["lookup", "suffix", "ngram", "all"])
def test_a_model_without_eos_is_fine(name: str) -> None:
    """transformers#27775: prompt lookup crashed where `eos_token_id` was None."""
    drafter = make(name, eos_ids=())
    drafter.begin([1, 2, 3, EOS, 4, 5, 1, 2])
    assert (3, EOS, 4, 5) in paths(draft(drafter, 2))


@pytest.mark.parametrize("name", ["lookup", "suffix", "ngram", "all"])
def test_a_root_that_is_eos_may_be_continued(name: str) -> None:
    drafter = make(name)
    drafter.begin([1, EOS, 2, 3, 1, EOS])
    assert (2, 3) in paths(draft(drafter, EOS))


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_rankings_may_be_missing(name: str) -> None:
    drafter = make(name)
    drafter.begin([1])
    drafter.observe(Outcome([2, 1]))
    assert len(draft(drafter, 1)) <= 16


@pytest.mark.parametrize("name", sorted(set(DRAFTERS) - {"none"}))
def test_memory_grows_with_the_text(name: str) -> None:
    drafter = make(name)
    drafter.begin([1])
    before = drafter.memory_bytes
    drafter.observe(Outcome(range(50), top_ids=[[1, 2]] * 50))
    assert drafter.memory_bytes > before


# Catalog


def test_an_unknown_drafter_is_told_with_the_names() -> None:
    with pytest.raises(
        ConfigError, match=r"no drafter 'eagle': choose one of none, lookup, suffix, ngram, recycle, all"
    ):
        make_drafter("eagle", eos_ids=frozenset())


def test_defaults_are_complete() -> None:
    """ArcticInference: `speculate()` without its optional argument read a missing attribute."""
    for name in DRAFTERS:
        drafter = make_drafter(name, eos_ids=frozenset())
        drafter.begin([1, 2, 1])
        assert drafter.name == name
        drafter.propose(Proposal(root=1, max_nodes=3, max_depth=3))


def test_drafters_need_no_torch() -> None:
    code = (
        "import sys; from foretell.drafters.catalog import DRAFTERS, make_drafter\n"
        "for name in DRAFTERS: make_drafter(name, eos_ids=frozenset()).begin([1])\n"
        "import foretell.drafters.calibration, foretell.tree.pack\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


# Lookup, suffix, n-grams


@pytest.mark.parametrize("name", ["lookup", "suffix", "ngram"])
def test_all_continuations_are_proposed_the_newest_first(name: str) -> None:
    drafter = make(name)
    drafter.begin([5, 1, 2, 3, 5, 1, 2, 4, 5, 1, 2])
    first = [path[0] for path in paths(draft(drafter, 2)) if len(path) == 1]
    assert first[:2] == [4, 3]


@pytest.mark.parametrize("name", ["lookup", "suffix", "ngram"])
def test_a_longer_match_outweighs_newer_and_more_frequent_ones(name: str) -> None:
    drafter = make(name)
    drafter.begin([7, 8, 1, 2, 9, 1, 3, 9, 1, 3, 7, 8, 1])
    chances = paths(draft(drafter, 1))
    assert chances[2,] > 2 * chances[3,]


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_confidence_grows_with_the_match(name: str) -> None:
    chances = []
    for size in (1, 2, 4, 8, 12):
        drafter = make(name)
        drafter.begin([*range(100, 100 + size), 1, 2, 3, *range(100, 100 + size)])
        chances.append(paths(draft(drafter, 99 + size))[1,])
    assert chances == sorted(chances)
    assert chances[0] < 0.4
    assert chances[-1] > 0.9


@pytest.mark.parametrize("name", ["lookup", "suffix", "ngram"])
def test_confidence_grows_with_agreement(name: str) -> None:
    chances = []
    for times in (1, 2, 3):
        drafter = make(name)
        drafter.begin([*[t for i in range(times) for t in (10 + i, 1, 2, 3)], 20, 1, 2])
        chances.append(paths(draft(drafter, 2))[3,])
    assert chances == sorted(set(chances))


def test_lookup_counts_agreement_beyond_the_ngram() -> None:
    text = [1, 2, 3, 4, 5, 6]
    drafter = make("lookup", eos_ids=())
    drafter.begin([9, 4, 5, 6, 8, *text, 7, *text])
    chances = paths(draft(drafter, 6))
    assert chances[7,] > chances[8,]


def test_the_suffix_drafter_quotes_the_corpus() -> None:
    drafter = make("suffix", {"corpus": [[11, 12, 13, 14], [12, 15]]})
    drafter.begin([11, 12])
    chances = paths(draft(drafter, 12))
    assert chances[13,] > chances[15,]
    assert (13, 14) in chances


def test_the_own_text_outweighs_the_corpus() -> None:
    drafter = make("suffix", {"corpus": [[11, 12, 13]] * 3})
    drafter.begin([11, 12, 14, 11, 12])
    chances = paths(draft(drafter, 12))
    assert chances[14,] > chances[13,] > MIN_PATH_PROBABILITY


def test_a_corpus_is_shared_by_forks_and_never_written() -> None:
    corpus = Corpus([[1, 2, 3]])
    drafter = make("suffix", {"corpus": corpus})
    drafter.begin([5, 1, 2])
    size = drafter.memory_bytes
    fork = drafter.fork()
    fork.observe(Outcome([4] * 50))
    before = corpus.memory_bytes
    assert paths(draft(drafter, 2))[3,] > 0
    assert (corpus.memory_bytes, drafter.memory_bytes) == (before, size)


# Recycling


def test_recycling_proposes_what_never_followed() -> None:
    drafter = make("recycle")
    drafter.begin([1])
    drafter.observe(Outcome([2, 1], top_ids=[[2, 3, 4], [1, 5]]))
    assert [path[0] for path in paths(draft(drafter, 1)) if len(path) == 1] == [2, 3, 4]


def test_recycling_keeps_the_newest_ranking_and_the_longest_context() -> None:
    drafter = make("recycle")
    drafter.begin([1])
    drafter.observe(Outcome([2, 1, 3, 9, 1], top_ids=[[2, 7], [1], [3, 8], [9], [1]]))
    assert {path[0] for path in paths(draft(drafter, 1))} == {3, 8}
    drafter.observe(Outcome([2, 1], top_ids=[[2, 6], [1]]))
    assert {path[0] for path in paths(draft(drafter, 1)) if len(path) == 1} == {3, 8}


def test_recycling_falls_back_on_the_table() -> None:
    drafter = make("recycle", {"next_ids": NEXT_IDS})
    drafter.begin([3])
    assert [path[0] for path in paths(draft(drafter, 3)) if len(path) == 1] == NEXT_IDS[3].tolist()
    drafter.begin([VOCAB_SIZE + 5])
    assert len(draft(drafter, VOCAB_SIZE + 5)) == 1


# Combination


class Fixed(TableDrafter):
    """Proposes the same chain whatever happens."""

    needs: frozenset[str] = frozenset()
    memory_bytes = 10

    def __init__(self, name: str, token_ids: Sequence[int], probability: float) -> None:
        self.name, self._token_ids, self._probability = name, token_ids, probability
        self.observed: list[Outcome] = []

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None: ...

    def propose(self, proposal: Proposal) -> TokenTree:
        token_ids = [proposal.tip, *self._token_ids][: proposal.max_nodes + 1]
        return TokenTree.chain(token_ids, [i * math.log(self._probability) for i in range(len(token_ids))], self.name)

    def observe(self, outcome: Outcome) -> None:
        self.observed.append(outcome)

    def fork(self) -> Fixed:
        return Fixed(self.name, self._token_ids, self._probability)


def test_combination_merges_and_keeps_the_best() -> None:
    shy, bold = Fixed("shy", [1, 2, 3], 0.3), Fixed("bold", [1, 4], 0.6)
    both = CombinedDrafter([shy, bold], "both")
    both.begin([0])
    tree = draft(both, 0)
    assert {p: round(v, 3) for p, v in paths(tree).items()} == {(1,): 0.6, (1, 2): 0.09, (1, 2, 3): 0.027, (1, 4): 0.36}
    assert dict(zip(tree.token_ids, tree.sources, strict=True)) == {0: "", 1: "bold", 2: "shy", 3: "shy", 4: "bold"}
    assert list(paths(draft(both, 0, max_nodes=2))) == [(1,), (1, 4)]
    both.observe(Outcome([1]))
    assert len(shy.observed) == len(bold.observed) == 1
    assert both.memory_bytes == 20
    both.fork().observe(Outcome([1]))
    assert len(shy.observed) == 1


def test_combination_needs_what_its_drafters_need() -> None:
    assert make("all").needs == {"top_ids"}
    assert CombinedDrafter([NoDrafter()], "both").needs == frozenset()


def test_no_draft_is_certain() -> None:
    drafter = make("all")
    drafter.begin([1, 2] * 500)
    assert max(paths(draft(drafter, 2)).values()) <= MAX_PROBABILITY
