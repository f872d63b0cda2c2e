"""Profiles on disk: written whole or not at all, and a damaged one is no profile."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import ConfigError
from foretell.hardware.profile import LatencyProfile
from foretell.hardware.store import ProfileStore

KEY = {"model": "tiny", "threads": "2", "dtype": "float32"}


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "some" / "profiles")


def profile(key: dict[str, str] = KEY, gap: float = 0.0) -> LatencyProfile:
    return LatencyProfile(
        key=key,
        contexts=(256,),
        num_rows=(1, 6, 8, 12, 16),
        pass_s=((0.02, 0.02, 0.0216, 0.0248, 0.028),),
        largest_gap=gap,
    )


def test_what_is_saved_is_loaded(store: ProfileStore) -> None:
    path = store.save(profile())
    assert path == store.path(KEY)
    assert store.load(KEY) == profile()
    assert [file.name for file in store.folder.iterdir()] == [path.name]
    assert json.loads(path.read_text(encoding="utf-8"))["key"] == KEY


def test_the_latest_counts(store: ProfileStore) -> None:
    store.save(profile())
    store.save(profile(gap=0.5))
    assert store.load(KEY) == profile(gap=0.5)


@pytest.mark.parametrize("name", KEY)
def test_a_profile_holds_for_its_key_alone(store: ProfileStore, name: str) -> None:
    store.save(profile())
    assert store.load({**KEY, name: "other"}) is None
    store.save(profile({**KEY, name: "other"}))
    assert store.load(KEY) == profile()


def test_no_file_is_no_profile(store: ProfileStore) -> None:
    assert store.load(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"key": 1}', "\x00\xff", "nonsense"])
def test_a_damaged_file_is_no_profile(store: ProfileStore, text: str) -> None:
    path = store.save(profile())
    path.write_bytes(text.encode("latin-1"))
    assert store.load(KEY) is None


@pytest.mark.parametrize("size", [1, 100, 250])
def test_a_truncated_file_is_no_profile(store: ProfileStore, size: int) -> None:
    path = store.save(profile())
    path.write_bytes(path.read_bytes()[:size])
    assert store.load(KEY) is None


def broken_write(error: BaseException) -> Callable[..., int]:
    """Return a `Path.write_text` that fails half-way."""

    def write_text(path: Path, text: str, **options: Any) -> int:
        path.write_bytes(text[: len(text) // 2].encode())
        raise error

    return write_text


def broken_replace(*args: Any) -> Path:
    raise OSError(errno.EACCES, "Permission denied")


def test_a_full_disk_leaves_the_old_profile_and_nothing_else(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(profile())
    monkeypatch.setattr(Path, "write_text", broken_write(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ConfigError, match=r"cannot be saved in .*: No space left on device; free some space"):
        store.save(profile(gap=0.5))
    assert store.load(KEY) == profile()
    assert list(store.folder.iterdir()) == [path]


def test_and_so_does_a_file_that_cannot_be_replaced(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.save(profile())
    monkeypatch.setattr(Path, "replace", broken_replace)
    with pytest.raises(ConfigError, match="Permission denied"):
        store.save(profile(gap=0.5))
    assert store.load(KEY) == profile()
    assert list(store.folder.iterdir()) == [path]


def test_and_an_interrupted_write(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.save(profile())
    monkeypatch.setattr(Path, "write_text", broken_write(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.save(profile(gap=0.5))
    assert store.load(KEY) == profile()
    assert list(store.folder.iterdir()) == [path]


def test_the_file_is_on_disk_before_it_takes_the_place_of_the_old_one(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(profile())
    seen = []

    def fsync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        seen.append((json.loads(os.pread(descriptor, size, 0))["largest_gap"], store.load(KEY)))

    monkeypatch.setattr(os, "fsync", fsync)
    store.save(profile(gap=0.5))
    assert seen == [(0.5, profile())]
    assert list(store.folder.iterdir()) == [path]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="the profile cannot be saved in"):
        ProfileStore(tmp_path / "file" / "profiles").save(profile())
