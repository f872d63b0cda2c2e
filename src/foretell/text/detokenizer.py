"""Token ids to text, one at a time, with the same result as decoding them all at once."""

from __future__ import annotations

import re

from foretell.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "�"


class Detokenizer:
    """Gives the text that each token completes; never a part of a character.

    The texts of all pushes and of `flush` joined are `tokenizer.decode(all ids)`. A token's text depends on the one
    before it (the space before a first word is dropped), so each is decoded behind the group that was completed last.

    `tokenizers.decoders.DecodeStream` does the same, but fails on byte tokens that turn out not to be valid UTF-8.

    Cost: two decodings of a few tokens per push.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        """The last group whose text is complete."""
        self._held: list[int] = []
        """Tokens since then."""
        self._num_given = 0
        """Characters of both that were given already."""

    def push(self, token_id: int) -> str:
        """Take in a token and return the text that is now certain; may be empty."""
        token = self._tokenizer.token(token_id)
        if token is None or token_id in self._tokenizer.special_ids:
            return ""
        self._held.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            # A run of byte tokens with one invalid byte decodes to replacement characters throughout,
            # so none of its text is certain before the run ends.
            return ""
        text = self._text()
        # The last replacement character may be the beginning of a character; those before it are settled.
        is_complete = not text.endswith(_REPLACEMENT)
        given = self._give(text if is_complete else text[:-1])
        if is_complete:
            self._context, self._held = self._held, []
            self._num_given = len(self._text())
        return given

    def flush(self) -> str:
        """Return what is held back, at the end of a text: incomplete characters become "�"."""
        given = self._give(self._text())
        self._context, self._held, self._num_given = [], [], 0
        return given

    def _text(self) -> str:
        return self._tokenizer.decode(self._context + self._held)

    def _give(self, text: str) -> str:
        given = text[self._num_given :]
        self._num_given = max(self._num_given, len(text))
        return given
