"""Tiny tokenizers of every kind of decoder, trained on a few lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from foretell.text.tokenizer import Tokenizer as ForetellTokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "naïve café — déjà vu, 你好世界, 🤖🎉 are not ASCII",
    "def add(x, y):\n    return x + y\n\n\n# 12345",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """Return a tokenizer as GPT-2's: characters beyond the training text are several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece() -> Tokenizer:
    """Return a tokenizer as Llama 2's: a first space is dropped, unknown characters are byte tokens."""
    words = ["▁", *"abcdehinorst.,!", "▁t", "he", "▁the", "in", "on", "�", "é"]
    tokens = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("o", "n")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(SPECIAL)
    return backend


def gemma() -> Tokenizer:
    """Return a tokenizer as Gemma's: bytes, but no space is added or dropped."""
    backend = sentencepiece()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def metaspace() -> Tokenizer:
    """Return a unigram tokenizer as T5's, with Metaspace as its decoder."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False, unk_token="<s>")
    backend.train_from_iterator(LINES, trainer)
    return backend


def wordpiece() -> Tokenizer:
    """Return a tokenizer as BERT's."""
    backend = Tokenizer(models.WordPiece(unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": gemma,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, ForetellTokenizer]:
    """Return one tokenizer of every kind, by the name of the kind."""
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return {kind: ForetellTokenizer(build(), names) for kind, build in KINDS.items()}


@pytest.fixture
def backend() -> Tokenizer:
    """Return a byte-level tokenizer of the `tokenizers` library, to be saved."""
    return byte_level()
