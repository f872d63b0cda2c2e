"""Tiny random models of every family, and a decoder of ours driven row by row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.cache.kv_cache import Region
from foretell.models.decoder import Model, RowBatch
from foretell.models.load import load_model
from foretell.passes.rows import RowPacker, Rows
from foretell.passes.runner import Runner

CPU = torch.device("cpu")
WINDOW = 8
VOCAB = 97

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = BASE | {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "layer_types": LAYERS,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", BASE),
    "llama-mha-biases-tied": (
        "llama",
        BASE | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-mqa-llama3": ("llama", BASE | {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama-linear-wide-heads-gelu": (
        "llama",
        BASE
        | {
            "head_dim": 20,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        },
    ),
    "mistral-window": ("mistral", BASE | {"sliding_window": WINDOW}),
    "mistral-full": ("mistral", BASE | {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2-full": ("qwen2", BASE | {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen2-window": ("qwen2", BASE | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", BASE | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-window": (
        "qwen3",
        BASE | {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYERS},
    ),
    "gemma3": ("gemma3_text", GEMMA | {"tie_word_embeddings": True}),
    "gemma3-mqa-softcap-untied": ("gemma3_text", GEMMA | {"num_key_value_heads": 1, "final_logit_softcapping": 5.0}),
    "gemma3-long": ("gemma3_text", GEMMA | {"max_position_embeddings": 1024}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied-relu": ("gpt2", GPT2 | {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 100}),
    "phi3-window": ("phi3", BASE | {"sliding_window": WINDOW, "pad_token_id": 0}),
    "stablelm": ("stablelm", BASE | {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "olmo2": ("olmo2", BASE),
    "gpt_neox": ("gpt_neox", {name: value for name, value in BASE.items() if name != "num_key_value_heads"}),
    "cohere2": ("cohere2", BASE | {"sliding_window": WINDOW, "layer_types": LAYERS, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", GEMMA | {"rope_parameters": None, "attn_logit_softcapping": 20.0}),
    "qwen3_moe": (
        "qwen3_moe",
        BASE | {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "falcon-mqa": (
        "falcon",
        {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
        | {"multi_query": True, "alibi": False, "new_decoder_architecture": False},
    ),
    "gpt_oss-sinks": (
        "gpt_oss",
        BASE
        | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
        | {"layer_types": LAYERS},
    ),
    "granite-scaled": ("granite", BASE | {"logits_scaling": 3.0, "embedding_multiplier": 4.0}),
    "phi3-longrope": (
        "phi3",
        BASE
        | {
            "pad_token_id": 0,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [4.0] * 6,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gpt_neo": (
        "gpt_neo",
        {"vocab_size": VOCAB, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "window_size": WINDOW}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 1024},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        BASE
        | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
        | {"v_head_dim": 10, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "opt": ("opt", {**BASE, "ffn_dim": 80, "word_embed_proj_dim": 48}),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class TinyModel:
    """A random model in transformers, and the folder that holds it."""

    folder: Path
    module: Any

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return [T, V]."""
        logits: Tensor = self.module(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(token_ids)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(token_ids) :]

    def load(self, dtype: torch.dtype = torch.float32) -> Decoder:
        return Decoder(load_model(self.folder, dtype=dtype, device=CPU))


class Decoder:
    """A model of ours behind the engine's runner."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.runner = Runner(model, model.config.max_positions)

    def prefill(self, token_ids: Sequence[int], chunks: Sequence[int] = (5, 1, 1000)) -> tuple[Region, Tensor]:
        """Prefill in chunks of these sizes; returns the region and the logits [T, V]."""
        region = self.runner.cache.allocate(len(token_ids) + 64)
        logits, rest = [], list(token_ids)
        for size in chunks:
            if rest:
                logits.append(self.logits(self.runner.prefill(Rows.chain(region, rest[:size]))))
                rest = rest[size:]
        assert not rest
        return region, torch.cat(logits)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def decode(self, *rows: Rows) -> Sequence[Tensor]:
        """Run one pass and return its logits, [N, V] for each sequence; nothing is committed."""
        return self.runner.decode(rows).logits

    def tree(self, region: Region, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Run a tree and return its rows' logits [N, V]."""
        return self.decode(tree_rows(region, token_ids, parents))[0][: len(token_ids)]

    def chain(self, region: Region, token_ids: Sequence[int]) -> Tensor:
        """Run tokens that follow each other and return their rows' logits [N, V]."""
        return self.decode(Rows.chain(region, token_ids))[0][: len(token_ids)]

    def step(self, region: Region, token_id: int) -> Tensor:
        """Run and commit one token; returns its logits [V]."""
        logits = self.chain(region, [token_id])[0]
        self.runner.cache.commit(region, 1)
        return logits

    def batch(self, rows: Rows) -> RowBatch:
        """Return the pass over these rows, none of them padding."""
        model = self.model
        return RowPacker(model.config, model.dtype, model.device).pack([rows], len(rows.token_ids))

    @torch.inference_mode()
    def forward(self, batch: RowBatch, region: Region) -> Tensor:
        """Return the hidden states [N, E] of a pass over one region's rows."""
        slots = region.pool.tensor[:, region.index : region.index + 1, :, : batch.bias.shape[-1]]
        return self.model.forward(batch, slots.unbind(0))

    def committed(self, region: Region) -> Tensor:
        """Return a region's keys and values [L, 2 * G, T, D]."""
        return region.pool.tensor[:, region.index, :, : region.length]


@dataclass(frozen=True)
class TreeCase:
    """A prompt of three windows, and a tree to verify after it: a chain of four, and siblings on three levels."""

    prompt: list[int]
    nodes: list[int]
    parents: tuple[int, ...] = (-1, 0, 1, 2, 3, 0, 0, 1, 5, 5, 7)

    def path(self, node: int) -> list[int]:
        """Return the token ids from the root to a node, both included."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.nodes[node])
            node = self.parents[node]
        return path

    def rows(self, region: Region) -> Rows:
        """Return the tree's rows after a region's committed slots."""
        return tree_rows(region, self.nodes, self.parents)


def tree_rows(region: Region, token_ids: Sequence[int], parents: Sequence[int]) -> Rows:
    """Return the rows of a tree whose nodes come parents first."""
    mask = np.eye(len(parents), dtype=np.bool_)
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return Rows(region, token_ids, depths, mask)


@pytest.fixture
def decode() -> Callable[[Model], Decoder]:
    """Return a decoder around any model."""
    return Decoder


@pytest.fixture
def case() -> TreeCase:
    return TreeCase(random_ids(3 * WINDOW), random_ids(len(TreeCase.parents), seed=1))


@pytest.fixture
def ids() -> Callable[..., list[int]]:
    """Return random token ids by count and seed."""
    return random_ids


def random_ids(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


def build(name: str, folder: Path) -> TinyModel:
    """Save a random model with weights large enough that every part of it shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = CONFIGS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **values, initializer_range=0.2)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    return TinyModel(folder, module)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return a model by its name in `CONFIGS`, built once."""
    built: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in built:
            built[name] = build(name, tmp_path_factory.mktemp(name))
        return built[name]

    return get
