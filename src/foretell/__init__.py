"""Several tokens per forward pass, without changing what the model says.

Names are imported on first use: `import foretell` itself imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foretell.bridge import custom_generate
    from foretell.errors import (
        CapacityError,
        CompileError,
        ConfigError,
        ForetellError,
        InputError,
        ModelError,
        NumericsError,
    )
    from foretell.llm import LLM
    from foretell.params import SamplingParams
    from foretell.result import Chunk, Completion, Stats

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "Chunk",
    "CompileError",
    "Completion",
    "ConfigError",
    "ForetellError",
    "InputError",
    "ModelError",
    "NumericsError",
    "SamplingParams",
    "Stats",
    "__version__",
    "custom_generate",
]

_HOMES: Final = {
    "LLM": "foretell.llm",
    "CapacityError": "foretell.errors",
    "Chunk": "foretell.result",
    "CompileError": "foretell.errors",
    "Completion": "foretell.result",
    "ConfigError": "foretell.errors",
    "ForetellError": "foretell.errors",
    "InputError": "foretell.errors",
    "ModelError": "foretell.errors",
    "NumericsError": "foretell.errors",
    "SamplingParams": "foretell.params",
    "Stats": "foretell.result",
    "custom_generate": "foretell.bridge",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretell' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
