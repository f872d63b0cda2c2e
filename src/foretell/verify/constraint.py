"""Hold outputs to a regular expression or a JSON schema: which ids may come next, given the tokens before.

llguidance answers that. It is optional, and imported nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from foretell.errors import ConfigError, NumericsError

if TYPE_CHECKING:
    from foretell.params import SamplingParams
    from foretell.text.tokenizer import Tokenizer
    from foretell.verify.edits import Context
    from foretell.verify.scores import Scores

_JSON_SPACE: Final = r"[ \t\n\r]{1,64}"
"""White space wherever JSON allows some. Without a limit the default model went on to 135 characters (21 answers)."""

_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")  # [256, 8]
_ADDENDS: Final = np.where(_BITS, 0.0, -np.inf).astype(np.float32)  # [256, 8], by a byte of a mask


class Constraint:
    """The grammar of one sequence, and a place in it.

    What may come next depends on the output alone, be it emitted or a path in a draft tree. The matcher stays where it
    was asked last. Asked elsewhere, it takes back the tokens that the two outputs do not share and reads the others: so
    a step reads what is new, and a branch its own tokens.

    Cost: 0.04 ms a row for V = 49,152 (one core, median over 967 rows of JSON; nine of ten within 0.06), of which
        adding the mask to the scores takes 0.014 and moving the matcher 0.004, six tokens back and forth 0.008.
    """

    def __init__(self, matcher: Any, num_ids: int, name: str) -> None:
        """`matcher` at its beginning, and nobody else's; `num_ids` that it knows; `name` of the parameter."""
        self._matcher, self._num_ids, self._name = matcher, num_ids, name
        self._output_ids: list[int] = []
        """What the matcher has read."""
        self._mask = np.zeros((num_ids + 31) // 32 * 4, np.uint8)

    def narrow(self, scores: Scores, context: Context) -> Scores:
        """Return a copy of `scores`, [V], in which only what may follow the context is above -inf.

        EOS may follow where the output is complete, and nothing else may where it cannot go on.

        Raises:
            NumericsError: nothing is left.
            ConfigError: the grammar has outgrown llguidance's limits, or the vocabulary cannot spell what it asks for.
        """
        self._read(list(context.token_ids[context.num_prompt_tokens :]))
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        _check_matcher(self._matcher, self._name, len(self._output_ids))
        num_known = min(self._num_ids, len(scores))
        narrowed = np.full_like(scores, -np.inf)  # [V]
        np.add(scores[:num_known], _ADDENDS.take(self._mask, axis=0).ravel()[:num_known], out=narrowed[:num_known])
        if narrowed.max() == -np.inf:
            raise NumericsError(
                f"of what `{self._name}` allows after {len(self._output_ids)} tokens everything is forbidden: lower "
                "`min_new_tokens`, or forbid fewer tokens"
            )
        return narrowed

    def _read(self, output_ids: list[int]) -> None:
        """Move the matcher to behind these tokens."""
        num_shared = min(len(self._output_ids), len(output_ids))
        while self._output_ids[:num_shared] != output_ids[:num_shared]:
            num_shared -= 1
        is_read = True
        if num_shared < len(self._output_ids):
            is_read = self._matcher.rollback(len(self._output_ids) - num_shared)
        if num_shared < len(output_ids):
            is_read = is_read and self._matcher.consume_tokens(output_ids[num_shared:])
        assert is_read, "a token that its grammar forbids is never chosen, and nothing is asked behind it"
        self._output_ids = output_ids


class Grammars:
    """Makes the constraints of one model's requests.

    Args:
        tokenizer: of the model.
        eos_ids: that may end an output; those that the tokenizer does not know are passed over.

    Cost: the first constraint reads the tokenizer, 0.3 to 0.5 s for V = 49,152; each grammar takes 2 ms or more, and
        another sequence under the one before 0.1 ms.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = [token_id for token_id in eos_ids if token_id < tokenizer.vocab_size]
        self._last_grammar = ""
        self._last_matcher: Any = None

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """Return a constraint for one sequence, None where `params` ask for none.

        Raises:
            ConfigError: llguidance is missing or refuses the grammar, the model has no EOS id, or its tokenizer is of a
                kind that llguidance does not know.
        """
        if not params.is_constrained:
            return None
        name, grammar = _name(params), _grammar(params)
        if grammar != self._last_grammar:
            check_grammar(params)
            self._last_matcher = self._matcher(grammar, name)
            self._last_grammar = grammar
        return Constraint(self._last_matcher.deep_copy(), self._vocabulary.vocab_size, name)

    def _matcher(self, grammar: str, name: str) -> Any:
        if not self._eos_ids:
            raise ConfigError(f"`{name}` needs a model that can end its output, this one has no EOS id: drop it")
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # where it cannot even begin, this is when it finds out
        _check_matcher(matcher, name, 0)
        return matcher

    @cached_property
    def _vocabulary(self) -> Any:
        try:
            return _llguidance().LLTokenizer(self._tokenizer.definition(), eos_token=self._eos_ids)
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(
                f"this model's tokenizer cannot be held to `regex` or `json_schema` ({_reason(str(error))}): drop them"
            ) from None


def check_grammar(params: SamplingParams) -> None:
    """Raise where `params` ask for a grammar that cannot be; needs no model.

    Raises:
        ConfigError: llguidance is missing, or refuses the grammar.
    """
    if not params.is_constrained:
        return
    is_refused, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(_grammar(params))
    if is_refused:
        raise _refusal(params, messages[0])


def _name(params: SamplingParams) -> str:
    return "regex" if params.regex is not None else "json_schema"


def _grammar(params: SamplingParams) -> str:
    """Return the grammar as llguidance writes it."""
    matcher = _llguidance().LLMatcher
    try:
        if params.regex is not None:
            return str(matcher.grammar_from_regex(params.regex))
        schema = str(params.json_schema)
        return str(matcher.grammar_from_json_schema(schema, defaults=_json_defaults(schema)))
    except ValueError as error:
        raise _refusal(params, str(error)) from None


def _json_defaults(schema: str) -> dict[str, Any]:
    options = json.loads(schema).get("x-guidance")
    # The pattern would win over the schema's own switch.
    if isinstance(options, dict) and "whitespace_flexible" in options:
        return {}
    return {"whitespace_pattern": _JSON_SPACE}


def _refusal(params: SamplingParams, message: str) -> ConfigError:
    if params.regex is not None:
        return ConfigError(
            f"`regex` {params.regex[:60]!r} is refused ({_reason(message)}): write it as Rust's regex crate has it"
        )
    return ConfigError(f"`json_schema` is refused ({_reason(message)}): use what llguidance knows of JSON Schema")


def _check_matcher(matcher: Any, name: str, num_tokens: int) -> None:
    """Raise where a matcher has failed; it would let the output end.

    Raises:
        ConfigError: it has.
    """
    if matcher.is_error():
        raise ConfigError(
            f"`{name}` cannot be followed beyond {num_tokens} tokens ({_reason(matcher.get_error())}): simplify it, or "
            "let it allow more"
        )


def _reason(message: str) -> str:
    """Return the one line of an error message of llguidance's that says what is wrong."""
    lines = message.strip().splitlines() or ["it does not say why"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    return line.removeprefix("error: ").rpartition("(in regex): ")[2]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "`regex` and `json_schema` need llguidance, which is not installed: pip install llguidance, or drop them"
        ) from None
    return llguidance
