"""What trained folders have in common: weights, a document that says for whom, a card, and provenance."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from foretell.errors import ConfigError, ModelError

CONFIG: Final = "config.json"


def write_artefact(
    folder: Path,
    weights: str,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    *,
    card: str,
    provenance: Mapping[str, Any],
) -> None:
    """Write an artefact, each file whole or not at all; what else lies in the folder stays.

    Args:
        folder: gets the weights, `config.json`, `README.md` and `provenance.json`.
        weights: name of the safetensors file.
        tensors: what goes into it.
        document: `config.json`.
        card: Markdown.
        provenance: command, recipe, text, versions, scores; the digest of the files is added.

    Raises:
        ConfigError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        save_file(dict(tensors), partial / weights)
        (partial / weights).chmod(0o644)  # the library leaves it to its owner alone
        (partial / CONFIG).write_text(json.dumps(dict(document), indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        facts = {**provenance, "files": artefact_digest(partial, weights)}
        (partial / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for file in partial.iterdir():
            file.replace(folder / file.name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another place") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def artefact_digest(folder: Path, weights: str) -> str:
    """Return the SHA-256 of an artefact's `config.json` and weights.

    Raises:
        OSError: one of them cannot be read.
    """
    return hashlib.sha256((folder / CONFIG).read_bytes() + (folder / weights).read_bytes()).hexdigest()


def read_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    """Return the tensors of an artefact.

    Raises:
        ModelError: the file is missing or damaged; `remedy` ends its line.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{path} is truncated, corrupt or missing ({reason}): {remedy}") from None
