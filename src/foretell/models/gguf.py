"""GGUF models: dequantised once, then kept as a folder that reads like any other (bfloat16 safetensors)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from foretell.errors import ModelError
from foretell.models.config import parse_config
from foretell.models.gguf_families import Family, build_config, find_family, map_names, read_weight, weight_shape
from foretell.models.gguf_file import GgufFile
from foretell.models.gguf_tokenizer import end_token_ids, write_tokenizer

_FORMAT = 1
"""Raised whenever converted folders would come out otherwise, so that older ones are not used."""

_TEMPORARY = ".converting-"

Notify = Callable[[str], None]


def convert(path: Path, models_folder: Path, notify: Notify | None = None) -> Path:
    """Return the folder that holds a GGUF file's model, converting it unless that was done before.

    The folder's name carries a hash of the file's content. It appears complete or not at all: it is written under
    another name and then renamed.

    Cost: 2 s and 270 MB of disk for 135M parameters; later calls compare the file's size and times only.

    Raises:
        ModelError: the file is missing, corrupt, of an unsupported architecture, or the disk is full.
    """
    try:
        name = _folder_name(path, models_folder)
        folder = models_folder / name
        if _is_complete(folder):
            return folder
        if notify is not None:
            notify(f"converting {path.name} once, to {folder}")
        with _replacing(folder) as temporary, GgufFile(path) as file:
            _write_model(file, temporary)
    except OSError as error:
        raise ModelError(
            f"cannot convert {path} into {models_folder} ({error}): free the space or set FORETELL_HOME"
        ) from None
    return folder


def _write_model(file: GgufFile, folder: Path) -> None:
    family = find_family(file)
    end_ids = end_token_ids(file.metadata)
    config = build_config(file, family, end_ids)
    parse_config(config)  # refuses here what could not be loaded later
    weights = _write_weights(file, family, config, folder / "model.safetensors")
    write_tokenizer(file.metadata, folder)
    _write_json(folder / "config.json", config)
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": end_ids or None}
    _write_json(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
    _write_json(folder / "conversion.json", {"source": str(file.path), "format": _FORMAT, "weights_bytes": weights})


def _write_weights(file: GgufFile, family: Family, config: Mapping[str, Any], path: Path) -> int:
    """Write every weight as bfloat16 and return the file's size.

    Tensors are written one by one, for `safetensors` itself would want all of them in memory at once.
    Source: https://github.com/huggingface/safetensors#format
    """
    import torch

    names = map_names(file, family)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for wanted, name in names.items():
        shape = weight_shape(file, family, name)
        end = position + 2 * prod(shape)
        header[wanted] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names.values():
            weight = read_weight(file, family, name, config)
            out.write(weight.view(torch.int16).numpy().data)
    return 8 + len(text) + position


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    """Return whether a conversion is there, with weights of the size that was written."""
    try:
        record = json.loads((folder / "conversion.json").read_text(encoding="utf-8"))
        return bool((folder / "model.safetensors").stat().st_size == record["weights_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the place of `folder` if all goes well, and is removed if not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent)
    temporary = folder.parent / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists() and not _is_complete(folder):
            shutil.rmtree(folder)
        try:
            temporary.replace(folder)
        except OSError:
            if not _is_complete(folder):  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(models_folder: Path) -> None:
    """Remove what processes that were killed left behind more than a day ago."""
    for leftover in models_folder.glob(f"{_TEMPORARY}*"):
        if time.time() - leftover.stat().st_mtime > 86_400:
            shutil.rmtree(leftover, ignore_errors=True)


def _folder_name(path: Path, models_folder: Path) -> str:
    """Return the file's name and a hash of its content.

    Hashing reads the whole file, so the result is kept under the file's place, size and times, as version control
    systems do: a file that changes without changing any of them is not noticed.
    """
    state = path.stat()
    stamp = (str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ino, _FORMAT)
    memo = models_folder / ".hashes" / hashlib.sha256(repr(stamp).encode()).hexdigest()[:32]
    if memo.is_file():
        return memo.read_text(encoding="utf-8")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"format {_FORMAT}".encode())
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem)}-{digest.hexdigest()[:12]}"
    memo.parent.mkdir(parents=True, exist_ok=True)
    temporary = memo.with_suffix(f".{os.getpid()}")
    temporary.write_text(name, encoding="utf-8")
    temporary.replace(memo)
    return name
