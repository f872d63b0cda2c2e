"""Plan or answer directly: rules for what never gains, else the model's own word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from foretell.plato.options import PlatoOptions
from foretell.text.tokenizer import Tokenizer

MIN_ANSWER_TOKENS: Final = 96
"""A shorter answer is written before its plan would be."""

_DIRECT_FROM: Final = 0.5
"""Probability of DIRECT, against that of a first line, from which on a question is answered directly."""

_NO_GAIN: Final = (
    (
        r"```|\b(write|fix|debug|implement|refactor)\b.{0,20}"
        r"\b(code|function|program|script|class|query|regex|algorithm)\b",
        "code",
    ),
    (r"\b(in|as|return|output|valid) (json|yaml|csv|xml)\b", "a format to keep to"),
    (r"\b(calculate|compute|solve|how (many|much))\b|\bwhat is \d|\d\s*[-+*/^=]\s*\d", "a calculation"),
    (r"\b(in one (word|sentence)|yes or no|translate)\b", "a short answer"),
)
"""What a question asks for that does not come in parts, by patterns of its text."""


@dataclass(frozen=True, slots=True)
class Route:
    """Whether a question is planned, and why."""

    is_direct: bool
    direct_probability: float | None
    reason: str


class Router:
    """Decides for one question.

    As a logits processor of the plan's sequence it reads, at the plan's first token, how likely the model finds DIRECT
    and how likely a first line, and leaves only the better of the two.

    Args:
        tokenizer: the model's.
        num_prompt_tokens: of the planning prompt.
    """

    def __init__(self, tokenizer: Tokenizer, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._direct_id = tokenizer.encode("DIRECT", add_special_tokens=False)[0]
        self._plan_id = tokenizer.encode("1", add_special_tokens=False)[0]
        self.direct_probability: float | None = None

    def __call__(self, token_ids: Any, scores: Any) -> Any:
        """Keep one of the two ways to begin, where a plan begins; `scores` [1, V]."""
        if token_ids.shape[1] != self._num_prompt_tokens:
            return scores
        both = scores[0, [self._direct_id, self._plan_id]].softmax(0)  # [2]
        self.direct_probability = float(both[0])
        scores = scores.clone()
        scores[0, self._plan_id if self.direct_probability >= _DIRECT_FROM else self._direct_id] = -float("inf")
        return scores

    def route(self) -> Route:
        """Return what the model chose; after its first token."""
        probability = self.direct_probability
        assert probability is not None
        if probability >= _DIRECT_FROM:
            return Route(True, probability, "the model chose to answer directly")
        return Route(False, probability, "the model chose to plan")


def route_by_rule(question: str, options: PlatoOptions) -> Route | None:
    """Return the decision where the question's text or the options make it; None where the model is to be asked."""
    if options.force_plan:
        return Route(False, None, "a plan was asked for")
    if options.max_answer_tokens < MIN_ANSWER_TOKENS:
        return Route(True, None, f"the answer may have {options.max_answer_tokens} tokens, fewer than a plan pays for")
    for pattern, asks_for in _NO_GAIN:
        if re.search(pattern, question, re.IGNORECASE | re.DOTALL):
            return Route(True, None, f"the question asks for {asks_for}")
    return None
