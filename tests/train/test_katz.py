"""Katz's estimate against a slow one in fractions, and what pruning and packing leave of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.drafters.katz import read_facts, read_katz
from foretell.errors import InputError
from foretell.models.draft import DraftModel
from foretell.train.examples import Examples
from foretell.train.katz import estimate_katz, pack_katz, prune_katz, train_ngram
from foretell.train.katz_model import KatzModel, fit_katz
from foretell.train.sample import Sampler, SampleSettings
from foretell.train.text import CHAT, Documents

V = 5
Texts = Sequence[Sequence[int]]
texts = st.lists(st.lists(st.integers(0, V - 1), max_size=40), min_size=1, max_size=6).filter(any)
rich = st.integers(0, 10**6).map(lambda seed: made_up(seed, 600, V))
"""Enough text for Good and Turing, with contexts that were never seen."""


def made_up(seed: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Return texts in which a token says much about the next, and the rarer ones of which are rare."""
    random = np.random.default_rng(seed)
    fixed = np.random.default_rng(0).dirichlet(np.full(vocab_size, 0.15), vocab_size**2)
    out: list[list[int]] = []
    for _ in range(num_tokens // 30):
        text = [0, int(random.integers(vocab_size))]
        for _ in range(28):
            text.append(int(random.choice(vocab_size, p=fixed[text[-2] * vocab_size + text[-1]])))
        out.append(text)
    return out


def documents_of(texts: Texts, num_given: int = 0) -> Documents:
    size = len(texts)
    return Documents.of(texts, [CHAT] * size, [num_given] * size, [1.5] * size)


class Reference:
    """Katz's estimate token by token, in fractions."""

    def __init__(self, texts: Texts, num_given: int = 0, vocab_size: int = V) -> None:
        self.vocab_size = vocab_size
        self.counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in texts:
            for end in range(num_given, len(text)):
                for order in range(min(end, 2) + 1):
                    self.counts[tuple(text[end - order : end])][text[end]] += 1
        self.discounts = [self.discounts_of(order) for order in range(3)]
        self.probability = cache(self._probability)

    def discounts_of(self, order: int) -> dict[int, Fraction]:
        seen = Counter(
            count for context, followers in self.counts.items() if len(context) == order for count in followers.values()
        )
        absolute = Fraction(seen[1], seen[1] + 2 * seen[2]) if seen[1] and seen[2] else Fraction(1, 2)
        discounts = {}
        for count in range(1, 6):
            discounts[count] = 1 - absolute / count
            if seen[1] and seen[count] and 6 * seen[6] < seen[1]:
                tail = Fraction(6 * seen[6], seen[1])
                discount = (Fraction((count + 1) * seen[count + 1], count * seen[count]) - tail) / (1 - tail)
                if 0 < discount < 1:
                    discounts[count] = discount
        return discounts

    def _probability(self, context: tuple[int, ...], token_id: int) -> Fraction:
        followers = self.counts.get(context)
        if followers is None:
            return self.shorter(context, token_id)
        discounted = {
            each: self.discounts[len(context)].get(count, Fraction(1)) * Fraction(count, followers.total())
            for each, count in followers.items()
        }
        left = 1 - sum(discounted.values())
        left_below = 1 - sum(self.shorter(context, each) for each in followers)
        if left == 0 or left_below == 0:
            return discounted.get(token_id, Fraction(0)) / sum(discounted.values())
        if token_id in discounted:
            return discounted[token_id]
        return left / left_below * self.shorter(context, token_id)

    def shorter(self, context: tuple[int, ...], token_id: int) -> Fraction:
        return self.probability(context[1:], token_id) if context else Fraction(1, self.vocab_size)


def law(model: KatzModel, context: tuple[int, ...]) -> np.ndarray:
    """Return the distribution after a context, [V]."""
    key = sum(token_id * model.vocab_size**place for place, token_id in enumerate(reversed(context)))
    size = model.vocab_size
    return model.probabilities(len(context), np.full(size, key), np.arange(size))


def contexts(vocab_size: int = V) -> list[tuple[int, ...]]:
    return [context for order in range(3) for context in product(range(vocab_size), repeat=order)]


@settings(max_examples=60, deadline=None)
@given(st.one_of(texts, rich), st.sampled_from([0, 2]))
def test_the_estimate_is_katzs(texts: Texts, num_given: int) -> None:
    reference = Reference(texts, num_given)
    if not reference.counts:
        with pytest.raises(InputError, match="no token to count"):
            fit_katz(documents_of(texts, num_given), V)
        return
    model = fit_katz(documents_of(texts, num_given), V)
    for context in contexts():
        expected = [reference.probability(context, token_id) for token_id in range(V)]
        assert sum(expected) == 1
        assert law(model, context) == pytest.approx([float(each) for each in expected], abs=1e-9)


def test_what_is_left_over_is_the_share_of_what_was_seen_once() -> None:
    """Good and Turing: ids that were never seen get as much as those that were seen once had."""
    num_seen = {1: 120, 2: 40, 3: 20, 4: 12, 5: 8, 6: 6, 9: 2}
    counts = [count for count, size in num_seen.items() for _ in range(size)]
    vocab_size = len(counts) + 10
    text = [token_id for token_id, count in enumerate(counts) for _ in range(count)]
    chances = law(fit_katz(documents_of([text]), vocab_size), ())
    assert chances[-10:] * len(text) == pytest.approx([12.0] * 10)
    assert chances[:-10].sum() * len(text) == pytest.approx(len(text) - 120)
    ratio = {count: chances[counts.index(count)] * len(text) / count for count in num_seen}
    tail = 6 * 6 / 120
    assert ratio[1] == pytest.approx((2 * 40 / 120 - tail) / (1 - tail)), "Katz's equation"
    assert ratio[6] == ratio[9] == pytest.approx(1)


@given(rich, st.integers(1, V), st.integers(0, 700))
@settings(max_examples=25, deadline=None)
def test_a_pruned_model_is_still_a_law_and_fits(texts: Texts, max_followers: int, num_bytes: int) -> None:
    model = prune_katz(fit_katz(documents_of(texts), V), max_bytes=4096 + num_bytes, max_followers=max_followers)
    for context in contexts():
        assert law(model, context).sum() == pytest.approx(1)
    for level in model.levels:
        assert np.diff(level.starts).max(initial=0) <= max_followers
    size = pack_katz(model).mapped_bytes
    assert size <= max(num_bytes, 7 + 3 * V) + 12  # unigrams stay in any case; the file's header has room for the rest
    ample = pack_katz(prune_katz(fit_katz(documents_of(texts), V), max_bytes=10**6)).mapped_bytes
    assert size == ample or max_followers < V or num_bytes < ample


def test_what_is_counted_may_be_something_else_than_the_text() -> None:
    """What follows a place in the counts is one thing, what the next context is made of another."""
    documents, counted = documents_of([[0, 1, 2, 3], [4, 1, 2]]), np.array([9, 9, 4, 3, 9, 9, 3], np.int32) % V
    model = fit_katz(documents, V, counted=counted)
    seen = {(level.order, int(key)) for level in model.levels for key in level.keys}
    trigrams = [(0, 1, 4), (1, 2, 3), (4, 1, 3)]
    assert {key for order, key in seen if order == 2} == {(u * V + v) * V + w for u, v, w in trigrams}
    bigrams = [(0, 4), (1, 4), (2, 3), (4, 4), (1, 3)]
    assert {key for order, key in seen if order == 1} == {v * V + w for v, w in bigrams}
    for context in contexts():
        assert law(model, context).sum() == pytest.approx(1)


def test_an_ample_size_prunes_only_what_shorter_contexts_put_higher() -> None:
    model = fit_katz(documents_of(made_up(2, 900, V)), V)
    pruned = prune_katz(model, max_bytes=10**6, max_followers=V)
    num_dropped = 0
    for level, kept in zip(model.levels[1:], pruned.levels[1:], strict=True):
        is_more = level.probabilities > model.without_last(level.order, level.keys)
        assert np.array_equal(kept.keys, level.keys[is_more])
        assert kept.probabilities == pytest.approx(level.probabilities[is_more])
        num_dropped += int((~is_more).sum())
    assert num_dropped > 0


def test_what_tells_most_is_kept_longest() -> None:
    """After (1, 2) comes always 3, which (2,) alone would not tell; after (4, 2) comes what comes after (2,) anyway."""
    random = np.random.default_rng(0)
    texts = [[1, 2, 3]] * 60 + [[first, 2, int(random.integers(5))] for first in (4, 0) for _ in range(60)]
    model = fit_katz(documents_of(texts), V)
    sizes = []
    for num_bytes in range(40, 200, 3):
        pruned = prune_katz(model, max_bytes=4096 + num_bytes)
        if len(pruned.levels[2].contexts) == 1:
            sizes.append(num_bytes)
            assert pruned.levels[2].contexts.tolist() == [1 * V + 2]
            assert law(pruned, (1, 2)).argmax() == 3
    assert sizes


@given(texts, st.integers(20, 2000))
@settings(max_examples=25, deadline=None)
def test_the_table_says_what_the_model_says(texts: Texts, num_bytes: int) -> None:
    documents, max_bytes = documents_of(texts), 4096 + num_bytes
    table = estimate_katz(documents, vocab_size=V, max_bytes=max_bytes)
    model = prune_katz(fit_katz(documents, V), max_bytes=max_bytes)
    for context in contexts():
        ranked, expected = table.ranked(context), law(model, context)
        assert [chance for chance, _ in ranked] == sorted((chance for chance, _ in ranked), reverse=True)
        for chance, token_id in ranked:
            assert chance == pytest.approx(expected[token_id], rel=0.11, abs=1e-4)
        named = {token_id for _, token_id in ranked}
        assert set(np.unique([text for texts in texts for text in texts])) <= named, "five ids fit every list"


# From a draft to its table


def test_a_drafts_table(
    make_draft: Callable[..., DraftModel], make_examples: Callable[..., Examples], tmp_path: Path
) -> None:
    draft, examples = make_draft(), make_examples(tmp_path, [60] * 30)
    told: list[tuple[int, int]] = []
    ticks = iter(range(100))
    out, folder = tmp_path / "draft" / "ngram.safetensors", tmp_path / "samples"
    report = train_ngram(
        draft,
        examples,
        out,
        folder,
        {"fingerprint": "f"},
        num_tokens=3000,
        max_bytes=20_000,
        settings=SampleSettings(length=4),
        progress=lambda *done: told.append(done),
        clock=lambda: float(next(ticks)),
    )
    assert report.num_sampled >= 3000 == told[-1][0]
    assert report.file_bytes == out.stat().st_size <= 20_000
    assert report.sampling_s == report.estimating_s == 1
    assert read_facts(out)["num_tokens"] == str(report.num_sampled)
    table = read_katz(out, "f", 60)
    assert report.num_trigram_contexts == len(table.levels[2].contexts) > 0
    greedy = SampleSettings(length=4, temperature=0.0)
    tested = Sampler(draft, examples, greedy).continue_all(np.array([0, 24]), 0).documents
    ranks = []
    for number in range(len(tested)):
        text = tested[number].tolist()
        for end in range(2, len(text)):
            ranked = [token_id for _, token_id in table.ranked((text[end - 2], text[end - 1]))]
            ranks.append(ranked.index(text[end]) if text[end] in ranked else 99)
    assert report.num_tested == len(ranks)
    assert report.agreement == {best: sum(rank < best for rank in ranks) / len(ranks) for best in (1, 4)}
    assert 0 < report.agreement[1] < report.agreement[4] < 1


def test_without_held_out_text_nothing_is_sampled(
    make_draft: Callable[..., DraftModel], make_examples: Callable[..., Examples], tmp_path: Path
) -> None:
    examples = make_examples(tmp_path, [4, 60, 60])  # the first is held out, and too short
    with pytest.raises(InputError, match="none of 1 texts of the target has an answer to continue: write more text"):
        train_ngram(make_draft(), examples, tmp_path / "out", tmp_path / "samples", {"fingerprint": "f"})
    assert not (tmp_path / "samples").exists()
