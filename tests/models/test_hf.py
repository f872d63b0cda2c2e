"""The adapter over transformers: other families, live models, and what it refuses."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.config import read_config
from foretell.models.hf import HFModel
from foretell.models.load import load_model

if TYPE_CHECKING:
    from conftest import Decoder, TinyModel, TreeCase

FAMILIES = [
    "phi3-window",
    "stablelm",
    "olmo2",
    "gpt_neox",
    "cohere2",  # scales its logits
    "gemma2",  # caps its attention scores
    "qwen3_moe",
    "opt",  # its decoder lies one level deeper
    "falcon-mqa",  # its configuration does not name the number of key/value heads
    "gpt_oss-sinks",
    "granite-scaled",
]
NATIVE = ["llama-mqa-llama3", "qwen2-window", "gemma3", "gpt2"]
CPU = torch.device("cpu")

Tiny = Callable[[str], "TinyModel"]
Decode = Callable[[Any], "Decoder"]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def check(decoder: Decoder, model: TinyModel, case: TreeCase) -> None:
    """Compare chunks, a step and a tree with transformers."""
    assert isinstance(decoder.model, HFModel)
    region, logits = decoder.prefill(case.prompt)
    assert_close(logits, model.logits(case.prompt))
    for node, row in enumerate(decoder.tree(region, case.nodes, case.parents)):
        assert_close(row, model.logits(case.prompt + case.path(node))[-1])
    assert_close(decoder.step(region, 5), model.logits([*case.prompt, 5])[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_agree_with_transformers(name: str, tiny: Tiny, case: TreeCase) -> None:
    model = tiny(name)
    check(model.load(), model, case)


@pytest.mark.parametrize("name", NATIVE)
def test_a_live_model_is_used_and_left_as_it_is(name: str, tiny: Tiny, decode: Decode, case: TreeCase) -> None:
    model = tiny(name)
    config = copy.deepcopy(model.module.config)
    modules = dict(model.module.named_modules())
    expected = model.logits(case.prompt)
    check(decode(HFModel(model.module, read_config(model.folder))), model, case)
    assert model.module.config.to_dict() == config.to_dict()
    assert dict(model.module.named_modules()) == modules
    assert torch.equal(model.logits(case.prompt), expected)


@pytest.mark.parametrize("name", ["phi3-window", "cohere2", "gpt_neox"])
def test_sequences_in_one_pass_do_not_touch_each_other(name: str, tiny: Tiny, case: TreeCase) -> None:
    decoder = tiny(name).load()
    long, _ = decoder.prefill(case.prompt)
    short, _ = decoder.prefill(case.prompt[:3], chunks=(3,))
    together = decoder.decode(case.rows(long), case.rows(short))
    for region, rows in ((long, together[0]), (short, together[1])):
        if region is long:
            decoder.runner.cache.free(short)
            assert_close(rows, decoder.tree(region, case.nodes, case.parents), 1e-5)


@pytest.mark.parametrize("name", ["phi3-window", "gpt_neox"])
def test_sixteen_bits(name: str, tiny: Tiny, case: TreeCase) -> None:
    model = tiny(name)
    expected = model.logits(case.prompt)
    _, logits = model.load(torch.bfloat16).prefill(case.prompt)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_what_it_reports(tiny: Tiny) -> None:
    dense, experts = tiny("olmo2").load().model, tiny("qwen3_moe").load().model
    assert isinstance(dense, HFModel)
    assert isinstance(experts, HFModel)
    assert (dense.has_experts, experts.has_experts) == (False, True)
    tensors = load_file(tiny("olmo2").folder / "model.safetensors")
    assert dense.num_bytes >= sum(tensor.nbytes for tensor in tensors.values())


def test_the_context_ends_where_a_rotation_would_stretch(tiny: Tiny) -> None:
    """Beyond it the keys in the cache would have to be rotated again."""
    assert tiny("phi3-window").load().model.config.max_positions == 128
    assert tiny("phi3-longrope").load().model.config.max_positions == 32


# Refusals


def refusal(model: Any, folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        HFModel(model, read_config(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def see_all(given: dict[str, Any]) -> None:
    given["attention_mask"] = torch.zeros_like(given["attention_mask"])


def count_positions(given: dict[str, Any]) -> None:
    first = given["position_ids"][:, :1]
    given["position_ids"] = first + torch.arange(given["position_ids"].shape[1])


def forget_windows(given: dict[str, Any]) -> None:
    masks = given["attention_mask"]
    given["attention_mask"] = masks | {"sliding_attention": masks["full_attention"]}


@pytest.mark.parametrize(
    ("name", "change"), [("llama-gqa", see_all), ("llama-gqa", count_positions), ("gemma3", forget_windows)]
)
def test_a_model_that_does_not_listen_is_refused(name: str, change: Any, tiny: Tiny) -> None:
    """Its decoder is told something else than the adapter says."""

    def mishear(module: object, args: object, given: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        if given.get("attention_mask") is not None:
            change(given)
        return args, given

    model = tiny(name)
    window = model.module.config.sliding_window if name == "gemma3" else None
    hook = model.module.model.register_forward_pre_hook(mishear, with_kwargs=True)
    try:
        message = refusal(model.module, model.folder)
    finally:
        hook.remove()
    assert "does not honour an explicit mask with explicit positions" in message
    assert window is None or model.module.config.sliding_window == window


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_neo", "does not honour an explicit mask"),  # masks by buffers of its own
        ("deepseek_v3", "keys and values of different shapes"),
    ],
)
def test_families_that_cannot_be_run_are_refused(name: str, reason: str, tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=reason):
        tiny(name).load()


@pytest.mark.parametrize(("name", "reason"), [("mamba", "recurrent"), ("bloom", "ALiBi"), ("t5", "encoder-decoder")])
def test_kinds_that_are_refused_by_their_configuration(name: str, reason: str, tiny: Tiny) -> None:
    from transformers import AutoConfig

    live = SimpleNamespace(config=AutoConfig.for_model(name))
    assert reason in refusal(live, tiny("olmo2").folder)


def test_states_of_a_live_model_that_are_refused(tiny: Tiny) -> None:
    model, folder = copy.copy(tiny("olmo2").module), tiny("olmo2").folder
    model.training = True
    assert "call its `eval()`" in refusal(model, folder)
    model.training = False
    model._is_stateful = True
    assert "recurrent or hybrid" in refusal(model, folder)
    del model._is_stateful
    model.is_quantized = True
    assert "quantised" in refusal(model, folder)
    del model.is_quantized
    model.config = copy.deepcopy(model.config)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert "'flash_attention_2' attention" in refusal(model, folder)
    assert "not a causal language model" in refusal(tiny("olmo2").module.model, folder)


def test_layers_of_unknown_kinds_are_refused(tiny: Tiny) -> None:
    model, folder = copy.copy(tiny("cohere2").module), tiny("cohere2").folder
    model.config = copy.deepcopy(model.config)
    model.config.layer_types = ["chunked_attention", *model.config.layer_types[1:]]
    assert "'chunked_attention'" in refusal(model, folder)


def copy_folder(model: TinyModel, folder: Path, **changes: object) -> None:
    raw = json.loads((model.folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(model.folder / "model.safetensors", folder)


def test_an_incomplete_folder_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    copy_folder(tiny("olmo2"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)


def test_a_family_that_transformers_does_not_know_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    copy_folder(tiny("olmo2"), tmp_path, model_type="olmo2000")
    with pytest.raises(ModelError, match="transformers cannot load") as caught:
        load_model(tmp_path, dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)
