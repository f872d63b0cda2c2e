"""Huge pages change where bytes lie, never the bytes."""

from __future__ import annotations

import sys

import pytest
import torch

from foretell.hardware.pages import use_huge_pages


def test_memory_keeps_its_contents() -> None:
    weights = torch.arange(4_000_000)
    use_huge_pages()
    assert torch.equal(weights, torch.arange(4_000_000))


def test_does_nothing_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages() == 0
