"""Plans are read while they are written, put right where they can be, and never make the reader raise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.plato.grammar import MAX_TITLE
from foretell.plato.plan import MAX_PARTS, Part, Plan
from foretell.plato.reader import PlanReader

GOOD = "1. Types of bicycles < -\n2. Budget < -\n3. Which one to buy < 1,2\nEND\n"
UNTIDY = """Here is the plan:

```
- **Step 1:** *Types of bicycles* < -
Step 2: Budget | price <- 1
   - a detail
   - another detail
4) Which one to buy < 1 and 2, 9
5 - Which one to buy? < 4
6. In conclusion
```
I hope this helps.
7. Nothing < -
"""


def read(text: str, *, is_strict: bool = False, is_cut: bool = False, max_parts: int = MAX_PARTS) -> PlanReader:
    reader = PlanReader(max_parts, is_strict=is_strict)
    reader.push(text)
    reader.close(is_cut=is_cut)
    return reader


def parts_of(text: str, *, is_cut: bool = False, max_parts: int = MAX_PARTS) -> list[tuple[str, tuple[int, ...]]]:
    reader = PlanReader(max_parts)
    reader.push(text)
    plan = reader.close(is_cut=is_cut)
    return [] if plan is None else [(part.title, part.needs) for part in plan]


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_part_is_there_as_soon_as_its_line_is(is_strict: bool) -> None:
    reader = PlanReader(is_strict=is_strict)
    assert reader.push("1. Types of bicycles < -") == []
    assert reader.push("\n2. Bud") == [Part(1, "Types of bicycles")]
    assert reader.push("get < -\n3. Which one to buy < 1,2\n") == [
        Part(2, "Budget"),
        Part(3, "Which one to buy", (1, 2)),
    ]
    assert not reader.is_ended
    assert reader.push("END\n") == []
    assert reader.is_ended
    assert not reader.is_direct
    plan = reader.close()
    assert plan is not None
    assert len(plan) == 3
    assert reader.repairs == ()


def test_a_strict_reader_does_not_wait_for_the_last_newline() -> None:
    planned, direct = PlanReader(is_strict=True), PlanReader(is_strict=True)
    planned.push(GOOD.removesuffix("\n"))
    direct.push("DIRECT")
    assert planned.is_ended
    assert direct.is_direct
    assert PlanReader(2, is_strict=True).push("1. Abc < -\n2. Def < 1\n") == [Part(1, "Abc"), Part(2, "Def", (1,))]


def test_an_untidy_plan_is_put_right() -> None:
    reader = PlanReader()
    reader.push(UNTIDY)
    assert reader.is_ended
    assert reader.close() == Plan(
        (
            Part(1, "Types of bicycles"),
            Part(2, "Budget price", (1,)),
            Part(3, "Which one to buy", (1, 2)),
            Part(4, "In conclusion", (1, 2, 3)),
        )
    )
    assert reader.repairs == (
        "part 3 needs 9, which is no part above it",
        "part 3 was written as 4",
        '"Which one to buy?" repeats part 3',
        'part 4, "In conclusion", needs all parts before it',
        "part 4 was written as 6",
    )


@pytest.mark.parametrize(
    ("text", "needs", "num_repairs"),
    [
        ("1. Abc < -\n2. Def < 2\n3. Ghi < 4,1\n", [(), (), (1,)], 2),  # itself, one below
        ("0. Abc < -\n1. Def < 0\n2. Ghi < 1\n", [(), (1,), (2,)], 3),  # counted from 0
        ("1. Abc < -\n2. Def < -\n2. Ghi < -\n3. Jkl < 2\n", [(), (), (), (3,)], 2),  # twice: the nearest above
        ("1. Abc < -\n5. Def < -\n9. Ghi < 5,1\n", [(), (), (1, 2)], 2),  # gaps
        ("1. Abc < -\n2. Abc < 1\n3. Def < -\n4. Ghi < 2,3\n", [(), (), (1, 2)], 3),  # needs a repeated part
        ("1. Abc < -\n2. Def < -\n3. Ghi < -\n4. Jkl < 1-3\n", [(), (), (), (1, 2, 3)], 0),
        ("1. Abc\n2. Def\n3. Ghi < none\n4. Jkl < the others\n", [(), (1,), (), (3,)], 2),  # not said: the one before
        ("- Abc < -\n- Def < -\n", [(), ()], 0),  # without ids
        ("1. Conclusion < -\n2. Summary < -\n3. Recap of 2 < 2\n", [(), (1,), (2,)], 1),  # only where it needs nothing
    ],
)
def test_needs(text: str, needs: list[tuple[int, ...]], num_repairs: int) -> None:
    assert [each for _, each in parts_of(text)] == needs
    assert len(read(text).repairs) == num_repairs


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("**Size and fit**", "Size and fit"),
        ("Size   and\tfit", "Size and fit"),
        ("a | b", "a b"),
        ("C++ and a < b", "C++ and a b"),
        ("C#", "C#"),
        ("a" * 70, "a" * MAX_TITLE),
        ("two words " * 7, "two words " * 3 + "two words"),
    ],
)
def test_titles_become_as_the_grammar_has_them(written: str, title: str) -> None:
    assert [each for each, _ in parts_of(f"1. Zero < -\n2. {written} < 1\n")] == ["Zero", title]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "DIRECT\n",
        "**DIRECT**",
        "1. Abc < -\nEND\n",
        "1. Abc < -\n2. abc < -\n",
        "It is 51.\nThat is all.\n1. Abc < -\n2. Def < -\n",
        "1. Abc < -\n2. Def < -\nOne line of prose\nand another\n3. Ghi < -\n",
        "1. Abc < -\n2. Def < -\n" + "a" * 301,
        "1. " + "long " * 30 + "\n2. ... < -\n3. Abc < -\n4. Def < -\n",
        "3.5 million people\n2.5 million more < 1\n",
        "3 reasons why\n2 more\n",
    ],
)
def test_what_is_no_plan_is_answered_directly(text: str) -> None:
    assert read(text).is_direct


def test_a_very_long_line_need_not_end() -> None:
    reader = PlanReader()
    reader.push("a" * 300)
    assert not reader.is_direct
    reader.push("a")
    assert reader.is_direct


def test_prose_after_a_plan_ends_it() -> None:
    reader = PlanReader()
    reader.push("1. Abc < -\n2. Def < -\n\nNow I write the first part.\n")
    assert reader.is_ended
    reader.push("It is\nlong\n3. Ghi < -\n")
    assert reader.close() == Plan((Part(1, "Abc"), Part(2, "Def")))
    assert len(parts_of("1. Abc < -\n\nOne line of prose\n2. Def < -\n")) == 2
    assert parts_of("1. Abc < -\none line\n2. Def < -\nof prose each\n3. Ghi < -\n")[2:] == [("Ghi", ())]


def test_reading_ends_after_the_most_lines() -> None:
    text = "".join(f"{k}. Title {k} < -\n" for k in range(1, 5))
    reader = PlanReader(3)
    assert len(reader.push(text + "prose\nprose\n")) == 3
    assert reader.is_ended
    assert not reader.is_direct
    assert reader.repairs == ("more than 3 parts: the others are left out",)
    assert read("1. Abc < -\n2. Def < -\nEND\n1. Ghi < -\n", max_parts=2).repairs == ()
    repeating = PlanReader()
    repeating.push("1. Abc < -\n" * 8)
    assert repeating.is_ended


def test_the_last_line_needs_no_newline_unless_it_is_cut_off() -> None:
    text = "1. Abc < -\n2. Def < -\n3. Ghi < 1"
    assert [needs for _, needs in parts_of(text)] == [(), (), (1,)]
    assert [needs for _, needs in parts_of(text, is_cut=True)] == [(), ()]
    assert read(text, is_cut=True, is_strict=True).repairs == ("cut off after 2 parts",)


def test_a_strict_reader_repairs_only_what_is_meant() -> None:
    text = "1. Abc < -\n2. Abc < 1\n3. Def < 1,2\n4. Summary < -\nEND\n"
    reader = PlanReader(is_strict=True)
    assert [part.needs for part in reader.push(text)] == [(), (1,), (1, 2)]
    assert len(reader.repairs) == 4  # of these two say that later parts move up
    for untidy in ("- 1. Abc < -\n", "1. Abc\n", "Plan:\n", "1. Ab < -\n", "1. **Abc < -\n2. Abc <-\n"):
        assert read(untidy + GOOD, is_strict=True).is_direct


LINES = st.sampled_from(
    [
        *UNTIDY.splitlines(),
        *GOOD.splitlines(),
        "",
        "DIRECT",
        "END",
        "ENDING",
        "prose",
        "9" * 400,
        "1. Summary",
        "2.5 < 1",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(LINES, st.text("12<-.,| \n\rEND*aé", max_size=12))).map("\n".join))


@given(TEXTS, st.lists(st.integers(0, 200)), st.booleans(), st.booleans(), st.integers(2, MAX_PARTS))
def test_pieces_do_not_matter_and_nothing_raises(
    text: str, cuts: list[int], is_strict: bool, is_cut: bool, max_parts: int
) -> None:
    whole, pieces = PlanReader(max_parts, is_strict=is_strict), PlanReader(max_parts, is_strict=is_strict)
    at_once = whole.push(text)
    cuts = sorted(cut % (len(text) + 1) for cut in cuts)
    pushed = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pushed += pieces.push(text[start:end])
    assert pushed == at_once
    assert (whole.is_direct, whole.is_ended, whole.repairs) == (pieces.is_direct, pieces.is_ended, pieces.repairs)
    plan = whole.close(is_cut=is_cut)
    assert pieces.close(is_cut=is_cut) == plan
    assert whole.repairs == pieces.repairs
    assert all(repair.isprintable() or repair.splitlines() == [repair] for repair in whole.repairs)
    assert (plan is None) == whole.is_direct
    if plan is not None:
        assert plan.parts[: len(at_once)] == tuple(at_once)
        assert len(plan) - len(at_once) <= 1
        assert 2 <= len(plan) <= max_parts
    for part in at_once:
        assert part.title == part.title.strip()
        assert not set(part.title) & set("|<\n")


@given(TEXTS)
def test_a_plan_that_is_ended_stays_as_it_is(more: str) -> None:
    for text, max_parts in ((GOOD, MAX_PARTS), (GOOD.removesuffix("END\n"), 3)):
        reader = PlanReader(max_parts)
        parts = reader.push(text)
        assert reader.is_ended
        assert reader.push(more) == []
        assert reader.close() == Plan(tuple(parts))
