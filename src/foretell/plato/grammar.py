r"""The language of plans, for engines that let a model write nothing else.

```
1. Types of bicycles < -
2. Budget < -
3. Which one to buy < 1,2
END
```

One line for each part: its id, its title, and the ids of the parts that it needs. Ids ascend and needs are smaller ids,
so a plan that fits has neither cycles nor unknown ids, and everything is bounded: no model can loop in it. `DIRECT` in
place of a plan says that the question is answered without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from foretell.plato.plan import MAX_PARTS

MIN_TITLE: Final = 3
MAX_TITLE: Final = 40
"""Characters of a title without the blanks between its words: an expression without look-ahead cannot count both."""

_MARK: Final = r"[^ \t\r\n|<]"

TITLE: Final = f"{_MARK}( ?{_MARK}){{{MIN_TITLE - 1},{MAX_TITLE - 1}}}"
"""A title: no `|`, no `<`, single blanks between words and none around them. Holds a group."""


def plan_grammar(max_parts: int = MAX_PARTS, *, may_be_direct: bool = True) -> str:
    r"""Return a regular expression that whole plans match, newline after `END` included.

    Made of literals, `\n`, `\.`, one negated class, `|`, `?`, `{m,n}` and plain groups, which Rust's regex crate,
    llguidance, xgrammar and `re` read alike.

    Args:
        max_parts: most parts, at least 2; the fewest are 2.
        may_be_direct: whether `DIRECT` may be written instead.

    Cost: 0.8 kB for 8 parts. With 49k token ids llguidance compiles it in 1.3 ms, and the masks of a plan's tokens take
    0.03 ms each (median; at most 0.5).
    """
    _check(max_parts)
    rest = r"END\n"
    for part_id in range(max_parts, 2, -1):
        rest = rf"({part_id}\. {TITLE} < (-|{_needs(part_id, str, _optional)})\n{rest}|END\n)"
    plan = rf"1\. {TITLE} < -\n2\. {TITLE} < (-|1)\n{rest}"
    return rf"(DIRECT\n|{plan})" if may_be_direct else plan


def plan_gbnf(max_parts: int = MAX_PARTS, *, may_be_direct: bool = True) -> str:
    """Return the same language in llama.cpp's grammar format.

    Args:
        max_parts: most parts, at least 2; the fewest are 2.
        may_be_direct: whether `DIRECT` may be written instead.
    """
    _check(max_parts)
    rules = [
        'root ::= "DIRECT\\n" | plan' if may_be_direct else "root ::= plan",
        f'plan ::= "1. " title " < -\\n2. " title " < " ("-" | "1") "\\n" {_rest_name(3, max_parts)}',
    ]
    for part_id in range(3, max_parts + 1):
        needs = _needs(part_id, _quoted, _quoted_optional)
        line = f'"{part_id}. " title " < " ("-" | {needs}) "\\n" {_rest_name(part_id + 1, max_parts)}'
        rules.append(f'rest{part_id} ::= "END\\n" | {line}')
    rules += [f'title ::= mark (" "? mark){{{MIN_TITLE - 1},{MAX_TITLE - 1}}}', f"mark ::= {_MARK}"]
    return "\n".join(rules) + "\n"


def _check(max_parts: int) -> None:
    assert 2 <= max_parts <= MAX_PARTS, f"plans have 2 to {MAX_PARTS} parts, not {max_parts}"


def _needs(part_id: int, first: Callable[[int], str], later: Callable[[int], str]) -> str:
    """Return all that a part may need, written out: ascending ids, at least one, told apart by the smallest."""
    return "|".join(
        first(least) + "".join(later(need) for need in range(least + 1, part_id)) for least in range(1, part_id)
    )


def _optional(need: int) -> str:
    return f"(,{need})?"


def _quoted(need: int) -> str:
    return f'"{need}"'


def _quoted_optional(need: int) -> str:
    return f' (",{need}")?'


def _rest_name(part_id: int, max_parts: int) -> str:
    return f"rest{part_id}" if part_id <= max_parts else '"END\\n"'
