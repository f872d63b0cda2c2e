"""The state of a training on disk, from which an interrupted run goes on."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretell.errors import InputError
from foretell.train.whole_file import whole_file


def save_checkpoint(path: Path, key: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write a training's state, whole or not at all.

    Args:
        path: replaced where it exists.
        key: all that decides what comes out: recipe, text, target; plain values.
        state: tensors, numbers, texts, and dicts and lists of these; arrays as tensors.

    Raises:
        ForetellError: it cannot be written.
    """
    with whole_file(path) as file:
        try:
            torch.save({"key": dict(key), "state": dict(state)}, file)
        except RuntimeError as error:  # torch's writer says so of a full disk
            raise OSError(next(iter(str(error).splitlines()), "no reason given")) from None


def load_checkpoint(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of this very training; None where there is none, or only that of another.

    Raises:
        InputError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        found, state = saved["key"], dict(saved["state"])
    except (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{path} is damaged, or by another version ({type(error).__name__}): delete it, and training starts anew"
        ) from None
    return state if found == dict(key) else None
