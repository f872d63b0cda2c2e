"""Where a number comes from: the versions, the machine and the command behind it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from foretell import __version__

__all__ = ["cpu_model", "provenance"]


def provenance() -> dict[str, str | int | list[str] | None]:
    """Return what is needed to read or repeat a measurement made by this process.

    Holds no user name and no path beyond those in `argv`.

    Returns:
        `argv`, versions (`foretell`, `commit`, `python`, `torch`, `transformers`), `platform`, `cpu`, `num_cpus` that
        this process may use, `num_threads` that torch uses (None before torch is imported) and `time` (UTC, ISO 8601).
    """
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "foretell": __version__,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "num_cpus": _num_cpus(),
        "num_threads": _num_threads(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_threads() -> int | None:
    # Not imported here: a report about a process should not load half a gigabyte into it.
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Return the commit of the checkout that this file lies in, with `+` when files differ from it."""
    folder = Path(__file__).resolve().parent
    if not (folder.parents[1] / ".git").exists():  # installed as a wheel; a repository further up is somebody else's
        return None
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        is_dirty = _git(folder, "status", "--porcelain", "--untracked-files=no") != ""
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + "+" * is_dirty


def _git(folder: Path, *args: str) -> str:
    result = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return result.stdout.strip()
