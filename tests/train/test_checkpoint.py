"""Checkpoints belong to one training, are whole, and tell when they are damaged."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from foretell.errors import ForetellError, InputError
from foretell.train.checkpoint import load_checkpoint, save_checkpoint
from foretell.train.whole_file import whole_file

KEY = {"seed": 0, "text": "abc"}


def test_a_state_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.training.pt"
    assert load_checkpoint(path, KEY) is None
    save_checkpoint(path, KEY, {"module": {"weight": torch.arange(3)}, "step": 4, "losses": [0.5]})
    state = load_checkpoint(path, KEY)
    assert state is not None
    assert (state["module"]["weight"].tolist(), state["step"], state["losses"]) == ([0, 1, 2], 4, [0.5])
    assert load_checkpoint(path, KEY | {"text": "other"}) is None
    assert [file.name for file in path.parent.iterdir()] == ["x.training.pt"]


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "list", "lacks state"])
def test_a_damaged_checkpoint_is_told_with_the_remedy(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.training.pt"
    save_checkpoint(path, KEY, {"step": 4})
    if damage in ("list", "lacks state"):
        torch.save([1] if damage == "list" else {"key": KEY}, path)
    else:
        data = path.read_bytes()
        path.write_bytes({"empty": b"", "text": b"nonsense", "cut": data[: len(data) // 2]}[damage])
    with pytest.raises(InputError, match=r"x\.training\.pt is damaged, .*: delete it, and training starts anew"):
        load_checkpoint(path, KEY)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_file_that_failed(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "shard.npz"
    path.write_text("before")
    expected = ForetellError if isinstance(error, OSError) else KeyboardInterrupt

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(expected) as caught:
        write()
    assert [each.read_text() for each in tmp_path.iterdir()] == ["before"]
    if expected is ForetellError:
        assert f"{path} cannot be written (No space left on device)" in str(caught.value)


def test_a_full_disk_is_told() -> None:
    with pytest.raises(ForetellError, match="cannot be written"):
        save_checkpoint(Path("/dev/null/x.pt"), KEY, {"step": 4})
