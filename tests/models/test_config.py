"""`config.json` of every family, in both of transformers' layouts, against transformers' own reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import ModelError
from foretell.models.config import FULL, SLIDING, ModelConfig, parse_config, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 12,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        parse_config(raw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: Path, raw: object, **more: object) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    for name, value in more.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("is_windowed", [False, True])
def test_the_five_x_layout_reads_as_transformers_reads_it(model_type: str, is_windowed: bool) -> None:
    from transformers import AutoConfig

    sizes = without(LLAMA, "rope_theta", "model_type", "hidden_act") | {"num_hidden_layers": 8}
    window: dict[str, Any] = {"sliding_window": 16} if is_windowed or model_type == "gemma3_text" else {}
    if model_type.startswith("qwen"):
        window |= {"use_sliding_window": is_windowed, "max_window_layers": 5}
    if model_type == "mistral" and not is_windowed:
        window = {"sliding_window": None}
    theirs = AutoConfig.for_model(model_type, **sizes, **window)
    ours = parse_config(json.loads(theirs.to_json_string(use_diff=False)))

    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (8, 4, 2, head_dim)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (100, 32, 64)
    assert (ours.max_positions, ours.norm_eps, ours.tie_embeddings) == (128, 1e-5, False)
    assert (ours.eos_ids, ours.bos_id) == ((2,), 1)
    if model_type == "mistral":
        assert ours.layer_types == (SLIDING if is_windowed else FULL,) * 8
    else:
        assert ours.layer_types == tuple(getattr(theirs, "layer_types", None) or [FULL] * 8)
    assert ours.sliding_window == (16 if SLIDING in ours.layer_types else None)
    rope = theirs.rope_parameters
    assert ours.rope_theta == (rope.get(FULL) or rope)["rope_theta"]
    assert ours.local_rope_theta == (rope[SLIDING]["rope_theta"] if model_type == "gemma3_text" else None)


def test_the_four_x_layout_with_scaling() -> None:
    config = parse_config(LLAMA | {"rope_scaling": LLAMA3_ROPE})
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == LLAMA3_ROPE
    assert config == parse_config(
        without(LLAMA, "rope_theta") | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500_000.0}}
    )


def test_the_old_key_of_the_rope_type() -> None:
    assert parse_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope_scaling == {
        "rope_type": "linear",
        "factor": 2.0,
    }


def test_biases_and_norms_by_family() -> None:
    def flags(config: ModelConfig) -> tuple[bool, ...]:
        return config.attention_bias, config.output_bias, config.mlp_bias, config.has_qk_norm

    assert flags(parse_config(LLAMA)) == (False, False, False, False)
    assert flags(parse_config(LLAMA | {"attention_bias": True, "mlp_bias": True})) == (True, True, True, False)
    assert flags(parse_config(LLAMA | {"model_type": "qwen2"})) == (True, False, False, False)
    assert flags(parse_config(LLAMA | {"model_type": "qwen3"})) == (False, False, False, True)


def test_gemma_nested_in_a_multimodal_config_takes_its_defaults_and_the_outer_ids() -> None:
    config = parse_config({"model_type": "gemma3", "text_config": GEMMA_TEXT, "eos_token_id": [1, 106]})
    assert config.model_type == "gemma3_text"
    assert config.eos_ids == (1, 106)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.layer_types == ((SLIDING,) * 5 + (FULL,)) * 2
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert config.attention_scale == 1 / 16
    assert config.embedding_scale == 2560**0.5
    assert config.tie_embeddings
    assert config.hidden_act == "gelu_pytorch_tanh"


def test_gpt2() -> None:
    from transformers import GPT2Config

    config = parse_config(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64).to_dict())
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.head_dim) == (32, 128, 2, 8)
    assert config.rope_theta is None
    assert config.tie_embeddings
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, True)
    assert config.max_positions == 64
    assert config.hidden_act == "gelu_new"


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, LLAMA, generation_config={"eos_token_id": [5, 7, 5]})).eos_ids == (5, 7)
    assert read_config(write(tmp_path, LLAMA, generation_config={"top_p": 0.9})).eos_ids == (2,)


def test_an_explicit_null_is_not_the_default() -> None:
    assert parse_config(LLAMA | {"eos_token_id": None}).eos_ids == ()
    assert parse_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).sliding_window is None
    assert parse_config(LLAMA | {"model_type": "mistral"}).sliding_window == 4096


def test_ids_of_minus_one_mean_none() -> None:
    config = parse_config(LLAMA | {"eos_token_id": -1, "bos_token_id": -1})
    assert (config.eos_ids, config.bos_id) == ((), None)


def test_other_families_are_read_by_their_usual_names() -> None:
    raw = {"model_type": "gpt_neox", "rope_scaling": {"type": "yarn"}, **without(LLAMA, "model_type", "rope_theta")}
    config = parse_config(raw)
    assert not config.is_native
    assert (config.num_layers, config.vocab_size, config.max_positions) == (3, 100, 128)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("wrong", ["missing", "12", -1, 1.5, True])
def test_missing_and_ill_typed_sizes(name: str, wrong: object) -> None:
    raw = without(LLAMA, name) if wrong == "missing" else LLAMA | {name: wrong}
    assert name in refusal(raw)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": 3}, "model_type"),
        ({"num_key_value_heads": 3}, "key/value heads"),
        ({"hidden_size": 33}, "multiple"),
        ({"hidden_act": "xielu"}, "xielu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"model_type": "qwen3", "layer_types": [FULL]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"model_type": "qwen3", "layer_types": [SLIDING] * 3}, "sliding_window"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_values_that_are_refused(change: dict[str, Any], said: str) -> None:
    assert said in refusal(LLAMA | change)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model_type": "mamba2"}, "recurrent"),
        ({"model_type": "qwen3_next"}, "recurrent"),
        ({"model_type": "someones_hybrid", "layer_types": [FULL, "linear_attention"]}, "linear_attention"),
        ({"model_type": "someones_hybrid", "mamba_d_state": 16}, "mamba_d_state"),
        ({"model_type": "vlm", "text_config": {"model_type": "lfm2"}}, "lfm2"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "mpt"}, "ALiBi"),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, "ALiBi"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        (LLAMA | {"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        (LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
    ],
)
def test_kinds_that_are_refused(raw: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        read_config(write(tmp_path, raw))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw", [{"model_type": "falcon", "alibi": False}, {"model_type": "mpt", "attn_config": {"alibi": False}}]
)
def test_alibi_that_is_switched_off_is_not_what_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks"):
        read_config(write(tmp_path, raw))


def test_an_adapter_is_refused_and_a_merged_model_is_not(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, adapter_config={"peft_type": "LORA"})
    with pytest.raises(ModelError, match="merge it"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert read_config(tmp_path).num_layers == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_file_that_is_no_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is missing"):
        read_config(tmp_path)
