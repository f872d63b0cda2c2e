"""Profiles on disk: one small JSON file per model, machine and versions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from foretell.errors import ConfigError
from foretell.hardware.profile import LatencyProfile
from foretell.models.decoder import Model
from foretell.models.files import ModelFiles
from foretell.provenance import cpu_model


def profile_key(files: ModelFiles, model: Model, *, is_compiled: bool) -> dict[str, str]:
    """Return what a measurement of this model on this machine holds for."""
    from foretell import __version__

    device = model.device
    return {
        "model": files.folder.name,
        "num_bytes": str(model.num_bytes),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
        "compile": str(is_compiled),
        "torch": torch.__version__,
        "foretell": __version__,
    }


class ProfileStore:
    """Profiles in a folder, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: dict[str, str]) -> Path:
        """Return the file for a key."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"{key['model']}-{digest}.json"

    def load(self, key: dict[str, str]) -> LatencyProfile | None:
        """Return the profile of a key; None where there is none, or where the file is damaged."""
        try:
            document = json.loads(self.path(key).read_text(encoding="utf-8"))
            return LatencyProfile.from_json(document)
        except (OSError, ValueError, ConfigError):
            return None

    def save(self, profile: LatencyProfile) -> Path:
        """Write a profile and return its file.

        Raises:
            ConfigError: the folder cannot be written.
        """
        path = self.path(profile.key)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(profile.to_json(), indent=1), encoding="utf-8")
            with partial.open("rb+") as file:
                os.fsync(file.fileno())  # or a power cut may leave an empty file in the old one's place
            partial.replace(path)
        except OSError as error:
            raise ConfigError(
                f"the profile cannot be saved in {self.folder}: {error.strerror}; free some space"
            ) from None
        finally:
            with suppress(OSError):
                partial.unlink()
        return path
