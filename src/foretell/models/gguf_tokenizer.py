"""The tokenizer that a GGUF file describes, written as `tokenizer.json` and `tokenizer_config.json`.

transformers' own conversion splits text by GPT-2's rule whatever the file says of SmolLM, whose numbers then get other
tokens than the model was trained on; here the rule follows `tokenizer.ggml.pre`, and an unknown one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.errors import ModelError

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, str] = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "tekken": _TEKKEN_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_GPT2_RULES = frozenset({"gpt-2", "gpt2", "default"})
_WHOLE_WORD_RULES = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Vocabularies whose words are taken whole where they are tokens, whatever the merges."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer's files into `folder`, in the layout that `tokenizers` and transformers read.

    Raises:
        ModelError: the file describes no tokenizer, or one of a kind that is not supported.
        OSError: the files cannot be written.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("the GGUF file has no vocabulary (`tokenizer.ggml.tokens`): use another file")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise ModelError(f"GGUF tokenizers of kind {kind!r} are not supported (only gpt2, llama): use another file")
    _add_special_tokens(tokenizer, metadata, tokens)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = json.dumps(_tokenizer_config(metadata, tokens), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end an answer: the file's EOS and EOT, and the turn's end that its chat template writes."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [value for key in keys if isinstance(value := metadata.get(f"tokenizer.ggml.{key}"), int)]
    template = metadata.get("tokenizer.chat_template")
    written = [token for token in _TURN_ENDS if isinstance(template, str) and token in template]
    if written:
        positions = {token: index for index, token in enumerate(metadata.get("tokenizer.ggml.tokens", []))}
        ids += [positions[token] for token in written if token in positions]
    return list(dict.fromkeys(ids))


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """Return a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen, SmolLM)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = metadata.get("tokenizer.ggml.pre", "default")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("the GGUF file has no merges (`tokenizer.ggml.merges`): use another file")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule in _WHOLE_WORD_RULES))
    if rule == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif rule in _GPT2_RULES:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif rule in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        raise ModelError(f"text-splitting rule {rule!r} of this GGUF file is not known: use the model's safetensors")
    if rule in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """Return a SentencePiece BPE tokenizer with byte fallback (Llama 2, Mistral, Gemma)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if is_gemma:  # its runs of spaces are stored as spaces, beside "▁" in words
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_derive_merges(metadata, tokens, is_gemma=is_gemma),
        unk_token=tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _derive_merges(metadata: Mapping[str, Any], tokens: Sequence[str], *, is_gemma: bool) -> list[tuple[str, str]]:
    """Recover the merges of a SentencePiece vocabulary: each token from any two others, best token first.

    The best token has the highest score; in Gemma's files, where runs of spaces and newlines have no score of their
    own, it is the first.
    """
    listed = metadata.get("tokenizer.ggml.merges")
    if isinstance(listed, list):
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in listed)]
    scores = metadata.get("tokenizer.ggml.scores")
    if is_gemma or not isinstance(scores, list):
        scores = [-float(index) for index in range(len(tokens))]
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocabulary = set(tokens)
    ranked = []
    for token, score, kind in zip(tokens, scores, types):
        if kind in (_CONTROL, _BYTE):
            continue
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


def _add_special_tokens(tokenizer: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Add the tokens that are matched whole, and the BOS and EOS that the file puts around a text."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    types = metadata.get("tokenizer.ggml.token_type") or []
    names = ["▁" * len(token) if tokenizer.token_to_id(token) is None else token for token in tokens]
    named = list(zip(names, types))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name, kind in named if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name, kind in named if kind == _USER_DEFINED])
    around = _around(metadata, tokens)
    if around:
        ids = [(tokens[token_id], token_id) for token_id in around.values()]
        start = [tokens[around["bos"]]] if "bos" in around else []
        end = [tokens[around["eos"]]] if "eos" in around else []
        tokenizer.post_processor = TemplateProcessing(single=[*start, "$A", *end], special_tokens=ids)


def _around(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids that the file adds before ("bos") and after ("eos") a text."""
    # llama.cpp puts BOS before SentencePiece text, and before Llama 3's and Tekken's, unless the file says otherwise.
    has_bos = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORD_RULES
    usual = {"bos": has_bos, "eos": False}
    around = {}
    for end, is_usual in usual.items():
        token_id = metadata.get(f"tokenizer.ggml.{end}_token_id")
        is_added = metadata.get(f"tokenizer.ggml.add_{end}_token", is_usual)
        if is_added and isinstance(token_id, int) and token_id < len(tokens):
            around[end] = token_id
    return around


def _tokenizer_config(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for field, key in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and token_id < len(tokens):
            config[field] = tokens[token_id]
    around = _around(metadata, tokens)
    return {**config, "add_bos_token": "bos" in around, "add_eos_token": "eos" in around}
