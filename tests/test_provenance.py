from __future__ import annotations

import getpass
import json
from pathlib import Path

import pytest

from foretell.provenance import provenance


def test_it_is_plain_data_without_user_or_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/foretell", "bench"])
    facts = provenance()
    text = json.dumps(facts)
    assert facts["argv"] == ["foretell", "bench"]
    assert facts["torch"]
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    assert getpass.getuser() not in text.split()


def test_no_commit_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("foretell.provenance.__file__", str(tmp_path / "a" / "b" / "provenance.py"))
    assert provenance()["commit"] is None
