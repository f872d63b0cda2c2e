"""A tiny random model on disk whose tokens are bytes, a tokenizer of letters, and the body of a tiny draft."""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretell.models.config import FULL, SLIDING, ModelConfig

if TYPE_CHECKING:
    from foretell.text.tokenizer import Tokenizer as ForetellTokenizer

EOS = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_model(folder: Path, **fields: Any) -> Path:
    """Save a two-layer llama with random weights and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate([*specials, *symbols])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast  # its stated types differ from what it takes
    tokenizer = wrap(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        additional_special_tokens=specials,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**shape, **fields})).save_pretrained(folder)
    return folder


def letters(vocab_size: int, *special_ids: int) -> ForetellTokenizer:
    """Return a tokenizer whose ids are letters and digits in order, but for special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from foretell.text.tokenizer import Tokenizer as ForetellTokenizer

    symbols = iter(string.ascii_letters + string.digits + "-,;.!?")
    vocab = {f"<|{at}|>" if at in special_ids else next(symbols): at for at in range(vocab_size)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<|{at}|>", special=True) for at in special_ids])
    return ForetellTokenizer(backend)


def draft_body(
    *, vocab_size: int, num_layers: int = 1, window: int | None = None, max_positions: int = 512, **fields: Any
) -> ModelConfig:
    """Return the body of a draft of width 16; sliding layers where there is a window."""
    return ModelConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        norm_eps=1e-5,
        max_positions=max_positions,
        hidden_act="silu",
        sliding_window=window,
        layer_types=(FULL if window is None else SLIDING,) * num_layers,
        attention_scale=0.5,
        **fields,
    )
