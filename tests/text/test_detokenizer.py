"""Token by token gives what decoding all at once gives, and never part of a character."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.text.detokenizer import Detokenizer
from foretell.text.tokenizer import Tokenizer

KINDS = ["byte_level", "sentencepiece", "gemma", "metaspace", "wordpiece"]


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer._backend.token_to_id(token) for token in tokens]
    assert None not in found
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_joined_pieces_equal_decoding_all(kind: str, data: st.DataObject, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    # Half of the ids from the start of the vocabulary, where special and byte tokens are; some beyond its end.
    anything = st.integers(0, tokenizer.vocab_size + 2)
    token_ids = data.draw(st.lists(anything | st.integers(0, 270), max_size=30))
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30))
def test_text_comes_back_without_a_broken_character(kind: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text)
    given = pieces(tokenizer, token_ids)
    assert "".join(given) == tokenizer.decode(token_ids)
    if "�" not in text and kind in ("byte_level", "gemma", "sentencepiece"):
        assert not any("�" in piece for piece in given)


def test_a_character_of_several_tokens_comes_whole(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("a🦊b", add_special_tokens=False)
    assert len(token_ids) > 4
    assert [piece for piece in pieces(tokenizer, token_ids) if piece] == ["a", "🦊", "b"]


def test_ordinary_text_is_given_at_once(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "sentencepiece", "gemma"):
        detokenizer = Detokenizer(tokenizers[kind])
        for token_id in tokenizers[kind].encode("the thin hat on the tin", add_special_tokens=False):
            assert detokenizer.push(token_id) or tokenizers[kind].token(token_id) == "▁"
        assert detokenizer.flush() == ""


def test_a_first_space_is_dropped_and_later_ones_are_kept(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    assert pieces(tokenizer, ids(tokenizer, "▁the", "▁the", "▁", "▁the")) == ["the", " the", " ", " the", ""]


def test_a_special_token_between_words_costs_no_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    token_ids = ids(tokenizer, "<|im_start|>", "▁the", "<|im_end|>", "▁the")
    assert pieces(tokenizer, token_ids) == ["", "the", "", " the", ""]


def test_byte_tokens_wait_for_the_end_of_their_run(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gemma"]
    fox = [f"<0x{byte:02X}>" for byte in "🦊".encode()]
    assert pieces(tokenizer, ids(tokenizer, *fox, "a")) == ["", "", "", "", "🦊a", ""]
    assert pieces(tokenizer, ids(tokenizer, *fox)) == ["", "", "", "", "🦊"]
    # One invalid byte spoils a run, the valid characters before it too: text given early would be wrong.
    assert pieces(tokenizer, ids(tokenizer, *fox, "<0xFF>", "a"))[-2] == "�" * 5 + "a"


def test_a_real_replacement_character_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gemma"]
    assert "".join(pieces(tokenizer, ids(tokenizer, "a", "�", "�", "a"))) == "a��a"


def test_invalid_bytes_do_not_pile_up(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    continuation = ids(tokenizer, *["ĺ"] * 5)  # 0x9A, never the first byte of a character
    assert pieces(tokenizer, continuation) == ["", "�", "�", "�", "�", "�"]


def test_a_cut_character_is_flushed_as_a_replacement(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("a🦊", add_special_tokens=False)[:-1]
    assert pieces(tokenizer, token_ids)[-1] == "�"
    assert pieces(tokenizer, []) == [""]
