"""Every lean decoder against transformers, on tiny random models: chunks, steps, trees, windows, batches."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.load import load_model
from foretell.passes.rows import Rows

if TYPE_CHECKING:
    from conftest import TinyModel, TreeCase

NATIVE = [
    "llama-gqa",
    "llama-mha-biases-tied",
    "llama-mqa-llama3",
    "llama-linear-wide-heads-gelu",
    "mistral-window",
    "mistral-full",
    "qwen2-full",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
    "gemma3",
    "gemma3-mqa-softcap-untied",
    "gpt2",
    "gpt2-untied-relu",
]
SLIDING = ["mistral-window", "qwen2-window", "qwen3-window", "gemma3"]
WINDOW = 8
TOLERANCE = 1e-4
EXACT = 1e-10

Tiny = Callable[[str], "TinyModel"]
Ids = Callable[..., list[int]]
families = pytest.mark.parametrize("name", NATIVE)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@families
def test_chunks_and_steps_agree_with_transformers(name: str, tiny: Tiny, case: TreeCase, ids: Ids) -> None:
    model, answer = tiny(name), ids(12, seed=2)
    expected = model.logits(case.prompt + answer)
    decoder = model.load()
    region, logits = decoder.prefill(case.prompt)
    steps = [decoder.step(region, token_id) for token_id in answer]
    assert_close(torch.cat((logits, torch.stack(steps))), expected)


@families
def test_a_tree_row_agrees_with_its_path_alone(name: str, tiny: Tiny, case: TreeCase) -> None:
    model = tiny(name)
    decoder = model.load()
    region, _ = decoder.prefill(case.prompt)
    for node, row in enumerate(decoder.tree(region, case.nodes, case.parents)):
        assert_close(row, model.logits(case.prompt + case.path(node))[-1])


@families
def test_no_row_sees_what_its_mask_hides(name: str, tiny: Tiny, case: TreeCase) -> None:
    """In float64, so that a leak of any size shows; the root sees no other row (sglang-jax#1188)."""
    decoder = tiny(name).load(torch.float64)
    region, _ = decoder.prefill(case.prompt)
    # Stale slots hold whatever an earlier pass left there.
    region.pool.tensor[:, :, :, region.length :] = 100.0
    for node, row in enumerate(decoder.tree(region, case.nodes, case.parents)):
        assert_close(row, decoder.chain(region, case.path(node))[-1], EXACT)


@families
def test_the_cache_after_a_commit_is_that_of_a_fresh_prefill(name: str, tiny: Tiny, case: TreeCase) -> None:
    decoder = tiny(name).load(torch.float64)
    prompt, _ = decoder.prefill(case.prompt)
    for accepted in ([0, 1, 2, 3], [0, 5, 9], [0, 1, 7, 10], [0]):
        region = decoder.runner.cache.fork(prompt)
        decoder.decode(case.rows(prompt), case.rows(region))
        decoder.runner.cache.commit_rows(region, accepted)
        fresh, _ = decoder.prefill(case.prompt + [case.nodes[row] for row in accepted])
        assert_close(decoder.committed(region), decoder.committed(fresh), EXACT)
        assert_close(decoder.chain(region, [3]), decoder.chain(fresh, [3]), EXACT)
        decoder.runner.cache.free(fresh)
        decoder.runner.cache.free(region)


@families
def test_sequences_in_one_pass_do_not_touch_each_other(name: str, tiny: Tiny, case: TreeCase, ids: Ids) -> None:
    """Each has its own length, so its own positions: none is inherited from a neighbour (transformers#46936)."""
    decoder = tiny(name).load(torch.float64)
    regions = [decoder.prefill(ids(length, seed=length))[0] for length in (30, 4, 17)]
    together = decoder.decode(*(case.rows(region) for region in regions))  # [B, N, V]
    for region, rows in zip(regions, together, strict=True):
        alone = tiny(name).load(torch.float64)
        lone, _ = alone.prefill(ids(region.length, seed=region.length))
        assert_close(rows, alone.tree(lone, case.nodes, case.parents), EXACT)


@pytest.mark.parametrize("name", SLIDING)
def test_drafts_survive_the_edge_of_a_window(name: str, tiny: Tiny, ids: Ids) -> None:
    """Rejected rows come and go while the window slides over them, for three windows.

    transformers#47447 and #48280 (a burst of drafts at the window: columns of keys and mask differ), #46629 (Gemma's
    sliding layers could not be cropped after a rejection).
    """
    model = tiny(name)
    prompt, num_tokens = ids(WINDOW - 3), 3 * WINDOW
    expected = model.greedy(prompt, num_tokens)
    decoder = model.load()
    region, _ = decoder.prefill(prompt[:-1])
    tokens, chance = list(prompt), random.Random(4)
    while len(tokens) < len(prompt) + num_tokens:
        coming = expected[len(tokens) - len(prompt) :][:3]
        if chance.random() < 0.5 and coming:
            coming[-1] = (coming[-1] + 1) % 97
        nodes = [tokens[-1], *coming, *ids(6, seed=len(tokens))]
        parents = [*range(-1, len(coming)), 0, 0, 0, len(coming) + 1, len(coming) + 2, len(coming) + 4]
        choices = decoder.tree(region, nodes, parents).argmax(-1).tolist()
        accepted = 0
        while accepted < len(coming) and coming[accepted] == choices[accepted]:
            accepted += 1
        decoder.runner.cache.commit(region, accepted + 1)
        tokens += choices[: accepted + 1]
    assert tokens[len(prompt) :][:num_tokens] == expected


@pytest.mark.parametrize("name", SLIDING)
def test_a_window_hides_what_lies_before_it(name: str, tiny: Tiny, ids: Ids) -> None:
    """What lies further back than all windows together shows only where a layer sees everything."""
    decoder = tiny(name).load(torch.float64)
    types = decoder.model.config.layer_types
    assert decoder.model.config.sliding_window == WINDOW
    tail = ids(len(types) * (WINDOW - 1) + 1, seed=5)
    first, second = (decoder.prefill(ids(2, seed=seed) + tail)[1][-1] for seed in (6, 7))
    is_hidden = torch.allclose(first, second, atol=EXACT, rtol=0)
    assert is_hidden == ("full_attention" not in types)


def test_sliding_layers_skip_blocks_before_their_window(tiny: Tiny, ids: Ids) -> None:
    """Beyond one attention block the sliding layers read from a later slot on, and the same tokens come out."""
    decoder = tiny("gemma3-long").load(torch.float64)
    token_ids = ids(530)
    region, expected = decoder.prefill(token_ids, chunks=(530,))
    decoder.runner.cache.truncate(region, 522)
    batch = decoder.batch(Rows.chain(region, token_ids[522:]))
    assert batch.first_local_slot == 512
    assert batch.local_bias is not None
    assert batch.local_bias.shape[-1] == batch.bias.shape[-1] - 512
    region.pool.tensor[[0, 2], :, :, :512] = 100.0  # the sliding layers, before their windows
    assert_close(decoder.chain(region, token_ids[522:]), expected[522:], EXACT)


@families
def test_bfloat16_stays_near_float32(name: str, tiny: Tiny, case: TreeCase) -> None:
    model = tiny(name)
    expected = model.logits(case.prompt)
    _, logits = model.load(torch.bfloat16).prefill(case.prompt)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


@families
def test_embeddings_in_place_of_tokens(name: str, tiny: Tiny, case: TreeCase) -> None:
    """Rows whose input is given are computed as those of the tokens with these embeddings."""
    decoder = tiny(name).load()
    region, _ = decoder.prefill(case.prompt)
    batch = decoder.batch(Rows.chain(region, [5, 6]))
    given = replace(batch, token_ids=torch.zeros_like(batch.token_ids), embeddings=decoder.model.embed(batch)[None])
    assert torch.equal(decoder.forward(given, region), decoder.forward(batch, region))


@families
def test_num_bytes_counts_what_is_resident(name: str, tiny: Tiny) -> None:
    """All parameters but the mapped input embedding, which a tied head holds a packed copy of."""
    model = tiny(name)
    counted = model.load().model.num_bytes
    tensors = load_file(model.folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    is_tied = "lm_head.weight" not in tensors
    assert counted == total - (0 if is_tied else tensors["lm_head.weight"].nbytes)


@families
def test_a_missing_weight_is_named(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(name)
    tensors = load_file(model.folder / "model.safetensors")
    gone = next(key for key in sorted(tensors) if key.endswith(("down_proj.weight", "c_fc.weight")))
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(model.folder / "config.json", tmp_path)
    with pytest.raises(ModelError, match=gone) as caught:
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "field", "tensor"),
    [
        ("llama-gqa", "vocab_size", "embed_tokens"),
        ("qwen3", "head_dim", "q_proj"),
        ("llama-gqa", "num_key_value_heads", "k_proj"),
        ("gemma3", "intermediate_size", "up_proj"),
        ("gpt2", "n_positions", "wpe"),
    ],
)
def test_weights_of_another_model_are_refused(name: str, field: str, tensor: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(name)
    raw = json.loads((model.folder / "config.json").read_text())
    shutil.copy(model.folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: 2 * raw[field]}))
    with pytest.raises(ModelError, match=tensor) as caught:
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_gemma_refuses_capped_attention(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("gemma3")
    raw = json.loads((model.folder / "config.json").read_text()) | {"attn_logit_softcapping": 50.0}
    shutil.copy(model.folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="attn_logit_softcapping"):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
