"""Build the table of a model's likely next ids and keep it: a part of `foretell tune`."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.drafters.next_ids import KnownNextIds
    from foretell.llm import LLM
    from foretell.text.tokenizer import Tokenizer

Wish = Literal["missing", "always", "never"]
"""When to build: where there is no table yet, in any case, not at all."""

QUESTION: Final = "..."
TEXTS: Final = ("Here is some information about this. It is", "\n\n")
"""What stands before every token: these, and an answer to `QUESTION` where the model can chat. Chosen on greedy answers
of a 135M chat model; the shipped table's card has the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextIdsReport:
    """Which table drafts are drawn from."""

    origin: Literal["shipped", "cached", "none"]
    file: str | None
    num_bytes: int
    build_s: float | None
    """What building took; None where nothing was built."""

    def sentence(self) -> str:
        """Return the report in words."""
        if self.file is None:
            return "likely next ids: none; --next-ids missing builds them"
        built = "" if self.build_s is None else f", built in {self.build_s / 60:.1f} minutes"
        return f"likely next ids: {self.origin}, {self.num_bytes / 1e3:.0f} kB{built}, in {self.file}"


def provide_next_ids(llm: LLM, wish: Wish) -> NextIdsReport:
    """Build and keep a model's table where that is wished, and let its drafters use it.

    Raises:
        ConfigError: it cannot be written.
    """
    build_s = None
    if wish == "always" or (wish == "missing" and llm.next_ids is None):
        started_s = time.perf_counter()
        llm.next_ids = _build(llm)
        build_s = time.perf_counter() - started_s
    known = llm.next_ids
    return NextIdsReport(
        origin="none" if known is None else known.origin,
        file=None if known is None else str(known.path),
        num_bytes=0 if known is None else known.table.nbytes,
        build_s=build_s,
    )


def _build(llm: LLM) -> KnownNextIds:
    from foretell.cli.terminal import counted
    from foretell.engine.next_ids import build_next_ids
    from foretell.passes.runner import Runner
    from foretell.provenance import provenance

    model = llm.engine.runner.model
    runner = Runner(model, model.config.max_positions)  # the LLM's own may have a context too short for the prefixes
    prefixes = _prefixes(llm.tokenizer)
    with counted("building the table of likely next ids") as progress:
        table = build_next_ids(runner, prefixes=prefixes, progress=progress)
    source = provenance()
    facts = {
        "prefixes": json.dumps([llm.tokenizer.decode(ids, skip_special_tokens=False) for ids in prefixes]),
        "dtype": llm.settings["dtype"],
        "foretell": str(source["foretell"]),
        "torch": str(source["torch"]),
        "command": shlex.join(source["argv"]) if isinstance(source["argv"], list) else "",
    }
    return llm.next_ids_store.save(table, facts)


def _prefixes(tokenizer: Tokenizer) -> list[list[int]]:
    prefixes = [tokenizer.encode(text) for text in TEXTS]
    if tokenizer.has_chat_template:
        with suppress(InputError):  # a template may refuse a conversation of one question
            prefixes.append(tokenizer.encode_chat([{"role": "user", "content": QUESTION}]))
    return prefixes
