"""Text to token ids and back, on the `tokenizers` library alone wherever a `tokenizer.json` exists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import InputError, ModelError
from foretell.text.chat_template import ChatTemplate, Message, check_messages

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Message", "Tokenizer"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        backend: the tokenizer proper.
        special_tokens: texts of `bos_token`, `eos_token` and so on, as the chat template sees them.
        chat_template: the template's text, None for a model that has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        # A tokenizer.json may carry the limits of somebody's training run, which would cut prompts silently.
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read a model folder's tokenizer; through transformers where it has no `tokenizer.json`.

        Raises:
            ModelError: the folder has no tokenizer, or its files are corrupt.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        if path.is_file():
            backend = _read_backend(path)
        else:
            backend, special_tokens = _convert_backend(folder)
        return cls(backend, special_tokens, _find_template(folder, config))

    @cached_property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; a model's logits may be wider."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, None where there is none."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the tokenizer's own end token; a model may end with others (`ModelConfig.eos_ids`)."""
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return self._chat_template is not None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's ids; special tokens written out in the text become their ids.

        Args:
            text: any valid Unicode text; "" gives no ids but added ones.
            add_special_tokens: put BOS (or whatever the model is used to) around it.

        Raises:
            InputError: not a string, or one that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise InputError(f"a prompt must be text, got a {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not valid Unicode at character {error.start}: remove it") from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation in the model's own format.

        Raises:
            InputError: the model has no chat template, or the messages do not fit it.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)  # the template writes them

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return a conversation as the text that the model reads.

        Raises:
            InputError: the model has no chat template, or the messages do not fit it.
        """
        if self._compiled_template is None:
            check_messages(messages)
            raise InputError("this model has no chat template: use `--raw` (in Python: `generate` on plain text)")
        return self._compiled_template.render(messages, add_generation_prompt=add_generation_prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the ids' text; bytes that are no valid UTF-8 become "�", unknown ids nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def definition(self) -> str:
        """Return the tokenizer as the text of a `tokenizer.json`."""
        return str(self._backend.to_str())

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it ("Ġhello", "<0x0A>"), None for an unknown id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_text(self, token_id: int) -> str:
        """Return what a token adds to a text: leading space kept, special tokens by name, partial characters as "�"."""
        once = self.decode([token_id], skip_special_tokens=False)
        # Decoders strip the space before the first token of a text, so the token's own is seen on its second.
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    @cached_property
    def _compiled_template(self) -> ChatTemplate | None:
        return None if self._chat_template is None else ChatTemplate(self._chat_template, self._special_tokens)

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ModelError(f"{path} cannot be read ({_first_line(error)}): download the model again") from None


def _convert_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Let transformers build the tokenizer from an older format (SentencePiece, vocabulary and merges)."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = found.backend_tokenizer
    except Exception as error:
        raise ModelError(f"{folder} has no usable tokenizer ({_first_line(error)}): add its tokenizer.json") from None
    names = {name: str(text) for name in _SPECIAL_NAMES if (text := getattr(found, name, None)) is not None}
    return backend, names


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens' texts, which files hold as strings or as objects with a `content`."""
    texts = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template: a file of its own, or in `tokenizer_config.json` one text or several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read ({_first_line(error)}): download the model again") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({_first_line(error)}): download the model again") from None
    return value if isinstance(value, dict) else {}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
