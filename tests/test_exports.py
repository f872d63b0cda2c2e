"""`__all__` names exactly what a module offers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import foretell

SOURCE = Path(foretell.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def public_names(file: Path) -> set[str]:
    """Return what a package's `__init__` defines or imports at its top level, private names excluded."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", foretell.__all__)
def test_every_export_is_importable(name: str) -> None:
    assert getattr(foretell, name) is not None


def test_exports_are_listed() -> None:
    assert dir(foretell) == sorted(foretell.__all__)
    assert set(foretell._HOMES) == set(foretell.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        foretell.LLMs  # noqa: B018


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.name == "__init__.py" and file.parent != SOURCE], ids=module_name
)
def test_packages_list_their_public_names(file: Path) -> None:
    package = importlib.import_module(module_name(file))
    assert public_names(file) == set(getattr(package, "__all__", ()))


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_declared_names_exist(file: Path) -> None:
    module = importlib.import_module(module_name(file))
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"{module.__name__}.__all__ names {name!r}"


def test_star_import_in_a_fresh_process() -> None:
    script = "from foretell import *; print(SamplingParams.__name__, __version__)"
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["SamplingParams", foretell.__version__]
