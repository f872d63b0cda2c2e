"""Whatever the order in which parts are written, the answer is read from the top and only ever goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretell.plato.assembly import Assembly
from foretell.plato.plan import Part


def assembly_of(*titles: str, has_headings: bool = False) -> Assembly:
    assembly = Assembly(has_headings=has_headings)
    for part_id, title in enumerate(titles, start=1):
        assembly.add(Part(part_id, title))
    return assembly


def test_the_first_part_streams_and_the_others_wait() -> None:
    assembly = assembly_of("One", "Two", "Three")
    assert assembly.push(2, "second") == ""
    assert assembly.push(1, "\n fir") == "fir"
    assert assembly.push(1, "st ") == "st"
    assert assembly.end(3) == ""
    assert assembly.push(1, "\n\n") == ""
    assert assembly.push(1, "part\n") == " \n\npart"
    assert assembly.end(1) == "\n\nsecond"
    assert assembly.push(2, "!") == "!"
    assert assembly.end(2) == ""
    assert assembly.text == "first \n\npart\n\nsecond!"


def test_a_part_may_be_planned_when_those_before_it_have_ended() -> None:
    assembly = assembly_of("One")
    assert assembly.push(1, "first") == "first"
    assert assembly.end(1) == ""
    assembly.add(Part(2, "Two"))
    assert assembly.push(2, "second") == "\n\nsecond"


def test_headings_stand_above_parts_that_have_text() -> None:
    assembly = assembly_of("One", "Two", "Three", has_headings=True)
    assert assembly.push(1, " ") == ""
    assert assembly.push(1, "first") == "**One**\n\nfirst"
    assert assembly.push(2, " \n") == ""
    assert assembly.push(3, "third") == ""
    assert assembly.end(1) == ""
    assert assembly.end(2) == "\n\n**Three**\n\nthird"


@given(st.data(), st.lists(st.text(" \nab", max_size=12), min_size=1, max_size=6), st.booleans())
def test_the_answer_does_not_depend_on_the_order(data: st.DataObject, texts: list[str], has_headings: bool) -> None:
    assembly = assembly_of(*["Title"] * len(texts), has_headings=has_headings)
    left, open_ids, output = list(texts), set(range(1, len(texts) + 1)), ""
    while open_ids:
        part_id = data.draw(st.sampled_from(sorted(open_ids)))
        text = left[part_id - 1]
        size = data.draw(st.integers(min(1, len(text)), len(text)))
        left[part_id - 1] = text[size:]
        output += assembly.push(part_id, text[:size])
        assert output == output.strip()
        if not left[part_id - 1]:
            output += assembly.end(part_id)
            open_ids.remove(part_id)
    heading = "**Title**\n\n" if has_headings else ""
    assert output == assembly.text == "\n\n".join(heading + text.strip() for text in texts if text.strip())
