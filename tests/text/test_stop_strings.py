"""Stop strings against a search through the whole text, whatever pieces it comes in."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretell.text.detokenizer import Detokenizer
from foretell.text.stop_strings import StopStrings
from foretell.text.tokenizer import Tokenizer

WORDS = st.text(alphabet="ab\n", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def search(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the stop string that ends first, the longest of those; and whether there is one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def scan(chunks: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner, shown = StopStrings(stops), ""
    for chunk in chunks:
        scanned = scanner.push(chunk)
        shown += scanned.text
        if scanned.is_stopped:
            assert scanner.flush() == ""
            return shown, True
    return shown + scanner.flush(), False


@given(chunks=st.lists(WORDS, max_size=8), stops=STOPS)
@example(chunks=["a", "ab", "b"], stops=["aab", "ab"])
@example(chunks=["abab", "aa"], stops=["ababaa", "ba"])
def test_the_same_as_a_search_through_the_whole_text(chunks: list[str], stops: list[str]) -> None:
    assert scan(chunks, stops) == search("".join(chunks), stops)


@given(chunks=st.lists(WORDS, max_size=8), stops=STOPS)
def test_nothing_is_held_back_longer_than_it_could_become_a_stop_string(chunks: list[str], stops: list[str]) -> None:
    scanner, shown, pushed = StopStrings(stops), "", ""
    for chunk in chunks:
        pushed += chunk
        scanned = scanner.push(chunk)
        shown += scanned.text
        if scanned.is_stopped:
            return
        held = pushed[len(shown) :]
        assert shown + held == pushed
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_all_text_passes() -> None:
    assert scan(["a", "", "b\n"], []) == ("ab\n", False)


@pytest.mark.parametrize("size", range(1, 12))
def test_transformers_48039_a_stop_string_inside_an_accepted_block_stops_it(size: int) -> None:
    text = "one two STOP three four"  # one accepted block, pushed in pieces of every size
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert scan(chunks, ["STOP"]) == ("one two ", True)


@pytest.mark.parametrize("num_after", [0, 1, 10, 1000])
def test_sglang_23802_and_27637_a_stop_string_early_in_a_long_block_is_found(num_after: int) -> None:
    # The bug: only a tail of fixed length was searched, so a match far before the block's end was missed.
    assert scan(["ab", "c" + "x" * num_after], ["abc"]) == ("", True)
    assert scan(["..ab", "c" + "x" * num_after], ["no", "abc"]) == ("..", True)


def test_vllm_47616_no_text_of_the_stop_string_or_after_it_is_shown(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("the fox.\n\n# 12345 jumps", add_special_tokens=False)
    detokenizer, scanner, shown, num_taken = Detokenizer(tokenizer), StopStrings(["\n\n#"]), [], 0
    for token_id in token_ids:
        num_taken += 1
        scanned = scanner.push(detokenizer.push(token_id))
        shown.append(scanned.text)
        if scanned.is_stopped:
            break
    assert "".join(shown) == "the fox."
    assert scanner.matched == "\n\n#"
    assert tokenizer.decode(token_ids[:num_taken]).startswith("the fox.\n\n#")
    assert "\n\n#" not in tokenizer.decode(token_ids[: num_taken - 1])


def test_a_stop_string_may_end_inside_a_token() -> None:
    assert scan(["go", "od-bye now"], ["-bye"]) == ("good", True)
    assert scan(["go", "od-b", "y"], ["-bye"]) == ("good-by", False)


def test_of_two_that_end_together_the_longer_is_cut() -> None:
    assert scan(["xab"], ["b", "ab"]) == ("x", True)
