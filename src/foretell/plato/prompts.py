"""What the model reads: how to plan, the question, and which part to write.

Texts that requests share come first, then what the parts of one answer share: keys and values are reused from the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from foretell.errors import InputError
from foretell.plato.plan import Part
from foretell.text.tokenizer import Message, Tokenizer

_RULES: Final = (
    "First plan the answer: one line for each part, with its number, a short title, and after < the numbers of the "
    "parts that it builds on, or - if it builds on none. The last line is END. Write DIRECT instead of a plan if the "
    "answer is short, a calculation, a translation or code. Then write each part when asked."
)

_EXAMPLES: Final = (
    ("What is 17 times 3?", "DIRECT\n"),
    (
        "How does a seed become a tree?",
        "1. The seed sprouts < -\n2. The seedling grows < 1\n3. The young tree < 2\nEND\n",
    ),
    (
        "How do I choose a bicycle?",
        "1. Types of bicycles < -\n2. Size and fit < -\n3. Comfort < -\n4. Budget < -\n5. Choosing < 1,2,3,4\nEND\n",
    ),
    (
        "Why do people keep pets?",
        "1. Company < -\n2. Health < -\n3. Children < -\n4. Safety < -\n5. Work < -\n6. Costs < -\nEND\n",
    ),
)

_MARK: Final = "\x1fanswer\x1f"
"""Stands for an answer while a conversation is rendered, so that what follows it can be found."""


@dataclass(frozen=True, slots=True)
class QuotedPart:
    """A part that is written already."""

    part: Part
    text: str


class PlanPrompts:
    """The token ids of every prompt that a planned answer takes.

    Args:
        tokenizer: of a model with a chat template.

    Raises:
        InputError: the model has no chat template, or one that changes earlier answers.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        first, second = (tokenizer.encode_chat(planning_messages(question)) for question in ("Why?", "How much?"))
        self.num_shared = next(place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        """Tokens of rules and examples, which all planning prompts begin with."""
        rendered = tokenizer.render_chat(
            [*planning_messages("Why?"), {"role": "assistant", "content": _MARK}, {"role": "user", "content": _MARK}]
        )
        if rendered.count(_MARK) != 2:
            raise InputError("the model's chat template changes earlier answers: parts cannot be written after a plan")
        _, self._turn, self._tail = rendered.split(_MARK)

    def planning(self, question: str) -> list[int]:
        """Return the prompt after which the model writes its plan."""
        return self._tokenizer.encode_chat(planning_messages(question))

    def plain(self, question: str) -> list[int]:
        """Return the prompt of plain decoding."""
        return self._tokenizer.encode_chat([{"role": "user", "content": question}])

    def part(self, part: Part, *, is_last: bool) -> list[int]:
        """Return what asks for a part after the plan's lines; `is_last`: whether the answer ends with it."""
        text = self._turn + part_request(part, [], is_last=is_last) + self._tail + heading(part.title)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def next_part(self, part: Part, quoted: Sequence[QuotedPart]) -> list[int]:
        """Return what has the model go on with a part after the text of one that it builds on, in the same answer.

        Args:
            part: what to write.
            quoted: other parts that it builds on and that the text before does not hold, in the order of their ids.
        """
        text = "".join(f"{heading(each.part.title)}{each.text}\n\n" for each in quoted)
        return self._tokenizer.encode(f"\n\n{text}{heading(part.title)}", add_special_tokens=False)

    def point(self, question: str, titles: Sequence[str], number: int) -> list[int]:
        """Return Skeleton-of-Thought's prompt for one point."""
        begun = self._tokenizer.encode(heading(titles[number - 1]), add_special_tokens=False)
        return [*self._tokenizer.encode_chat(point_messages(question, titles, number)), *begun]


def planning_messages(question: str) -> list[Message]:
    """Return the conversation that a plan answers."""
    messages: list[Message] = [{"role": "system", "content": _RULES}]
    for asked, plan in _EXAMPLES:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": plan}]
    return [*messages, {"role": "user", "content": question}]


def plan_text(parts: Sequence[Part], *, is_whole: bool) -> str:
    """Return a plan, or its beginning, as the grammar has it."""
    lines = [f"{part.id}. {part.title} < {','.join(map(str, part.needs)) or '-'}\n" for part in parts]
    return "".join([*lines, "END\n"] if is_whole else lines)


def heading(title: str) -> str:
    """Return what stands above a part's text. The model goes on from it, where it might greet or plan again."""
    return f"**{title}**\n\n"


def part_request(part: Part, quoted: Sequence[QuotedPart], *, is_last: bool, lost: Sequence[Part] = ()) -> str:
    """Return what asks for a part; `lost` are parts that it builds on and that are missing."""
    written = "".join(f"{heading(each.part.title)}{each.text}\n\n" for each in quoted)
    missing = "".join(f"The part about {each.title} is missing.\n\n" for each in lost)
    end = "" if is_last else " More parts follow: do not conclude."
    return f"{written}{missing}Write a paragraph about: {part.title}.{end}"


def point_messages(question: str, titles: Sequence[str], number: int) -> list[Message]:
    """Return Skeleton-of-Thought's conversation for a point (arXiv:2307.15337): the outline, no other point's text."""
    outline = "\n".join(f"{place}. {title}" for place, title in enumerate(titles, start=1))
    ask = (
        f"{question}\n\nThe skeleton of the answer:\n{outline}\n\n"
        f"Write a paragraph about point {number}: {titles[number - 1]}."
    )
    return [{"role": "user", "content": ask}]
