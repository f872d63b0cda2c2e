"""What a caller asks of one request: frozen, keyword-only, checked once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final, Literal, get_args

from foretell.errors import ConfigError

_WHOLE: Final = ("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "n", "seed", "logprobs")
_REAL: Final = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

Verification = Literal["match", "rejection", "traversal", "typical"]
"""Which rule accepts drafts."""

LogitsProcessor = Callable[[Any, Any], Any]
"""transformers' protocol: `(input_ids [1, T] int64, scores [1, V] float32) -> scores [1, V]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    max_new_tokens: int = 256
    """Stop after this many tokens; at least 1."""
    min_new_tokens: int = 0
    """Neither EOS nor a stop id can be chosen before this many tokens."""
    temperature: float = 0.0
    """0 is greedy; above 0, logits are divided by it and a token is drawn."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the most typical tokens up to this probability; 1 keeps all."""
    repetition_penalty: float = 1.0
    """Divide the score of tokens seen in prompt or output by this (transformers' rule); 1 is off."""
    presence_penalty: float = 0.0
    """Subtract this from the logit of every token that the output holds (OpenAI's rule)."""
    frequency_penalty: float = 0.0
    """Subtract this times its count in the output from a token's logit (OpenAI's rule)."""
    no_repeat_ngram_size: int = 0
    """Forbid n-grams of this size from occurring twice in prompt and output; 0 is off."""
    bad_words_ids: Sequence[Sequence[int]] = ()
    """Token sequences that may not be completed."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logit of the token id."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Any transformers `LogitsProcessor`; called for each visited node with that node's own path."""
    seed: int | None = None
    """Key of the noise; None draws one at random and reports it in the result."""
    n: int = 1
    """Independent samples of one prompt; needs a temperature above 0."""
    stop: Sequence[str] = ()
    """Strings that end the output; they are not part of it."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, beside the model's own EOS ids."""
    ignore_eos: bool = False
    """Go on past the model's EOS ids."""
    verification: Verification = "match"
    """Which rule accepts drafts. `match`: with a seed the tokens of plain decoding, whoever drafts. `rejection` and
    `traversal` test what a draft model drew and follow the same law, but which tokens a seed gives depends on the
    draft; greedy, they are `match`. `typical` is lossy."""
    allow_lossy: bool = False
    """Allow a verification that changes what the model says; it chooses none."""
    json_schema: str | Mapping[str, Any] | None = None
    """JSON Schema that the output follows, as JSON or a mapping; kept as JSON. Needs llguidance."""
    regex: str | None = None
    """Regular expression that the whole output matches, in the syntax of Rust's regex crate. Needs llguidance."""
    logprobs: int | None = None
    """Report each emitted token's log-probability, and those of this many most likely tokens."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        self._check_types()
        self._check_ranges()
        self._check_contradictions()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, with no noise."""
        return self.temperature == 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether a schema or an expression says what the output may be."""
        return self.json_schema is not None or self.regex is not None

    def _check_types(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if not _is_whole(value) and not (value is None and name in ("seed", "logprobs")):
                raise ConfigError(f"`{name}` must be a whole number, got {value!r}")
        for name in _REAL:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigError(f"`{name}` must be a number, got {value!r}")
        if not isinstance(self.allow_lossy, bool):
            raise ConfigError(f"`allow_lossy` must be True or False, got {self.allow_lossy!r}")
        if not isinstance(self.regex, str | None):
            raise ConfigError(f"`regex` must be text, got {self.regex!r}")
        try:
            is_fine = (
                all(isinstance(stop, str) for stop in self.stop)
                and all(map(_is_whole, self.stop_token_ids))
                and all(_is_whole(token_id) for word in self.bad_words_ids for token_id in word)
                and all(_is_whole(key) and isinstance(bias, Real) for key, bias in self.logit_bias.items())
                and all(map(callable, self.logits_processors))
            )
        except (TypeError, AttributeError):
            is_fine = False
        if not is_fine:
            raise ConfigError(
                "`stop` takes strings, `stop_token_ids` ids, `bad_words_ids` lists of ids, `logit_bias` a mapping from "
                "ids to numbers, `logits_processors` callables: one of them holds something else"
            )

    def _check_ranges(self) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 1)
        _at_least("min_new_tokens", self.min_new_tokens, 0)
        _at_least("top_k", self.top_k, 0)
        _at_least("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        _at_least("n", self.n, 1)
        _at_least("temperature", self.temperature, 0.0)
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"`{name}` must be in (0, 1], got {value!r}; 1 turns it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"`min_p` must be in [0, 1], got {self.min_p!r}; 0 turns it off")
        if not (self.repetition_penalty >= 1e-38 and math.isfinite(self.repetition_penalty)):  # float32 knows no less
            raise ConfigError(f"`repetition_penalty` must be above 0, got {self.repetition_penalty!r}; 1 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2.0 <= value <= 2.0:
                raise ConfigError(f"`{name}` must be in [-2, 2], got {value!r}; 0 turns it off")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ConfigError(f"`logprobs` must be in [0, 20] or None, got {self.logprobs!r}")
        if self.verification not in get_args(Verification):
            raise ConfigError(
                f"`verification` must be one of {', '.join(get_args(Verification))}, got {self.verification!r}"
            )
        if any(stop == "" for stop in self.stop):
            raise ConfigError("`stop` holds an empty string, which would end every output at once: remove it")
        if any(len(word) == 0 for word in self.bad_words_ids):
            raise ConfigError("`bad_words_ids` holds an empty sequence: remove it")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"`seed` must be in [0, 2**63), got {self.seed!r}")
        for token_id, bias in self.logit_bias.items():
            if not (abs(bias) <= 1e6 or bias == -math.inf):
                raise ConfigError(
                    f"`logit_bias` of token {token_id} is {bias!r}: use a finite number, or -inf; a million at most"
                )

    def _check_contradictions(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"`min_new_tokens` ({self.min_new_tokens}) is above `max_new_tokens` ({self.max_new_tokens}): lower it"
            )
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError("`json_schema` and `regex` were both given: drop one of them")
        if self.is_constrained and self.ignore_eos:
            raise ConfigError("`ignore_eos` goes on past the end that `json_schema` or `regex` asks for: drop one")
        if self.verification == "typical" and not self.allow_lossy:
            raise ConfigError(
                "`verification`='typical' changes what the model says: allow it (`allow_lossy`, `--allow-lossy`), "
                "or use 'match'"
            )
        if not self.is_greedy:
            return
        if self.verification == "typical":
            raise ConfigError("`verification`='typical' needs a `temperature` above 0, got 0: raise it, or use 'match'")
        if self.n > 1:
            raise ConfigError(f"`n`={self.n} with `temperature`=0 gives {self.n} equal outputs: raise the temperature")
        unused = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
        for name, off in unused.items():
            if getattr(self, name) != off:
                raise ConfigError(
                    f"`{name}`={getattr(self, name)!r} has no effect with `temperature`=0: "
                    "raise the temperature or drop it"
                )


def _at_least(name: str, value: float, limit: float) -> None:
    if not (value >= limit and math.isfinite(value)):
        raise ConfigError(f"`{name}` must be at least {limit}, got {value!r}")


def _schema_text(schema: object) -> str:
    """Return a JSON Schema as JSON."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"`json_schema` is not JSON ({error}): give a mapping, or its JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"`json_schema` must be a JSON object, got {text[:60]}: `{{}}` allows any value")
    return text


def _is_whole(value: object) -> bool:
    """Return whether a value is an integer of Python's or of an array library's."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def generation_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that `generation_config.json` sets, as keyword arguments of `SamplingParams`."""
    if not raw.get("do_sample", False):
        names: tuple[str, ...] = ("repetition_penalty", "no_repeat_ngram_size")
    else:
        names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size")
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    if raw.get("do_sample", False):
        found.setdefault("temperature", 1.0)
    return found
