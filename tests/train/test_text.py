"""Scripts and documents: what a target is made to write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.train.text import Documents


def test_documents_survive_a_file(tmp_path: Path) -> None:
    documents = Documents.join(
        [Documents.of([[1, 2, 3], [4]], [0, 0], [1, 0], [0, 1]), Documents.of([[5, 6]], [1], [1], [0.5])]
    )
    documents.save(tmp_path / "shard.npz")
    loaded = Documents.load(tmp_path / "shard.npz")
    assert [loaded[number].tolist() for number in range(len(loaded))] == [[1, 2, 3], [4], [5, 6]]
    assert loaded.kinds.tolist() == [0, 0, 1]
    assert loaded.answer_starts.tolist() == [1, 0, 1]
    assert loaded.temperatures.tolist() == [0, 1, 0.5]
    assert [path.name for path in tmp_path.iterdir()] == ["shard.npz"]


def test_a_damaged_shard_is_told(tmp_path: Path) -> None:
    path = tmp_path / "shard.npz"
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match=r"is damaged .*: delete it"):
        Documents.load(path)
    np.savez(path, token_ids=np.zeros(3, np.int32))
    with pytest.raises(InputError, match="is damaged"):
        Documents.load(path)
