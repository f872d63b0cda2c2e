"""Memory of each arm, measured in one child process per arm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from foretell.bench.runner import Progress
from foretell.bench.settings import EngineSettings

TIMEOUT_S: Final = 600.0


def measure_memory(
    names: Sequence[str], engine: EngineSettings, progress: Progress, *, command: Sequence[str] = ()
) -> dict[str, int | None]:
    """Return the peak of each arm's memory in bytes; an arm that fails is noted and left unknown.

    Args:
        names: drafters and baselines.
        engine: passed on, so that all arms load the same weights in the same precision.
        progress: told about every arm, and why one could not be measured.
        command: what to run instead of this package's own child.
    """
    start = list(command) or [sys.executable, "-m", "foretell.bench.peak_rss"]
    memory: dict[str, int | None] = {}
    for name in names:
        progress.note(f"measuring the memory of {name}")
        try:
            memory[name] = _run_child([*start, "--arm", name, "--engine", json.dumps(engine.to_json())])
        except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
            progress.note(f"the memory of {name} is unknown: {_reason(error)}")
            memory[name] = None
    return memory


def _run_child(command: Sequence[str]) -> int:
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return int(json.loads(result.stdout.strip().splitlines()[-1])["peak_rss_bytes"])


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.strip().splitlines()
        return lines[-1] if lines else f"the child process ended with code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the child process took more than {TIMEOUT_S:.0f} s"
    return f"the child process gave no measurement ({error})"
