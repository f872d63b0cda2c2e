"""The expression, llama.cpp's grammar and the strict reader accept the same plans."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.plato.grammar import MAX_TITLE, plan_gbnf, plan_grammar
from foretell.plato.plan import MAX_PARTS, Part
from foretell.plato.reader import PlanReader
from plan_lab import plans, titles, written

LONG = "a " * (MAX_TITLE - 1) + "a"
ACCEPTED = [
    "DIRECT\n",
    "1. Types of bicycles < -\n2. Size and fit < -\nEND\n",
    "1. Abc < -\n2. Über ½ 简介 < 1\n3. C++ > D, e.g. 1. f < 1,2\nEND\n",
    f"1. {LONG} < -\n2. {'x' * MAX_TITLE} < 1\n3. Abc < 2\n4. Abc < 1,3\nEND\n",
    "".join(f"{k}. Title {k} < {','.join(map(str, range(1, k))) or '-'}\n" for k in range(1, 9)) + "END\n",
]
REFUSED = [
    "",
    "END\n",
    "DIRECT",
    "DIRECT\n1. Abc < -\n2. Abc < -\nEND\n",
    "1. Abc < -\nEND\n",
    "1. Abc < -\n2. Abc < -\n",
    "1. Abc < -\n2. Abc < -\nEND",
    "1. Abc < -\n3. Abc < -\nEND\n",
    "1. Abc < -\n2. Abc < 2\nEND\n",
    "1. Abc < 1\n2. Abc < 1\nEND\n",
    "1. Abc < -\n2. Abc < 1\n3. Abc < 2,1\nEND\n",
    "1. Abc < -\n2. Abc < 1\n3. Abc < 1,1\nEND\n",
    "1. Abc < -\n2. Abc <\nEND\n",
    "1. Abc < -\n2. Abc < \nEND\n",
    "1. Ab < -\n2. Abc < -\nEND\n",
    "1.  Abc < -\n2. Abc < -\nEND\n",
    "1. Abc  < -\n2. Abc < -\nEND\n",
    "1. A  bc < -\n2. Abc < -\nEND\n",
    "1. A|bc < -\n2. Abc < -\nEND\n",
    "1. A<bc < -\n2. Abc < -\nEND\n",
    "1. A\tbc < -\n2. Abc < -\nEND\n",
    f"1. {LONG} a < -\n2. Abc < -\nEND\n",
    "".join(f"{k}. Title {k} < -\n" for k in range(1, 10)) + "END\n",
]


def test_the_expression_accepts_plans_and_nothing_else() -> None:
    grammar = plan_grammar()
    assert [plan for plan in ACCEPTED if not re.fullmatch(grammar, plan)] == []
    assert [plan for plan in REFUSED if re.fullmatch(grammar, plan)] == []
    assert not re.fullmatch(plan_grammar(may_be_direct=False), "DIRECT\n")
    assert re.fullmatch(plan_grammar(may_be_direct=False), ACCEPTED[1])


@pytest.mark.parametrize("max_parts", range(2, MAX_PARTS + 1))
def test_plans_have_at_most_so_many_parts(max_parts: int) -> None:
    for num_parts in range(2, MAX_PARTS + 1):
        plan = "".join(f"{k}. Title < -\n" for k in range(1, num_parts + 1)) + "END\n"
        assert bool(re.fullmatch(plan_grammar(max_parts), plan)) == (num_parts <= max_parts)


def test_only_portable_syntax_is_used() -> None:
    grammar = plan_grammar()
    assert len(grammar) < 1000
    assert "(?" not in grammar
    assert set(re.findall(r"\\.", grammar)) == {r"\n", r"\.", r"\t", r"\r"}
    assert set(re.findall(r"\[.*?\]", grammar)) == {r"[^ \t\r\n|<]"}
    assert len(plan_gbnf()) < 2000


@given(plans(titles()))
def test_every_plan_can_be_written(parts: list[Part]) -> None:
    assert re.fullmatch(plan_grammar(), written(parts))
    reader = PlanReader(is_strict=True)
    read = reader.push(written(parts))
    assert reader.is_ended
    if not reader.repairs:
        assert read == parts


@given(st.from_regex(plan_grammar(), fullmatch=True))
def test_the_strict_reader_understands_whatever_the_expression_accepts(text: str) -> None:
    reader = PlanReader(is_strict=True)
    reader.push(text)
    assert reader.is_ended
    num_parts = text.count("\n") - 1 - sum("repeats" in repair for repair in reader.repairs)
    plan = reader.close()
    assert (0 if plan is None else len(plan)) == (num_parts if num_parts >= 2 else 0)


class Llguidance:
    """Accepts or refuses bytes, one token each."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __init__(self, module: ModuleType, grammar: str) -> None:
        tokenizer = module.LLTokenizer(module.TokenizerWrapper(self))
        assert module.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer) == (False, [])
        self._matcher = module.LLMatcher(tokenizer, grammar)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def accepts(self, text: str) -> bool:
        ids = self(text)
        self._matcher.reset()
        return self._matcher.try_consume_tokens(ids) == len(ids) and self._matcher.is_accepting()

    def ends_after(self, text: str) -> bool:
        """Return whether nothing may follow a text that is accepted."""
        return self.accepts(text) and self._matcher.is_stopped()


def test_llguidance_reads_the_expression_as_python_does() -> None:
    module = pytest.importorskip("llguidance")
    engine = Llguidance(module, module.LLMatcher.grammar_from_regex(plan_grammar()))
    assert [plan for plan in ACCEPTED if not engine.ends_after(plan)] == []
    assert [plan for plan in REFUSED if engine.accepts(plan)] == []


@pytest.mark.parametrize("may_be_direct", [True, False])
def test_both_grammars_are_one_language(may_be_direct: bool) -> None:
    module = pytest.importorskip("llguidance")
    lark = pytest.importorskip("llguidance.gbnf_to_lark").any_to_lark
    for max_parts in (2, 3, MAX_PARTS):
        engine = Llguidance(module, lark(plan_gbnf(max_parts, may_be_direct=may_be_direct)))
        expression = re.compile(plan_grammar(max_parts, may_be_direct=may_be_direct))
        for plan in ACCEPTED + REFUSED:
            assert engine.accepts(plan) == bool(expression.fullmatch(plan)), plan
