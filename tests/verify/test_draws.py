"""Drawing children, the chance behind it, and what rules do at the edges of a law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from foretell.errors import ConfigError, NumericsError
from foretell.params import SamplingParams
from foretell.tree.draws import DrawMode, Draws
from foretell.tree.pack import PackedTree, pack
from foretell.tree.token_tree import TokenTree
from foretell.verify.chance import KeyedChance
from foretell.verify.choose import TokenChooser
from foretell.verify.draws import draw_children
from foretell.verify.processors import Law
from foretell.verify.rejection import verify_rejection
from foretell.verify.residual import Residual
from foretell.verify.rule import make_rule
from foretell.verify.traversal import verify_traversal
from foretell.verify.typical import verify_typical

DRAWN_RULES = [verify_rejection, verify_traversal]
IDS = np.arange(4)
PROBS = np.array([0.1, 0.0, 0.6, 0.3])
ALMOST_1 = 1.0 - 2.0**-53


class Numbers(KeyedChance):
    """The chance of production with numbers of one's own."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def _uniform(self) -> float:
        return self.numbers.pop(0)


def law(*probs: float) -> Law:
    possible = np.flatnonzero(probs)
    return Law(ids=possible, log_probs=np.log(np.array(probs)[possible]))


def star(ids: Sequence[int], draws: Draws | None, root: int = 0) -> PackedTree:
    """Return a root with children."""
    tree = TokenTree.root(root)
    for token_id in ids:
        tree.add(0, token_id, -0.1 * len(tree), "toy")
    tree.draws = None if draws is None else {0: draws}
    return pack(tree)


# Chance


def test_numbers_are_uniform_and_differ_by_every_part_of_the_key() -> None:
    def numbers(*key: Any) -> list[float]:
        chance = KeyedChance(*key)
        return [chance._uniform() for _ in range(2000)]

    base = numbers("verify", 1, 2, 3)
    assert base == numbers("verify", 1, 2, 3)
    assert 0.0 <= min(base) < 0.01 < 0.99 < max(base) < 1.0
    assert np.mean(base) == pytest.approx(0.5, abs=0.03)
    for other in [("draft", 1, 2, 3), ("verify", 0, 2, 3), ("verify", 1, 0, 3), ("verify", 1, 2, 4)]:
        assert abs(np.corrcoef(base, numbers(*other))[0, 1]) < 0.1


def test_zero_accepts_nothing_that_the_target_never_says() -> None:
    assert not Numbers(0.0).accepts(0.0, 0.5)
    assert Numbers(0.0).accepts(1e-300, 0.5)
    assert Numbers(ALMOST_1).accepts(0.5, 0.5)
    assert not Numbers(0.5).accepts(0.25, 0.5)


def test_no_number_draws_what_has_no_weight() -> None:
    assert [Numbers(number).draw(PROBS) for number in (0.0, 0.05, 0.11, 0.69, 0.71, ALMOST_1)] == [0, 0, 2, 2, 3, 3]
    for weights in ([0.0, 1.0, 0.0], [0.0, 1e-300, 0.0], [0.0, 3e300, 0.0]):
        assert {Numbers(number).draw(np.array(weights)) for number in (0.0, 0.5, ALMOST_1)} == {1}
    tenths = np.append(np.full(10, 0.1), 0.0)
    assert Numbers(1.0).draw(tenths) == 9  # even a number that cannot be


# Drawing


@pytest.mark.parametrize("mode", DrawMode)
def test_draws_follow_their_law(mode: DrawMode, p_value: Callable[..., float]) -> None:
    counts = Counter(draw_children(IDS, PROBS, 2, KeyedChance("draft", seed, 0, 0), mode).ids for seed in range(2000))
    left = 1.0 - PROBS if mode is DrawMode.WITHOUT_REPLACEMENT else np.ones(4)
    expected = {
        (a, b): PROBS[a] * PROBS[b] / left[a]
        for a in (0, 2, 3)
        for b in (0, 2, 3)
        if a != b or mode is DrawMode.INDEPENDENT
    }
    assert sum(expected.values()) == pytest.approx(1.0)
    assert p_value(counts, expected) > 1e-3


def test_an_exhausted_law_gives_fewer_draws() -> None:
    draws = draw_children(IDS, PROBS, 9, KeyedChance("draft", 0, 0, 0))
    assert sorted(draws.ids) == [0, 2, 3]
    assert PROBS.tolist() == [0.1, 0.0, 0.6, 0.3]
    assert draws.law_probs is PROBS
    assert len(draw_children(IDS, PROBS, 9, KeyedChance("draft", 0, 0, 0), DrawMode.INDEPENDENT).ids) == 9


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_after_an_exhausted_law_the_rest_is_drawn(verify: Any) -> None:
    """All that the draft knows is turned down; what is left is what it never says."""
    draws = Draws((1, 0), np.array([0, 1]), np.array([0.5, 0.5]))
    verdict = verify(star((1, 0), draws), lambda row, path: law(0.1, 0.1, 0.4, 0.4), Numbers(0.9, 0.9, 0.0))
    assert (verdict.accepted, verdict.last_token) == ([], 2)


# Edges of the two laws


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_a_child_that_the_target_never_says_is_never_accepted(verify: Any) -> None:
    draws = Draws((1,), IDS, np.array([0.0, 1.0, 0.0, 0.0]))
    verdict = verify(star((1,), draws), lambda row, path: law(0.5, 0.0, 0.5, 0.0), Numbers(0.0, 0.0, 0.0))
    assert (verdict.accepted, verdict.last_token) == ([], 0)


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_ids_beyond_the_vocabulary_are_never_emitted(verify: Any) -> None:
    """A draft's vocabulary may be padded wider than the target's."""
    draws = Draws((700, 2), np.array([2, 700]), np.array([0.5, 0.5]))
    for number in (0.0, ALMOST_1):
        verdict = verify(star((700, 2), draws), lambda row, path: law(0.5, 0.0, 0.5, 0.0), Numbers(number, 0.9, number))
        assert verdict.last_token in (0, 2)
        assert verdict.accepted == []


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_equal_laws_leave_nothing_and_reject_only_by_rounding(verify: Any) -> None:
    """The residual is zero: the target's law stands, and every number gives a token that it says."""
    draws = Draws((2,), IDS, PROBS * 3)
    assert verify(star((2,), draws), lambda row, path: law(*PROBS), Numbers(ALMOST_1, ALMOST_1, 0.0)).accepted == [1]
    residual = Residual(law(*PROBS), draws)
    assert residual.reject(2) <= 1e-12
    assert residual.target_prob(2) == pytest.approx(0.6)
    assert residual.draw(Numbers(ALMOST_1)) == 3


def test_a_residual_leaves_the_draws_as_they_are() -> None:
    draws = Draws((2, 0), IDS, PROBS)
    residual = Residual(law(0.4, 0.2, 0.2, 0.2), draws)
    assert residual.draft_prob(2) == pytest.approx(0.6)
    assert residual.reject(2) == pytest.approx(0.5)
    assert [residual.target_prob(token_id) for token_id in (0, 1, 2, 3, 4)] == pytest.approx([0.6, 0.4, 0.0, 0.0, 0.0])
    assert residual.draft_prob(0) == pytest.approx(0.25)
    assert PROBS.tolist() == [0.1, 0.0, 0.6, 0.3]


@pytest.mark.parametrize("verify", [*DRAWN_RULES, verify_typical])
def test_a_row_of_nan_is_an_error_and_no_token(verify: Any) -> None:
    def law_of(row: int, path: list[int]) -> Law:
        raise NumericsError("logits from the model hold nan")

    with pytest.raises(NumericsError):
        verify(star((2,), Draws((2,), IDS, PROBS)), law_of, Numbers(0.5, 0.5))


@pytest.mark.parametrize("verify", [*DRAWN_RULES, verify_typical])
def test_nothing_follows_an_end(verify: Any) -> None:
    """After an end the law is certain of that end: children below it are not accepted."""
    tree = TokenTree.chain([0, 2, 3], [0.0, -0.1, -0.2], "toy")
    tree.draws = {node: Draws((tree.token_ids[node + 1],), IDS, np.full(4, 0.25)) for node in (0, 1)}
    verdict = verify(
        pack(tree), lambda row, path: Law.certain(2) if path else law(0.0, 0.1, 0.9, 0.0), Numbers(0.0, 0.0, 0.0)
    )
    assert (verdict.accepted, verdict.last_token) == ([1], 2)


# Refusals


@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_children_that_were_not_drawn_are_refused_in_one_line(verify: Any) -> None:
    with pytest.raises(ConfigError, match="not drawn: use `verification`='match'") as caught:
        verify(star((2, 3), None), lambda row, path: law(*PROBS), Numbers(0.5, 0.5))
    assert "\n" not in str(caught.value)
    assert verify(star((), None), lambda row, path: law(*PROBS), Numbers(0.0)).last_token == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"verification": "lossless"}, "`verification` must be one of match, rejection, traversal, typical"),
        ({"verification": None}, "`verification` must be one of"),
        (
            {"verification": "typical", "temperature": 1.0},
            r"allow it \(`allow_lossy`, `--allow-lossy`\), or use 'match'",
        ),
        ({"verification": "typical", "allow_lossy": True}, "needs a `temperature` above 0"),
        ({"allow_lossy": 1}, "`allow_lossy` must be True or False"),
    ],
)
def test_params_refuse_in_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        SamplingParams(**wrong)
    assert "\n" not in str(caught.value)


def test_greedy_is_match_whatever_the_rule() -> None:
    def make(**parameters: Any) -> Any:
        params = SamplingParams(**parameters)
        options: dict[str, Any] = {"num_prompt_tokens": 1, "eos_ids": (), "vocab_size": 4}
        return make_rule(params, TokenChooser(params, seed=5, sequence_key=3, **options), 5, 3)

    assert make(verification="rejection") is None
    assert make(temperature=1.0) is None
    rule = make(temperature=1.0, verification="traversal")
    assert (rule.name, rule.seed, rule.sequence_key, rule.needs_draws) == ("traversal", 5, 3, True)
    assert not make(temperature=1.0, verification="typical", allow_lossy=True).needs_draws
