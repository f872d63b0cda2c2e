"""Models are told apart by a sample of weights and vocabulary, whatever they are loaded as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.fingerprint import SAMPLE_BYTES, model_fingerprint
from foretell.text.tokenizer import Tokenizer

V, E = 600, 64
FILE = "model.safetensors"


def make_tokenizer(first: str = "t0") -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    tokens = [first, *(f"t{token_id}" for token_id in range(1, V))]
    return Tokenizer(Backend(WordLevel({token: token_id for token_id, token in enumerate(tokens)}, unk_token="t1")))


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,), "model.layers.0.up.weight": (E, E)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(weights(), tmp_path / FILE, metadata={"format": "pt"})
    return tmp_path


def test_it_is_a_function_of_the_model_alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = model_fingerprint(folder, make_tokenizer(), V)
    other = tmp_path_factory.mktemp("copy")
    save_file(dict(reversed(weights().items())), other / FILE, metadata={"made": "elsewhere"})
    (other / "tokenizer.json").write_text("written by another version", encoding="utf-8")
    assert model_fingerprint(other, make_tokenizer(), V) == first
    assert len(first) == 64
    int(first, 16)


@pytest.mark.parametrize("name", weights())
def test_every_tensor_counts(folder: Path, name: str) -> None:
    before = model_fingerprint(folder, make_tokenizer(), V)
    changed = load_file(folder / FILE)
    changed[name].view(-1)[SAMPLE_BYTES // 4 - 1] += 0.5
    save_file(changed, folder / FILE)
    assert model_fingerprint(folder, make_tokenizer(), V) != before


def test_embeddings_are_sampled_all_over(folder: Path) -> None:
    seen = {model_fingerprint(folder, make_tokenizer(), V)}
    for rows in (slice(0, V // 2), slice(V // 2, V), slice(V - 4, V)):
        changed = weights()
        changed["model.embed_tokens.weight"][rows] += 0.5
        save_file(changed, folder / FILE)
        seen.add(model_fingerprint(folder, make_tokenizer(), V))
    assert len(seen) == 4


def test_the_vocabulary_counts(folder: Path) -> None:
    prints = {
        model_fingerprint(folder, make_tokenizer(), V),
        model_fingerprint(folder, make_tokenizer("another"), V),
        model_fingerprint(folder, make_tokenizer(), V - 1),
    }
    assert len(prints) == 3


def test_shards_count(folder: Path) -> None:
    before = model_fingerprint(folder, make_tokenizer(), V)
    (folder / FILE).rename(folder / "model-00001-of-00002.safetensors")
    save_file({"lm_head.weight": torch.ones(V, E)}, folder / "model-00002-of-00002.safetensors")
    assert model_fingerprint(folder, make_tokenizer(), V) != before


@pytest.mark.parametrize(
    "data",
    [b"", b"\x05\0\0\0\0\0\0\0[1,2]", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{"],
    ids=["empty", "a list", "too long", "cut"],
)
def test_weights_that_cannot_be_read_are_one_line(folder: Path, data: bytes) -> None:
    (folder / FILE).write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read \(\w+\): download the model again"):
        model_fingerprint(folder, make_tokenizer(), V)
