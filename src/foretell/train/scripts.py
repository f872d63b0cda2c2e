"""What a target is asked to write for its own drafters: conversations through its chat template, and raw text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from foretell.errors import InputError
from foretell.params import SamplingParams
from foretell.result import TokenLogprobs
from foretell.text.tokenizer import Tokenizer
from foretell.verify.choose import TokenChooser

OPENINGS: Final = (
    "",
    "def ",
    "The ",
    "import ",
    "# ",
    "class ",
    "from typing import List\n\n\ndef ",
    "Question: ",
    "In ",
    "1. ",
    "",
    "Once upon a time, ",
    "How to ",
    'def solve(n: int) -> int:\n    """',
    "A ",
    "#include <",
    "Translate ",
    "Dear ",
    "Abstract. ",
    "function ",
    "Let x ",
    "Summary: ",
    "SELECT ",
    "def main():\n",
)
"""How raw texts begin, taken in turn; those of code among them."""

TEMPERATURES: Final = (0.0, 0.8, 0.0, 1.0)
"""Of answers and of raw text, taken in turn: half of it is greedy, as most decoding is."""

TOP_K: Final = 50
TURN_TOKENS: Final = 48
"""Most tokens of a made-up user turn."""
WANDER_TOKENS: Final = 24
"""Tokens at temperature 1 with which a raw text sets out, so that greedy ones do not all say the same."""

_SENTINEL: Final = "\u2402"


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The token ids around a user's turn."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatShape | None:
        """Return what a chat template puts before and after a user's turn; None where there is no template."""
        if not tokenizer.has_chat_template:
            return None
        text = tokenizer.render_chat([{"role": "user", "content": _SENTINEL}])
        before, sentinel, after = text.partition(_SENTINEL)
        if not sentinel:
            raise InputError("the chat template drops the user's turn: train with `--prompts` instead")
        return cls(
            tokenizer.encode(before, add_special_tokens=False), tokenizer.encode(after, add_special_tokens=False)
        )


@dataclass(slots=True)
class Phase:
    """Tokens that one chooser draws, then tokens that are given."""

    chooser: TokenChooser
    max_tokens: int | None = None
    """Then the given tokens follow; None: to the end."""
    end_id: int | None = None
    """Drawing it ends the phase too; it is the first of the given tokens."""
    given: Sequence[int] = ()


@dataclass(slots=True)
class ScriptedChooser:
    """Draws a text phase by phase; what must stand between two phases it gives as if the model had chosen it.

    Keeps state, so it serves plain decoding only: one choice per position, in order.
    """

    phases: list[Phase]
    end_ids: frozenset[int] = frozenset()
    """They end the text where the last phase draws one."""
    temperature: float = 0.0
    """Of the last phase."""
    answer_start: int = 0
    """Position of the last phase's first token, once it is drawn."""
    _waiting: list[int] = field(default_factory=list)
    _num_drawn: int = 0

    def is_over(self, token_id: int) -> bool:
        """Return whether the token just drawn ends the text."""
        return len(self.phases) == 1 and self._num_drawn > 0 and token_id in self.end_ids

    def choose(self, logits: Tensor, context_ids: Sequence[int]) -> int:
        """Return the next token of the text."""
        if self._waiting:
            return self._waiting.pop(0)
        phase = self.phases[0]
        if len(self.phases) == 1 and self._num_drawn == 0:
            self.answer_start = len(context_ids)
        is_over = phase.max_tokens is not None and self._num_drawn >= phase.max_tokens
        token_id = -1 if is_over else phase.chooser.choose(logits, context_ids)
        self._num_drawn += 1
        if not is_over and token_id != phase.end_id:
            return token_id
        self._waiting, self._num_drawn = list(phase.given), 0
        self.phases.pop(0)
        return self._waiting.pop(0) if self._waiting else self.choose(logits, context_ids)

    def logprobs(self, logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
        """Not asked for."""
        raise NotImplementedError


def chat_script(
    shape: ChatShape, number: int, *, seed: int, vocab_size: int, end_ids: frozenset[int]
) -> ScriptedChooser:
    """Return the chooser of a made-up user turn and its answer."""
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    turn = Phase(_chooser(1.0, number, seed, vocab_size), TURN_TOKENS, shape.after[0], shape.after)
    answer = Phase(_chooser(temperature, number, seed, vocab_size))
    return ScriptedChooser([turn, answer], end_ids, temperature)


def answer_script(
    turns: Sequence[Sequence[int]],
    after: Sequence[int],
    number: int,
    *,
    seed: int,
    vocab_size: int,
    end_ids: frozenset[int],
) -> ScriptedChooser:
    """Return the chooser of an answer to one of the given user turns, which are taken in turn."""
    turn, temperature = turns[number % len(turns)], TEMPERATURES[number // len(turns) % len(TEMPERATURES)]
    answer = Phase(_chooser(temperature, number, seed, vocab_size))
    return ScriptedChooser([answer], end_ids, temperature, _waiting=[*turn, *after])


def read_turns(path: Path, tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Return the user turns of a JSON Lines file: each line has `prompt`, or `turns`, of which the first counts.

    Args:
        path: the file.
        tokenizer: of the target.
        max_tokens: longer turns are left out, since they leave no room for an answer.

    Raises:
        InputError: the file cannot be read or is empty, a line is no such object, or no turn is short enough.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other line ends, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts {path} cannot be read ({error}): give a JSON Lines file in UTF-8") from None
    turns = [
        tokenizer.encode(_turn(path, number, line), add_special_tokens=False)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not turns:
        raise InputError(f'prompts {path} is empty: give one object with "prompt" or "turns" a line')
    short = [turn for turn in turns if 0 < len(turn) <= max_tokens]
    if not short:
        raise InputError(f"prompts {path} has {len(turns)} turns, none of 1 to {max_tokens} tokens: give shorter ones")
    return short


def _turn(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
        turns = [row["prompt"]] if "prompt" in row else row["turns"]
        text = turns[0] if isinstance(turns, list) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise InputError(
            f'{path}:{number} is no object with "prompt", a text, or "turns", a list of texts: '
            "see `foretell train draft --help`"
        )
    return text


def raw_script(
    openings: Sequence[Sequence[int]], number: int, *, seed: int, vocab_size: int, end_ids: frozenset[int]
) -> ScriptedChooser:
    """Return the chooser of a text that begins with one of the openings."""
    opening = openings[number % len(openings)]
    temperature = TEMPERATURES[number // len(openings) % len(TEMPERATURES)]
    wander = Phase(_chooser(1.0, number, seed, vocab_size), WANDER_TOKENS)
    rest = Phase(_chooser(temperature, number, seed, vocab_size))
    return ScriptedChooser([wander, rest], end_ids, temperature, _waiting=list(opening))


def _chooser(temperature: float, number: int, seed: int, vocab_size: int) -> TokenChooser:
    return TokenChooser(
        SamplingParams(temperature=temperature, top_k=TOP_K if temperature else 0),
        num_prompt_tokens=0,
        eos_ids=(),
        seed=seed,
        sequence_key=number,
        vocab_size=vocab_size,
    )
