"""Compiled passes say what eager ones say, and plain and drafted decoding agree within them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.drafters.calibration import Calibration
from foretell.drafters.drafter import NoDrafter
from foretell.engine.engine import Engine
from foretell.errors import CompileError
from foretell.models.load import load_model
from foretell.passes import compiled as compiled_module
from foretell.passes.compiled import CompiledPasses, load_compiled
from foretell.passes.cuda_graphs import CudaGraphPasses
from foretell.passes.rows import Rows
from foretell.passes.runner import Runner

CONTEXT_TOKENS = 1024
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def float32_twin(lab: Any, packages: Path, buckets: tuple[int, ...], patch: pytest.MonkeyPatch) -> Runner:
    patch.setattr(compiled_module, "BUCKETS", buckets)
    model = load_model(lab.folder, dtype=torch.float32, device=torch.device("cpu"))
    passes = load_compiled(model, lab.folder, packages, context_tokens=CONTEXT_TOKENS)
    assert isinstance(passes, CompiledPasses)
    return Runner(model, CONTEXT_TOKENS, passes)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_compiled_passes_agree_with_eager_and_with_each_other(
    family: str, make_lab: Callable[..., Any], packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(family)
    runner = float32_twin(lab, packages, (4, 9) if family == "llama" else (4,), monkeypatch)
    assert runner.compiled is not None
    assert runner.compiled.num_bytes > 0
    eager = Runner(runner.model, CONTEXT_TOKENS)
    prompt = lab.prompt(3, size=20)
    logits = []
    for each in (runner, eager):
        region = each.cache.allocate(100)
        each.prefill(Rows.chain(region, prompt))
        logits.append(each.decode([Rows.chain(region, [5, 6, 7, 8])]).logits[0][:4])  # [4, V]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)

    engine = Engine(runner, lab.FLAT, Calibration(), "copy", clock=lambda: 0.0)
    plain = lab.run(engine, lab.request(prompt, NoDrafter())).output_ids
    truth = [*prompt, *plain]
    for drafter in (lab.Oracle(truth), lab.RandomTrees(truth, 1), lab.Liar(truth)):
        assert lab.run(engine, lab.request(prompt, drafter)).output_ids == plain


def test_a_missing_compiler_is_told_in_one_line(
    make_lab: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(CompileError, match=r"needs a C\+\+ compiler and found none: install g\+\+"):
        float32_twin(make_lab("llama"), tmp_path, (4,), monkeypatch)
    assert not list(tmp_path.rglob("*.pt2"))


def test_a_compilation_that_fails_leaves_nothing(
    make_lab: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: object, num_rows: int, context_tokens: int, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("out of memory\nand a long story")

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(compiled_module, "_compile", fail)
    with pytest.raises(CompileError, match=r"compiling rows-4.pt2 failed \(out of memory\)"):
        float32_twin(make_lab("llama"), tmp_path, (4,), monkeypatch)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_recorded_graphs_agree_with_eager_passes(family: str, make_lab: Callable[..., Any]) -> None:
    lab = make_lab(family)
    model = load_model(lab.folder, dtype=torch.float32, device=torch.device("cuda"))
    prompt = lab.prompt(3, size=20)
    eager = Engine(Runner(model, CONTEXT_TOKENS), lab.FLAT, Calibration(), "copy")
    graphs = CudaGraphPasses(model, CONTEXT_TOKENS)  # type: ignore[arg-type]
    recorded = Engine(Runner(model, CONTEXT_TOKENS, graphs), lab.FLAT, Calibration(), "copy")
    plain = lab.run(eager, lab.request(prompt, NoDrafter())).output_ids
    assert lab.run(recorded, lab.request(prompt, NoDrafter())).output_ids == plain
    assert lab.run(recorded, lab.request(prompt, lab.Oracle([*prompt, *plain]))).output_ids == plain
