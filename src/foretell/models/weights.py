"""Named tensors of a safetensors file or its shards, read one by one without holding the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError
from foretell.models.config import read_json

if TYPE_CHECKING:
    from torch import Tensor

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "transformer.", "model.")


class WeightReader:
    """Reads tensors lazily from a model folder: `model.safetensors`, or the shards that its index names.

    A tensor is found with or without the prefix that its checkpoint was saved with: `model.norm.weight`, `norm.weight`
    and Gemma 3's `language_model.model.norm.weight` are one name.

    Memory: tensors are views of the mapped file. The pages that they touch count as resident until `release()`, and
    as long as a view is alive; a loader that packs layer by layer calls `release()` after each.

    Raises:
        ModelError: the folder has no safetensors, a shard is missing, or a file is truncated or corrupt.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._handles: dict[Path, Any] = {}
        self._paths: dict[str, Path] = {}
        for path in self._files():
            self._paths.update(dict.fromkeys(self._open(path).keys(), path))
        self._aliases = _aliases(self._paths)

    @property
    def names(self) -> list[str]:
        """The tensors' names as the files have them."""
        return list(self._paths)

    def has(self, name: str) -> bool:
        """Return whether a tensor of that name exists, prefixes aside."""
        return self._find(name) is not None

    def get(self, name: str) -> Tensor:
        """Return a tensor as it was saved: a view of the mapped file, on the CPU, to be consumed before `release()`.

        Raises:
            ModelError: no tensor has that name, or its data cannot be read.
        """
        return self._read(name, self._open)

    def get_mapped(self, name: str) -> Tensor:
        """Return a tensor that stays mapped after `release()`: only the pages that are used become resident.

        For the input embedding, of which a pass reads a few rows. Do not write to it.

        Raises:
            ModelError: no tensor has that name, or its data cannot be read.
        """
        return self._read(name, _open_safetensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data.

        Raises:
            ModelError: no tensor has that name.
        """
        found = self._require(name)
        return tuple(self._open(self._paths[found]).get_slice(found).get_shape())

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare tensors' shapes with those that the configuration gives.

        Raises:
            ModelError: a tensor is missing or has another shape.
        """
        for name, expected in shapes.items():
            if (shape := self.shape(name)) != expected:
                raise ModelError(
                    f"{self._folder}: {name} is {list(shape)} where config.json makes it {list(expected)}: "
                    "the two files belong to different models"
                )

    def release(self) -> None:
        """Unmap the files, so that the pages read so far leave the process. The next `get` maps them again."""
        self._handles.clear()

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _read(self, name: str, open_file: Any) -> Tensor:
        found = self._require(name)
        path = self._paths[found]
        try:
            tensor: Tensor = open_file(path).get_tensor(found)
        except ModelError:
            raise
        except Exception as error:
            raise _unreadable(path, error) from None
        return tensor

    def _require(self, name: str) -> str:
        found = self._find(name)
        if found is None:
            raise ModelError(f"{self._folder} has no tensor {name!r}: the model is incomplete or of another family")
        return found

    def _find(self, name: str) -> str | None:
        return name if name in self._paths else self._aliases.get(_bare(name))

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = _open_safetensors(path)
        return self._handles[path]

    def _files(self) -> list[Path]:
        single = self._folder / "model.safetensors"
        if single.is_file():
            return [single]
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            return self._shards(index)
        if any(self._folder.glob("*.bin")):
            raise ModelError(f"{self._folder} has PyTorch .bin weights only: save it again as safetensors")
        raise ModelError(
            f"{self._folder} has no model.safetensors and no model.safetensors.index.json: add the weights"
        )

    def _shards(self, index: Path) -> list[Path]:
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, Mapping) or not shards or not all(isinstance(file, str) for file in shards.values()):
            raise ModelError(f"{index} has no usable `weight_map`: download the model again")
        paths = [self._folder / file for file in sorted(set(shards.values()))]
        if any(path.parent != self._folder or path.name in ("", "..") for path in paths):
            raise ModelError(f"{index} names files outside its folder: download the model again")
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelError(
                f"{self._folder} lacks {len(missing)} of {len(paths)} shards ({missing[0]}): download it again"
            )
        return paths


def _open_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ModelError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return ModelError(f"{path} is truncated, corrupt or unreadable ({reason}): download or save the model again")


def _aliases(names: Mapping[str, Path]) -> dict[str, str]:
    """Map each bare name to the one tensor that has it; a bare name that two tensors share is nobody's."""
    aliases: dict[str, str] = {}
    shared = set()
    for name in names:
        bare = _bare(name)
        if bare in aliases:
            shared.add(bare)
        aliases[bare] = name
    return {bare: name for bare, name in aliases.items() if bare not in shared}


def _bare(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)
