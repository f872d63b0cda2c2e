"""Whether a training has been finished before: what its folder says of the settings behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.models.artefacts import artefact_digest
from foretell.train.examples import Examples

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def settings_digest(recipe: DataclassInstance, examples: Examples, fingerprint: str) -> str:
    """Return what tells a training from others: the SHA-256 of its recipe, text and target."""
    settings = {"recipe": asdict(recipe), "text": examples.documents.digest, "target": fingerprint}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def is_finished(out: Path, weights: str, settings: str, note: Callable[[str], None] | None = None) -> bool:
    """Return whether a folder holds, undamaged, what these settings give.

    Args:
        out: the folder.
        weights: name of the file of weights.
        settings: by `settings_digest`.
        note: told where the folder holds something else that training is going to replace.
    """
    if not (out / weights).is_file():
        return False
    try:
        facts = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
        if (facts["settings"], facts["files"]) == (settings, artefact_digest(out, weights)):
            return True
    except (OSError, ValueError, LookupError, TypeError):
        pass
    if note is not None:
        note(f"{out} holds what other settings or other text gave: it is replaced when this training ends")
    return False
