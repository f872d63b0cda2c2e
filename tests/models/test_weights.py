"""Lazy reading of safetensors: names, shards, damage, and what stays in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretell.errors import ModelError
from foretell.models.weights import WeightReader

MIB = 1 << 20


def save(folder: Path, names: list[str], file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    tensors = {name: torch.full((2, 3), float(index), dtype=torch.bfloat16) for index, name in enumerate(names)}
    save_file(tensors, folder / file)
    return tensors


def save_shards(folder: Path) -> dict[str, torch.Tensor]:
    first = save(folder, ["model.a.weight", "model.b.weight"], "model-00001-of-00002.safetensors")
    second = save(folder, ["model.c.weight"], "model-00002-of-00002.safetensors")
    where = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    where |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return first | second


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        WeightReader(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_a_tensor_is_found_whatever_prefix_it_was_saved_with(prefix: str, tmp_path: Path) -> None:
    tensors = save(tmp_path, [f"{prefix}norm.weight", f"{prefix}layers.0.mlp.up_proj.weight", "lm_head.weight"])
    with WeightReader(tmp_path) as reader:
        assert sorted(reader.names) == sorted(tensors)
        for name in ("model.norm.weight", "norm.weight"):
            assert reader.has(name)
            assert torch.equal(reader.get(name), tensors[f"{prefix}norm.weight"])
        assert reader.shape("model.norm.weight") == (2, 3)
        assert not reader.has("model.norm.bias")


def test_an_exact_name_wins_and_an_ambiguous_one_is_nobodys(tmp_path: Path) -> None:
    save(tmp_path, ["model.norm.weight", "transformer.norm.weight"])
    reader = WeightReader(tmp_path)
    assert reader.get("transformer.norm.weight")[0, 0] == 1
    assert not reader.has("norm.weight")


def test_shards(tmp_path: Path) -> None:
    tensors = save_shards(tmp_path)
    reader = WeightReader(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(reader.get(name), tensor)
        reader.release()


def test_a_missing_tensor(tmp_path: Path) -> None:
    save(tmp_path, ["a"])
    with pytest.raises(ModelError, match="no tensor 'b'"):
        WeightReader(tmp_path).get("b")


def test_a_missing_shard(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("index", ["{}", "{", '{"weight_map": {"a": "../../etc/passwd"}}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "index.json" in refusal(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "header"])
def test_a_damaged_file(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(tmp_path, ["a", "b"])
    content = path.read_bytes()
    damaged = {
        "truncated": content[:-4],
        "empty": b"",
        "garbage": b"\xff" * 100,
        "header": content[:20] + b"\0" + content[21:],
    }
    path.write_bytes(damaged[damage])
    assert "model.safetensors" in refusal(tmp_path)


def test_no_weights_and_weights_of_another_kind(tmp_path: Path) -> None:
    assert "add the weights" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "save it again as safetensors" in refusal(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_released_pages_leave_the_process(tmp_path: Path) -> None:
    names = [f"layers.{layer}" for layer in range(8)]
    save_file({name: torch.ones(4 * MIB, dtype=torch.bfloat16) for name in names}, tmp_path / "model.safetensors")
    reader = WeightReader(tmp_path)
    kept = reader.get_mapped("layers.0")
    before = resident_bytes()
    for name in names:
        assert reader.get(name).sum() > 0
    assert resident_bytes() - before > 48 * MIB  # all eight tensors of 8 MiB are resident
    reader.release()
    assert resident_bytes() - before < 8 * MIB
    highest = 0
    for name in names:
        assert reader.get(name).sum() > 0
        highest = max(highest, resident_bytes())
        reader.release()
    assert highest - before < 16 * MIB
    assert kept[-1] == 1  # its own mapping outlives the reader's
