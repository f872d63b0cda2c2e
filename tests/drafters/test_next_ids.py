"""Tables of likely next ids on disk: the same bytes every time, and nothing but the model's own table is taken."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from foretell.drafters.next_ids import (
    FORMAT,
    SHIPPED,
    NextIds,
    NextIdsStore,
    id_dtype,
    read_facts,
    read_next_ids,
    write_next_ids,
)
from foretell.errors import ConfigError, ModelError

V, MODEL, OTHER = 50, "a1" * 32, "b2" * 32
TABLE = np.arange(4 * V, dtype=np.uint16).reshape(V, 4) % V
FACTS = {"fingerprint": MODEL, "prefixes": '["\\n\\n"]', "foretell": "0.1", "command": "foretell tune"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some" / "next_ids.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> NextIdsStore:
    return NextIdsStore(tmp_path / "kept", MODEL, V, shipped=tmp_path / "shipped")


def ship(tmp_path: Path, name: str, table: NextIds = TABLE, fingerprint: str = MODEL) -> Path:
    path = tmp_path / "shipped" / name / "next_ids.safetensors"
    write_next_ids(path, table, {**FACTS, "fingerprint": fingerprint})
    return path


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_what_is_written_is_read(path: Path, dtype: type) -> None:
    write_next_ids(path, TABLE.astype(dtype), FACTS)
    table = read_next_ids(path, MODEL, V)
    assert table.dtype == dtype
    assert np.array_equal(table, TABLE)
    assert read_facts(path) == {**FACTS, "format_version": FORMAT}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_library_reads_the_file_and_equal_tables_are_equal_bytes(path: Path) -> None:
    write_next_ids(path, TABLE, FACTS)
    with safe_open(path, framework="np") as file:
        assert file.keys() == ["next_ids"]
    first = path.read_bytes()
    write_next_ids(path, np.asfortranarray(TABLE), dict(reversed(FACTS.items())))
    assert path.read_bytes() == first


@pytest.mark.parametrize("size", [0, 7, 8, 100, 300, -1])
def test_a_truncated_file_is_refused(path: Path, size: int) -> None:
    write_next_ids(path, TABLE, FACTS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"is truncated, corrupt or unreadable \(.*\): delete it and run"):
        read_next_ids(path, MODEL, V)


def test_no_file_is_refused(path: Path) -> None:
    with pytest.raises(ModelError, match="unreadable"):
        read_next_ids(path, MODEL, V)


def test_a_table_of_another_model_is_refused(path: Path) -> None:
    write_next_ids(path, TABLE, FACTS)
    with pytest.raises(ModelError, match=f"belongs to model {MODEL[:16]}, this one is {OTHER[:16]}"):
        read_next_ids(path, OTHER, V)


@pytest.mark.parametrize("facts", [{"format_version": "2", "fingerprint": MODEL}, {"fingerprint": MODEL}, None])
def test_another_format_is_refused(path: Path, facts: dict[str, str] | None) -> None:
    path.parent.mkdir()
    save_file({"next_ids": TABLE}, path, metadata=facts)
    with pytest.raises(ModelError, match=f"has format .*, this version reads {FORMAT}"):
        read_next_ids(path, MODEL, V)


@pytest.mark.parametrize(
    "table",
    [TABLE[:-1], TABLE[:, 0], TABLE[:, :0], TABLE.astype(np.int64), TABLE.astype(np.float32)],
    ids=["short", "flat", "empty", "int64", "float"],
)
def test_what_is_no_table_is_refused(path: Path, table: Any) -> None:
    path.parent.mkdir()
    save_file({"next_ids": np.ascontiguousarray(table)}, path, metadata={**FACTS, "format_version": FORMAT})
    with pytest.raises(ModelError, match=r"not \[50, K\] token ids"):
        read_next_ids(path, MODEL, V)


def test_a_file_without_the_table_is_refused(path: Path) -> None:
    path.parent.mkdir()
    save_file({"other": TABLE}, path, metadata={**FACTS, "format_version": FORMAT})
    with pytest.raises(ModelError, match="truncated, corrupt or unreadable"):
        read_next_ids(path, MODEL, V)


@pytest.mark.parametrize("token_id", [-1, V, 2**31 - 1])
def test_ids_beyond_the_vocabulary_are_refused(path: Path, token_id: int) -> None:
    table = TABLE.astype(np.int32)
    table[7, 2] = token_id
    write_next_ids(path, table, FACTS)
    with pytest.raises(ModelError, match="holds ids outside the vocabulary of 50"):
        read_next_ids(path, MODEL, V)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(10, np.uint16), (65536, np.uint16), (65537, np.int32)])
def test_the_smallest_type_that_holds_every_id(vocab_size: int, dtype: type) -> None:
    assert id_dtype(vocab_size) is dtype
    assert np.iinfo(dtype).max >= vocab_size - 1


def test_the_store_knows_nothing_at_first(store: NextIdsStore) -> None:
    assert store.find() is None


def test_a_kept_table_is_found(store: NextIdsStore) -> None:
    saved = store.save(TABLE, {"command": "x"})
    found = store.find()
    assert found is not None
    assert (found.origin, found.path) == ("cached", store.path) == (saved.origin, saved.path)
    assert np.array_equal(found.table, TABLE)
    assert read_facts(store.path) == {"format_version": FORMAT, "fingerprint": MODEL, "command": "x"}


def test_a_shipped_table_is_found_by_its_model(store: NextIdsStore, tmp_path: Path) -> None:
    ship(tmp_path, "another", TABLE[::-1], OTHER)
    path = ship(tmp_path, "this")
    found = store.find()
    assert found is not None
    assert (found.origin, found.path) == ("shipped", path)
    assert np.array_equal(found.table, TABLE)


def test_a_kept_table_goes_before_a_shipped_one(store: NextIdsStore, tmp_path: Path) -> None:
    ship(tmp_path, "this")
    store.save(TABLE[::-1], {})
    found = store.find()
    assert found is not None
    assert found.origin == "cached"


def test_a_table_in_another_models_place_is_told_about_and_left_aside(store: NextIdsStore) -> None:
    write_next_ids(store.path, TABLE, {**FACTS, "fingerprint": OTHER})
    said: list[str] = []
    assert store.find(said.append) is None
    assert store.find() is None
    (line,) = said
    assert line == (
        f"{store.path} belongs to model {OTHER[:16]}, this one is {MODEL[:16]}: delete it and run `foretell tune`"
    )


def test_and_so_is_a_damaged_one(store: NextIdsStore) -> None:
    store.save(TABLE, {})
    store.path.write_bytes(store.path.read_bytes()[:-5])
    said: list[str] = []
    assert store.find(said.append) is None
    assert len(said) == 1
    assert "\n" not in said[0]


def broken_write(error: BaseException) -> Callable[..., int]:
    """Return a `Path.write_bytes` that fails half-way."""

    def write_bytes(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise error

    return write_bytes


def test_a_full_disk_leaves_the_old_table_and_nothing_else(
    store: NextIdsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(TABLE, {})
    monkeypatch.setattr(Path, "write_bytes", broken_write(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ConfigError, match="cannot be written: No space left on device; free some space"):
        store.save(TABLE[::-1], {})
    monkeypatch.setattr(Path, "write_bytes", broken_write(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.save(TABLE[::-1], {})
    found = store.find()
    assert found is not None
    assert np.array_equal(found.table, TABLE)
    assert list(store.path.parent.iterdir()) == [store.path]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        NextIdsStore(tmp_path / "file" / "next_ids", MODEL, V).save(TABLE, {})


@pytest.mark.parametrize("folder", sorted(SHIPPED.glob("*")), ids=lambda folder: folder.name)
def test_what_ships_is_whole_and_has_a_card(folder: Path) -> None:
    path = folder / "next_ids.safetensors"
    facts = read_facts(path)
    with safe_open(path, framework="np") as file:
        vocab_size, num_ids_kept = file.get_slice("next_ids").get_shape()
    assert num_ids_kept == 4
    assert len(read_next_ids(path, facts["fingerprint"], vocab_size)) == vocab_size
    assert path.stat().st_size <= 400_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(path.read_bytes()).hexdigest() in card
    assert facts["fingerprint"] in card
    assert facts["command"] in card
    assert "Apache-2.0" in card
    assert not re.search(r"/(home|root|tmp|work)\b", json.dumps(dict(facts)))
