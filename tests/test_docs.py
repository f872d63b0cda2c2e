"""Generated documents are fresh, and what documents promise exists."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

import foretell

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_cli_document_is_fresh() -> None:
    assert runpy.run_path(str(ROOT / "docs" / "cli.py"))["document"]() == read("docs/cli.md"), "run `make docs`"


def test_cli_document_has_the_commands_of_groups() -> None:
    text = read("docs/cli.md")
    for heading in ("## generate", "## train draft", "## train ngram"):
        assert f"\n{heading}\n" in text
    assert "`--max-bytes <" in text


def test_readme_is_short_and_names_the_commands() -> None:
    text = read("README.md")
    assert len(text.splitlines()) <= 200
    for command in ("make demo", "make test", "make setup"):
        assert command in text


def test_readme_python_compiles_and_uses_real_names() -> None:
    code = re.search(r"```python\n(.*?)```", read("README.md"), re.DOTALL)
    assert code is not None
    compile(code[1], "README.md", "exec")
    for name in re.findall(r"foretell import (.+)", code[1])[0].split(", "):
        assert name in foretell.__all__


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_links_between_documents_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).exists(), target


def test_continuous_integration_runs_the_documented_command() -> None:
    assert read(".ci/run").splitlines()[-1] == "make test"


def test_the_lock_covers_the_declared_dependencies() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    names = {re.split(r"[\[><=]", requirement)[0].lower() for requirement in declared} - {"torch", "foretell"}
    locked = dict(line.split("==") for line in read("requirements.lock").splitlines() if "==" in line)
    missing = names - {name.lower().replace("_", "-") for name in locked}
    assert not missing


def test_the_lock_holds_neither_torch_nor_index_settings() -> None:
    for line in read("requirements.lock").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+-]+", line), line
        assert not line.startswith("torch==")
