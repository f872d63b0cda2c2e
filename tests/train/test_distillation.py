"""The draft that is trained is the draft that runs, and what it learns is what the loss says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foretell.errors import ModelError
from foretell.models.draft import DraftKind, DraftModel
from foretell.models.draft_files import read_draft, write_draft
from foretell.passes.rows import Rows
from foretell.passes.runner import Runner
from foretell.train.distill import choose_kept_ids, distill
from foretell.train.draft_module import DraftModule, stream_mask
from foretell.train.text import Documents
from tiny import draft_body

CPU = torch.device("cpu")


def make_module(kind: DraftKind, num_layers: int, seed: int = 0) -> DraftModule:
    torch.manual_seed(seed)
    module = DraftModule(
        draft_body(vocab_size=40, num_layers=num_layers, window=6, max_positions=64, eos_ids=(2,)), kind
    )
    for tensor in module.tensors().values():
        tensor.normal_(0.0, 0.4)
    return module


def make_model(module: DraftModule, embedding: torch.Tensor, head: torch.Tensor) -> DraftModel:
    tensors = module.tensors() | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    return DraftModel(module.config, tensors, np.arange(len(head)), torch.float32, CPU)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_trained_stream_is_a_path_of_the_running_draft(num_layers: int) -> None:
    """Row t of stream d: the text up to t - d with its states, then d tokens whose states are not known."""
    module = make_module("feature", num_layers)
    embedding, length = torch.randn(40, 16), 12
    model = make_model(module, embedding, embedding)
    token_ids = torch.randint(0, 40, (1, length))
    features = torch.randn(1, length, 16)
    features[:, :3] = 0  # not known
    with torch.no_grad():
        streams = module(embedding[token_ids], features, 3)[0]  # [D, T, E]
    assert model.no_feature is not None
    known = torch.where(features[0].any(-1, keepdim=True), features[0], model.no_feature)  # [T, E]
    for depth in range(3):
        for place in range(depth, length):
            runner = Runner(model, 64)
            region = runner.cache.allocate(length)
            num_emitted = place - depth + 1
            states = torch.cat((known[:num_emitted], model.no_feature.expand(depth, -1)))
            hidden = runner.prefill(Rows.chain(region, token_ids[0, : place + 1].tolist(), states))
            torch.testing.assert_close(streams[depth, place], hidden[-1], atol=1e-5, rtol=1e-4)


def test_a_trained_language_model_is_the_running_one() -> None:
    module = make_module("lm", 2)
    embedding = torch.randn(40, 16)
    model = make_model(module, embedding, embedding)
    token_ids = torch.randint(0, 40, (1, 15))
    with torch.no_grad():
        hidden = module(embedding[token_ids], None, 1)[0, 0]  # [T, E]
    runner = Runner(model, 64)
    region = runner.cache.allocate(15)
    torch.testing.assert_close(hidden, runner.prefill(Rows.chain(region, token_ids[0].tolist())), atol=1e-5, rtol=1e-4)


def test_the_mask_shows_each_row_its_own_path() -> None:
    mask = stream_mask(5, 3, None).view(3, 5, 3, 5)
    seen = {(int(stream), int(place)) for stream, place in mask[2, 3].nonzero()}
    assert seen == {(0, 0), (0, 1), (1, 2), (2, 3)}
    assert mask[0].sum() == 5 * 6 // 2


@pytest.mark.parametrize("sharpness", [0.0, 0.4])
def test_the_chunked_gradient_is_that_of_the_loss(sharpness: float) -> None:
    torch.manual_seed(1)
    num_rows = 600  # more than two chunks
    hidden, wanted = torch.randn(num_rows, 16, requires_grad=True), torch.randn(num_rows, 16).bfloat16()
    head, weights = torch.randn(30, 16).bfloat16(), torch.rand(num_rows)
    found = distill(hidden.detach(), wanted, weights, head, sharpness=sharpness)
    target = torch.softmax(wanted.float() @ head.float().T, -1)  # [R, K]
    best = F.one_hot(target.argmax(-1), 30)  # [R, K]
    scores = hidden.bfloat16().float() @ head.float().T  # [R, K]
    losses = -(((1 - sharpness) * target + sharpness * best) * torch.log_softmax(scores, -1)).sum(-1)  # [R]
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    assert hidden.grad is not None
    assert found.loss == pytest.approx(loss.item(), rel=2e-2)
    assert torch.nn.functional.cosine_similarity(found.hidden.flatten(), hidden.grad.flatten(), dim=0) > 0.999


def test_kept_ids_are_the_frequent_ones_and_those_always_kept() -> None:
    documents = Documents.of([[5, 5, 5, 9, 9, 7], [8] * 9], [0, 0], [0, 0], [0, 0])
    assert choose_kept_ids(documents, np.array([0]), 3, [2]).tolist() == [2, 5, 9]
    assert choose_kept_ids(documents, np.array([0]), 30, [2]).tolist() == [2, 5, 7, 9]


class Saved:
    """A draft on disk beside a target that has its embedding."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import save_file

        self.target_folder, self.folder = folder / "target", folder / "draft"
        self.target_folder.mkdir()
        self.embedding = torch.randn(40, 16)
        save_file({"model.embed_tokens.weight": self.embedding}, self.target_folder / "model.safetensors")
        self.module = make_module("feature", 1)
        self.target = dataclasses.replace(self.module.config, tie_embeddings=True, num_layers=3)
        self.kept_ids = np.array([0, 2, 5, 11])
        write_draft(
            self.folder,
            self.module.config,
            self.module.tensors(),
            self.kept_ids,
            fingerprint="abc",
            card="card",
            provenance={"seed": 1},
        )

    def read(self, fingerprint: str = "abc", **changes: Any) -> DraftModel:
        target = dataclasses.replace(self.target, **changes)
        return read_draft(self.folder, self.target_folder, target, fingerprint, dtype=torch.float32, device=CPU)


def test_a_draft_survives_its_file(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    model = saved.read()
    assert model.kind == "feature"
    assert model.config == saved.module.config
    assert model.kept_ids.tolist() == [0, 2, 5, 11]
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(model.logits(hidden), hidden @ saved.embedding[saved.kept_ids].T)
    fuse = saved.module.tensors()["fuse.weight"]
    assert model.fuse_tokens is not None
    assert model.fuse_features is not None
    mapped = torch.cat((model.fuse_tokens(torch.eye(16)).T, model.fuse_features(torch.eye(16)).T), -1)  # [E, 2 * E]
    assert float((mapped - fuse).abs().max()) <= float(fuse.abs().max()) / 127
    assert sorted(path.name for path in saved.folder.iterdir()) == [
        "README.md",
        "config.json",
        "draft.safetensors",
        "provenance.json",
    ]


def test_a_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    with pytest.raises(ModelError, match="was trained for target abc, this one is xyz, another model or fine-tuned"):
        saved.read("xyz")
    with pytest.raises(ModelError, match="has other dimensions than the target"):
        saved.read(vocab_size=39)


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_draft_is_told(tmp_path: Path, damage: str) -> None:
    saved = Saved(tmp_path)
    path = saved.folder / "draft.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[: len(data) // 2], "empty": b"", "other": data.replace(b"kept_ids", b"lost_ids")}[damage]
    )
    with pytest.raises(ModelError, match="train it again with `foretell train draft`"):
        saved.read()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no_feature", lambda tensor: tensor[:15]),
        ("fuse.weight", lambda tensor: tensor[:, :30]),
        ("model.layers.0.mlp.down_proj.weight", lambda tensor: tensor[:, :20]),
        ("model.norm.weight", lambda tensor: tensor[:1]),
        ("kept_ids", lambda tensor: tensor.flip(0)),
        ("kept_ids", lambda tensor: tensor[[0, 1, 1, 3]]),
        ("kept_ids", lambda tensor: tensor - 1),
        ("kept_ids", lambda tensor: tensor[:0]),
    ],
)
def test_a_weight_of_another_shape_or_order_is_told(tmp_path: Path, name: str, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    saved = Saved(tmp_path)
    path = saved.folder / "draft.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path)
    with pytest.raises(ModelError, match=r"does not hold what config\.json says .*: train it again"):
        saved.read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", "a"),
        ("sliding_window", None),
        ("sliding_window", 0),
        ("num_heads", "4"),
        ("num_kv_heads", 0),
        ("norm_eps", None),
        ("layer_types", []),
        ("rope_scaling", 2),
    ],
)
def test_a_body_that_cannot_run_is_told(tmp_path: Path, name: str, value: Any) -> None:
    saved = Saved(tmp_path)
    path = saved.folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["body"][name] = value
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ModelError, match=f"has {name} .*, which no draft has: train it again"):
        saved.read()


def test_a_damaged_description_is_told(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    (saved.folder / "config.json").write_text('{"format_version": 99}')
    with pytest.raises(ModelError, match="has format 99, this version reads 1"):
        saved.read()
    (saved.folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is missing or damaged"):
        saved.read()
