"""What may follow an output: against a slow twin, in any order of asking, at its ends, and where nothing can."""

from __future__ import annotations

import random
import sys
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from torch import Tensor

from foretell.errors import ConfigError, NumericsError
from foretell.params import SamplingParams
from foretell.text.tokenizer import Tokenizer
from foretell.verify.choose import TokenChooser
from foretell.verify.constraint import Constraint, Grammars, check_grammar
from foretell.verify.edits import Context
from foretell.verify.noise import gumbel_noise_array
from foretell.verify.processors import Law, Processors
from foretell.verify.typical import verify_typical
from tiny import letters
from toy import (
    DRAWN_RULES,
    EXACT,
    IN_ORDER,
    INDEPENDENT,
    LOGITS,
    PROMPT,
    DrawNode,
    Toy,
    Verify,
    draw_tree,
    enumerate_outcomes,
    enumerate_step,
    run_step,
)
from toy import V as TOY_V

EOS, V = 2, 64
LETTERS = letters(V, EOS, 7)
GRAMMARS = Grammars(LETTERS, [EOS])
WORDS = ["ab", "aba", "bab", "babcde", "c", "cb", "cbc"]
PREFIXES = sorted({word[:size] for word in WORDS for size in range(len(word) + 1)})
NESTED = r"((ab|cd)[e-h]{2,4}-?){1,3}|[^a-c]{3,}z"


def constraint(grammars: Grammars = GRAMMARS, **parameters: Any) -> Constraint:
    made = grammars.constraint(SamplingParams(**parameters))
    assert made is not None
    return made


def context(text: str) -> Context:
    """Return a text's ids behind a prompt of two tokens."""
    return Context([9, 11, *LETTERS.encode(text)], 2)


def allowed(constraint: Constraint, text: str, num_ids: int = V) -> set[str | None]:
    """Return the tokens that may follow a text."""
    narrowed = constraint.narrow(np.zeros(num_ids, np.float32), context(text))
    return {LETTERS.token(int(token_id)) for token_id in np.flatnonzero(narrowed == 0)}


# What may follow


@pytest.mark.parametrize("seed", range(3))
def test_what_may_follow_is_what_some_word_goes_on_with(seed: int) -> None:
    """In any order of asking: a branch of a tree, the emitted output again, another branch."""
    one = constraint(regex="|".join(WORDS))
    order = PREFIXES * 3
    random.Random(seed).shuffle(order)
    for prefix in order:
        longer = {other[-1] for other in PREFIXES if other[:-1] == prefix and other}
        assert allowed(one, prefix) == longer | ({f"<|{EOS}|>"} if prefix in WORDS else set())


@pytest.mark.parametrize("grammar", [{"regex": NESTED}, {"json_schema": {"enum": [101, 1012, 77]}}])
def test_a_matcher_that_went_back_and_forth_knows_no_more_than_a_fresh_one(grammar: dict[str, Any]) -> None:
    draw, one, text = random.Random(0), constraint(**grammar), ""
    for _ in range(150):
        text = text[: draw.randrange(len(text) + 1)] if draw.random() < 0.3 else text
        after = allowed(one, text)
        assert after == allowed(constraint(**grammar), text)
        text += draw.choice([token for token in sorted(map(str, after)) if len(token) == 1] or [""])


def test_scores_of_what_may_follow_stay_as_they_are() -> None:
    scores = np.random.default_rng(0).standard_normal(V).astype(np.float32)  # [V]
    scores[LETTERS.encode("d")] = -np.inf
    before = scores.copy()  # [V]
    narrowed = constraint(regex="[bdf]").narrow(scores, context(""))
    assert (scores == before).all()
    assert set(np.flatnonzero(narrowed > -np.inf)) == {*LETTERS.encode("bf")}
    assert (narrowed[LETTERS.encode("bdf")] == before[LETTERS.encode("bdf")]).all()


@pytest.mark.parametrize("num_ids", [V - 30, V + 1, 3 * V])
def test_rows_that_are_not_as_wide_as_the_tokenizer(num_ids: int) -> None:
    assert allowed(constraint(regex="[a-z]"), "", num_ids) == set("abcdefghijklmnopqrstuvwxyz"[: num_ids - 2])


def test_every_eos_id_ends_and_special_tokens_are_no_text() -> None:
    grammars = Grammars(LETTERS, [EOS, 7, V + 5])
    assert allowed(constraint(grammars, regex="a."), "a") == {LETTERS.token(at) for at in range(V)} - {"<|2|>", "<|7|>"}
    assert allowed(constraint(grammars, regex="ab?"), "a") == {"b", "<|2|>", "<|7|>"}
    assert allowed(constraint(grammars, regex="ab?"), "ab") == {"<|2|>", "<|7|>"}


def test_sequences_under_one_grammar_are_apart() -> None:
    left, right = constraint(regex="ab|cd"), constraint(regex="ab|cd")
    assert allowed(left, "a") == {"b"}
    assert allowed(right, "c") == {"d"}
    assert allowed(left, "a") == {"b"}


TOKENS = ["<end>", "[", "]", "1", ",", "Ġ"]


def is_space_allowed(*, num_spaces: int, **options: Any) -> bool:
    """Return whether a space may follow that many, in a list of ones."""
    backend = Backend(models.BPE(vocab={token: at for at, token in enumerate(TOKENS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    schema = {"type": "array", "items": {"const": 1}, **({"x-guidance": options} if options else {})}
    one = constraint(Grammars(Tokenizer(backend), [0]), json_schema=schema)
    narrowed = one.narrow(np.zeros(len(TOKENS), np.float32), Context([1, *[5] * num_spaces], 0))
    return bool(narrowed[5] == 0)


def test_white_space_in_json_has_an_end() -> None:
    assert [is_space_allowed(num_spaces=number) for number in (0, 63, 64)] == [True, True, False]


def test_a_schema_may_set_its_own_white_space() -> None:
    assert is_space_allowed(num_spaces=500, whitespace_flexible=True)
    assert not is_space_allowed(num_spaces=0, whitespace_flexible=False)
    assert [is_space_allowed(num_spaces=number, whitespace_pattern=" {1,2}") for number in (1, 2)] == [True, False]
    assert not is_space_allowed(num_spaces=64, item_separator=";")


# In the order of processors


def law(constraint: Constraint | None, logits: Tensor, **parameters: Any) -> Law:
    params = SamplingParams(**parameters)
    processors = Processors(params, num_prompt_tokens=1, eos_ids=[EOS], vocab_size=V, constraint=constraint)
    return processors.law(logits, [5, *LETTERS.encode("a")])


@pytest.mark.parametrize("regex", ["a[bx]", "a.", "a(b|c|d|[^x])"])
@pytest.mark.parametrize(
    "parameters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"typical_p": 0.6}, {"presence_penalty": 1.0}, {}]
)
def test_the_law_is_that_under_bans(regex: str, parameters: dict[str, Any]) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1))  # [V]
    one = constraint(regex=regex)
    bans = {at: -np.inf for at in range(V) if LETTERS.token(at) not in allowed(one, "a")}
    ours = law(one, logits, temperature=0.8, regex=regex, **parameters)
    twin = law(None, logits, temperature=0.8, logit_bias=bans, **parameters)
    assert ours.ids.tolist() == twin.ids.tolist()
    assert ours.log_probs == pytest.approx(twin.log_probs, abs=1e-6)


@pytest.mark.parametrize("regex", ["a[bx]", "a."])
def test_a_draw_is_that_under_bans(regex: str) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 3  # [V]
    one = constraint(regex=regex)
    is_allowed = [LETTERS.token(at) in allowed(one, "a") for at in range(V)]
    for seed in range(40):
        params = SamplingParams(regex=regex, temperature=1.0)
        chooser = TokenChooser(
            params, num_prompt_tokens=1, eos_ids=[EOS], seed=seed, sequence_key=0, vocab_size=V, constraint=one
        )
        noisy = logits.numpy() + gumbel_noise_array(seed, 0, 2, np.arange(V))  # [V]
        chosen = chooser.choose(logits, [5, *LETTERS.encode("a")])
        assert chosen == int(np.where(is_allowed, noisy, -np.inf).argmax())


def test_no_other_score_brings_back_what_is_forbidden() -> None:
    def flatten(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores)

    ours = law(constraint(regex="ab"), torch.zeros(V), regex="ab", logits_processors=[flatten], logit_bias={9: 1e6})
    assert ours.ids.tolist() == LETTERS.encode("b")


def test_a_minimum_that_the_grammar_cannot_fill_is_told() -> None:
    with pytest.raises(
        NumericsError, match=r"`regex` allows after 1 tokens everything is forbidden: lower `min_new_to"
    ):
        law(constraint(regex="a"), torch.zeros(V), regex="a", min_new_tokens=2)


# Under other rules


TOY_GRAMMARS = Grammars(letters(TOY_V + 1, TOY_V), [TOY_V])


class ConstrainedToy(Toy):
    """The toy model, of which many a first and second token is forbidden."""

    @cache  # noqa: B019  # few and short-lived
    def law(self, path: tuple[int, ...]) -> Law:
        options = {"num_prompt_tokens": len(PROMPT), "eos_ids": (), "seed": 0, "sequence_key": 0, "vocab_size": TOY_V}
        ids = [*PROMPT, *path]
        return TokenChooser(self.params, constraint=self.constraint, **options).law(LOGITS[ids[-1]], ids)  # type: ignore[arg-type]

    @cached_property
    def constraint(self) -> Constraint:
        return constraint(TOY_GRAMMARS, regex=self.params.regex)


def constrained_toy() -> ConstrainedToy:
    return ConstrainedToy(SamplingParams(temperature=1.0, regex="(ab|ba|c[ad])[abd]*|bb+c?"))


@pytest.mark.parametrize("draw_node", [IN_ORDER, INDEPENDENT])
@pytest.mark.parametrize("verify", DRAWN_RULES)
def test_rules_that_test_draws_follow_the_constrained_law(verify: Verify, draw_node: DrawNode) -> None:
    """Drafts know nothing of the grammar: forbidden tokens are drawn, and others below them."""
    law = enumerate_step(partial(draw_tree, draw_node, (2, 1)), verify, constrained_toy())
    assert law.distance < EXACT
    assert len(law.target) < TOY_V**3 / 2


def test_typical_acceptance_says_nothing_that_is_forbidden() -> None:
    target = constrained_toy()
    outcomes = enumerate_outcomes(
        partial(run_step, partial(draw_tree, IN_ORDER, (2, 1)), verify_typical, target.law_of)
    )
    assert outcomes
    assert all(any(path == whole[: len(path)] for whole in target.extend(())) for path in outcomes)


# What there can be no constraint for


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"regex": "(ab"}, r"`regex` '\(ab' is refused \(unclosed group\): write it as"),
        ({"regex": "a(?=b)"}, r"look-around, including .* is not supported\): write"),
        ({"regex": r"(a)\1"}, r"backreferences are not supported"),
        ({"regex": "\ud800"}, r"`regex` '\\ud800' is refused"),
        ({"json_schema": {"type": "foo"}}, r"`json_schema` is refused \(Invalid type: foo\): use what llguidance"),
        ({"json_schema": {"not": {}}}, r"Unimplemented keys"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\) is greater"),
    ],
)
def test_a_grammar_that_is_refused_is_told_in_one_line(wrong: dict[str, Any], message: str) -> None:
    for check in (check_grammar, GRAMMARS.constraint):
        with pytest.raises(ConfigError, match=message) as caught:
            check(SamplingParams(**wrong))
        assert "\n" not in str(caught.value)


def test_a_regex_that_nothing_matches_is_told_before_decoding() -> None:
    with pytest.raises(ConfigError, match="`regex` cannot be followed beyond 0 tokens"):
        constraint(regex=r"[^\x00-\x{10ffff}]")


def test_a_text_that_the_vocabulary_cannot_spell_is_told() -> None:
    with pytest.raises(ConfigError, match="`regex` cannot be followed beyond 1 tokens"):
        allowed(constraint(regex="aé"), "a")


def test_a_grammar_that_outgrows_its_limits_is_told() -> None:
    one = constraint(regex="(a{1,1000}){1,1000}")
    with pytest.raises(ConfigError, match=r"beyond \d+ tokens \(lexer error: too many expressions constructed\)"):
        max(len(allowed(one, "a" * size)) for size in range(400))


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="`regex` needs a model that can end its output"):
        constraint(Grammars(LETTERS, []), regex="a")


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match=r"tokenizer cannot be held to `regex` or `json_schema` \(can't determine"):
        constraint(Grammars(Tokenizer(backend), [0]), regex="a")


def test_without_the_library_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for check in (check_grammar, Grammars(LETTERS, [EOS]).constraint):
        assert check(SamplingParams()) is None
        with pytest.raises(ConfigError, match="need llguidance, which is not installed: pip install llguidance"):
            check(SamplingParams(regex="a"))
