"""`foretell doctor`: versions, device, threads, which precision pays here, memory, and what is cached where."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from foretell.cli.options import DebugOption

if TYPE_CHECKING:
    import torch

GIB: Final = 2**30
MIB: Final = 2**20
PROBE_ROWS: Final = (4, 16)
PROBE_WIDTH: Final = 2048
PROBE_REPEATS: Final = 24


def doctor(debug: DebugOption = False) -> None:
    """Report versions, device, threads, which precision is fast here, memory, and what is cached where."""
    from foretell.cli.terminal import progress

    with progress("looking at this machine"):
        report = examine()
    for section, facts in report.items():
        print(section)
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            print(f"  {name:<{width}}  {_shown(value)}")


def examine() -> dict[str, dict[str, Any]]:
    """Return what there is to know about this machine, by section."""
    import torch

    from foretell.provenance import provenance

    facts = provenance()
    versions = ("foretell", "commit", "python", "torch", "transformers")
    return {
        "versions": {name: facts[name] for name in versions},
        "machine": {
            "platform": facts["platform"],
            "processor": facts["cpu"],
            "usable processors": facts["num_cpus"],
            "threads": torch.get_num_threads(),
            "device": "cuda: " + torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "C++ compiler": _compiler(),
        },
        "memory": _memory(),
        "precision": _precision(),
        "files": _files(),
    }


def _precision() -> dict[str, Any]:
    """Time a packed linear layer over few rows, which is what a decode step is made of, in both precisions."""
    import torch

    facts: dict[str, Any] = {}
    for num_rows in PROBE_ROWS:
        times_s = {dtype: _linear_s(getattr(torch, dtype), num_rows) for dtype in ("bfloat16", "float32")}
        for dtype, time_s in times_s.items():
            facts[f"{dtype}, {num_rows} rows"] = f"{time_s * 1e3:.2f} ms a layer"
    fastest = min(times_s, key=lambda dtype: times_s[dtype])
    facts["advice"] = (
        f"--dtype {fastest}: {max(times_s.values()) / min(times_s.values()):.1f} × as fast at {num_rows} rows"
    )
    return facts


def _linear_s(dtype: torch.dtype, num_rows: int) -> float:
    """Return the least seconds of one layer: other work on the machine only ever adds to it."""
    import torch

    from foretell.models.layers import PackedLinear

    generator = torch.Generator().manual_seed(0)
    shape = (2 * PROBE_WIDTH, PROBE_WIDTH)
    # Several weights in turn come from memory, as a model's do, not from the processor's cache.
    layers = [PackedLinear(torch.randn(shape, generator=generator).to(dtype)) for _ in range(4)]  # 4 × [2E, E]
    rows = torch.randn((num_rows, PROBE_WIDTH), generator=generator).to(dtype)  # [N, E]
    times_s = []
    with torch.inference_mode():
        for repeat in range(PROBE_REPEATS):
            start_s = time.perf_counter()
            layers[repeat % len(layers)](rows)  # [N, 2E]
            times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _memory() -> dict[str, Any]:
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {"installed": f"{total_bytes / GIB:.1f} GiB"}
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            facts["available"] = f"{int(line.split()[1]) * 1024 / GIB:.1f} GiB"
    return facts


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _compiler() -> str | None:
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _files() -> dict[str, Any]:
    """Return where models come from, and what foretell keeps on disk."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from foretell.errors import ModelError
    from foretell.models.files import cache_home, find_default_gguf

    try:
        default_model = str(find_default_gguf())
    except ModelError as error:
        default_model = str(error)
    facts = {"default model": default_model, "Hugging Face cache": HF_HUB_CACHE, "own cache": str(cache_home())}
    for entry in sorted(cache_home().glob("*/*")):
        facts[str(entry.relative_to(cache_home()))] = f"{_num_bytes(entry) / MIB:.1f} MiB"
    return facts


def _num_bytes(entry: Path) -> int:
    files = [entry] if entry.is_file() else [file for file in entry.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
