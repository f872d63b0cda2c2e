"""What a benchmark is asked to do: frozen, keyword-only, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from foretell.errors import ConfigError
from foretell.params import SamplingParams

DEFAULT_DRAFTERS: Final = ("none", "lookup", "suffix", "ngram", "all")
DRAFTERS_WITH_DRAFT: Final = ("none", "lookup", "suffix", "ngram", "staged", "all")
"""The default where the model has a draft model."""
MAX_NEW_TOKENS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to load the model; the same for every arm and every child process."""

    model: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    context_tokens: int | None = None
    corpus: Path | None = None
    draft: str | None = None
    """Folder or Hugging Face id of the draft model, or "none"; None leaves the choice to the LLM."""
    prompts: str | None = None
    """Folder of prompt tokens, or "none"; None leaves the choice to the LLM."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` takes and `from_json` understands."""
        return asdict(self) | {"corpus": None if self.corpus is None else str(self.corpus)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> EngineSettings:
        """Build from `to_json`'s dict."""
        corpus = record["corpus"]
        return cls(**{**record, "corpus": None if corpus is None else Path(corpus)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Which prompts, which arms, how often.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    suite: str = "builtin"
    """`builtin`, `humaneval` or a JSON Lines file."""
    limit: int | None = None
    """Keep this many prompts, spread evenly over the categories; None keeps all."""
    category: str | None = None
    """Keep one category, or several with commas between."""
    drafters: Sequence[str] | None = None
    """foretell's arms; `none` is always one of them. None: `DEFAULT_DRAFTERS`, or `DRAFTERS_WITH_DRAFT`."""
    baselines: Sequence[str] = ()
    """Other people's decoding on the same weights: `hf`, `hf-lookup`, `llamacpp`."""
    repeats: int = 3
    """Runs of each arm on each prompt; medians are reported."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
    """Greedy unless a temperature is given; without a seed, 0 is taken, for outputs are compared."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    report: Path | None = None
    """Folder for a Markdown report with plots."""
    resume: Path | None = None
    """File to which finished rounds are added, and from which they are taken."""
    has_memory: bool = True
    """Whether to measure memory, one child process per arm."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"`repeats` must be at least 1, got {self.repeats!r}")
        if self.sampling.max_new_tokens < 2:
            raise ConfigError("`max_new_tokens` must be at least 2: decode speed counts the tokens after the first")
        if self.sampling.n > 1:
            raise ConfigError(f"`n`={self.sampling.n} with a benchmark, which compares single outputs: drop it")
        for name in self.drafters or ():
            if not name:
                raise ConfigError("`drafters` holds an empty name: separate names by single commas")
        if not self.sampling.is_greedy and self.sampling.seed is None:
            object.__setattr__(self, "sampling", replace(self.sampling, seed=0))
