"""Decide what a server is to write: the plan, each part as soon as it can be, or the whole answer."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from foretell.errors import ConfigError, InputError, RemoteError
from foretell.plato.events import (
    Event,
    FellBack,
    Finished,
    PartEnd,
    PartEnded,
    PartResult,
    PartStarted,
    PartText,
    PlanEnded,
    Routed,
)
from foretell.plato.grammar import plan_gbnf, plan_grammar
from foretell.plato.options import PlatoOptions
from foretell.plato.plan import Part, Plan
from foretell.plato.prompts import QuotedPart, heading, part_request, plan_text, planning_messages, point_messages
from foretell.plato.reader import PlanReader
from foretell.plato.remote_texts import Note, RemoteText, RemoteTexts, assistant_message
from foretell.plato.router import Route, route_by_rule
from foretell.plato.run import AnswerRun
from foretell.plato.schedule import Launch
from foretell.plato.server_client import ChatRequest, Piece, ServerClient, StreamBrokenError
from foretell.text.chat_template import Message

_LINE_TOKENS: Final = 24
"""Most tokens of a plan's line, on average; a plan has room for 16 more."""

_NUM_AFTER_PLAN: Final = 4
"""Pieces that may follow a complete plan before its stream is closed: time for END, and for the server's counts."""


class RemoteRun(AnswerRun):
    """One question, until it is answered. What is decided follows from notes, one at a time, and awaits nothing.

    Raises:
        ConfigError: the options choose what is the server's to choose.
        InputError: the question is empty.
    """

    def __init__(
        self,
        server: ServerClient,
        question: str,
        options: PlatoOptions,
        sleep: Callable[[float], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        limits = (options.drafter, options.max_rows, options.max_slots)
        if not options.is_reusing or any(limit is not None for limit in limits):
            raise ConfigError(
                "`drafter`, `is_reusing`, `max_rows` and `max_slots` have no effect on a server, which decides itself: "
                "drop them"
            )
        if not question.strip():
            raise InputError("the question is empty")
        super().__init__(question, options, clock, max_share=2)  # to a part on most servers nothing can be added later
        self._server = server
        self._texts = RemoteTexts(server, sleep)
        self._planning: RemoteText | None = None
        self._reader: PlanReader | None = None
        self._num_plan_pieces = 0
        self._written: dict[int, RemoteText] = {}
        self._results: dict[int, PartResult] = {}
        self._frontier = 1
        self._failure: RemoteError | None = None
        self._is_routed = self._is_planned = self._is_closed = self._is_done = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield what happens until the answer is there."""
        await self._server.connect()
        is_planned = self._options.mode != "sequential"
        route = route_by_rule(self._question, self._options) if is_planned else Route(True, None, "asked for")
        if route is None or not route.is_direct:
            await self._server.find_grammar()
        if self._options.deadline_s is not None:
            self._texts.expire_after(self._options.deadline_s - self._now_s())
        for event in self._begin(route):
            yield event
        async with aclosing(self._texts.notes()) as notes:
            while not self._is_done:
                for event in self._take(await anext(notes)):
                    yield event
        yield self._finish()

    async def close(self) -> None:
        """Close all streams."""
        await self._texts.close()

    # What happens

    def _begin(self, route: Route | None) -> Iterator[Event]:
        if route is not None and route.is_direct:
            yield from self._write_directly(route.reason)
            return
        if route is not None:
            yield self._route(route.reason)
        options = self._options
        regex = plan_grammar(options.num_plannable, may_be_direct=route is None)
        gbnf = plan_gbnf(options.num_plannable, may_be_direct=route is None)
        request = replace(
            self._request(planning_messages(self._question), 16 + _LINE_TOKENS * options.max_parts),
            grammar={"structured_outputs": {"regex": regex}, "regex": regex, "grammar": gbnf},
            stop="\nEND",
        )
        self._planning = self._texts.start(RemoteText(request))

    def _take(self, note: Note) -> Iterator[Event]:
        if note.text is None:
            yield from self._expire()
        elif isinstance(note.outcome, Piece):
            yield from self._take_piece(note.text, note.outcome.text)
        else:
            yield from self._take_end(note.text, note.outcome)
        if self._is_planned and not self._answer.is_direct and self._schedule.is_done:
            yield from self._end_parts()

    def _take_piece(self, writing: RemoteText, text: str) -> Iterator[Event]:
        if writing is self._planning:
            yield from self._read_plan(writing, text)
        elif not text:
            return
        elif writing.part is None:
            writing.num_shown = len(writing.text)
            yield self._answer_text(text)
        else:
            yield PartText(writing.part.id, text)
            yield from self._show()

    def _take_end(self, writing: RemoteText, error: Exception | None) -> Iterator[Event]:
        if error is not None and not isinstance(error, RemoteError):
            raise error
        if writing is self._planning and self._is_planned:
            return
        if error is None and not writing.text.strip():
            error = StreamBrokenError(
                "the model wrote nothing: if it thinks first, switch that off at the server, or allow more tokens"
            )
        if isinstance(error, StreamBrokenError) and not writing.is_retried and self._can_retry(writing):
            yield from self._retry(writing)
            return
        self._failure = error or self._failure
        if writing is self._planning:
            yield from self._end_plan(is_cut=error is not None or writing.finish_reason == "length")
        elif writing.part is None:
            self._end_directly(writing, error)
        else:
            yield from self._end_part(writing, writing.part, error)

    def _can_retry(self, writing: RemoteText) -> bool:
        if writing is self._planning:
            return not self._parts
        return self._server.can_continue or not writing.text[: writing.num_shown].strip()

    def _retry(self, writing: RemoteText) -> Iterator[Event]:
        """Let a text go on where the server can do that, else write it anew."""
        if writing is not self._planning and self._server.can_continue and writing.text.strip():
            writing.is_retried = True
            self._texts.go_on(writing, writing.request.max_tokens - writing.num_tokens)
            return
        anew = RemoteText(writing.request, writing.part, writing.beginning, writing.holds, writing.started_s)
        anew.is_retried = True
        self._texts.start(anew)
        if writing is self._planning:
            self._planning, self._reader = anew, None
        elif anew.part is not None:
            self._written[anew.part.id] = anew
            yield PartStarted(anew.part.id)

    def _expire(self) -> Iterator[Event]:
        """Start nothing from now on, nor what the server has not accepted yet."""
        self._is_closed = True
        self._schedule.expire()
        if self._planning is not None and self._planning in self._texts and not self._is_planned:
            self._texts.stop(self._planning)
            yield from self._end_plan(is_cut=True)
        for writing in self._texts:
            if writing.part is not None and not writing.is_accepted:
                self._texts.stop(writing)
                self._failure = RemoteError("the deadline was over before the server accepted it: allow more time")
                yield from self._end_part(writing, writing.part, self._failure)
        yield from self._show()

    # Planning

    def _read_plan(self, planning: RemoteText, text: str) -> Iterator[Event]:
        if self._is_planned:
            if planning.num_pieces > self._num_plan_pieces + _NUM_AFTER_PLAN:
                self._texts.stop(planning)
            return
        if self._reader is None:
            self._reader = PlanReader(self._options.max_parts, is_strict=self._server.obeys_grammar)
        for part in self._reader.push(text):
            yield from self._add(part)
        if self._reader.is_ended:
            self._num_plan_pieces = planning.num_pieces
            yield from self._end_plan(is_cut=False)
        else:
            yield from self._launch()

    def _add(self, part: Part) -> Iterator[Event]:
        if not self._is_routed:
            yield self._route("the model chose to plan")
        yield self._add_part(part)

    def _end_plan(self, *, is_cut: bool) -> Iterator[Event]:
        self._is_planned = True
        plan = None if self._reader is None else self._reader.close(is_cut=is_cut)
        repairs = self._answer.repairs = () if self._reader is None else self._reader.repairs
        if plan is None and not self._assembly.text:
            yield from self._give_up_plan(repairs)
            return
        for part in () if plan is None else plan.parts[len(self._parts) :]:
            yield from self._add(part)
        self._answer.plan = Plan(tuple(self._parts))
        self._schedule.end_plan()
        yield PlanEnded(self._answer.plan, repairs)
        yield from self._launch()

    def _give_up_plan(self, repairs: Sequence[str]) -> Iterator[Event]:
        assert self._planning is not None
        if not self._is_routed and re.search(r"^\W*DIRECT\b", self._planning.text, re.MULTILINE):
            yield from self._write_directly("the model chose to answer directly")
            return
        if not self._is_routed:
            yield self._route("the model was asked to plan")
        why = "; ".join([*repairs, *([] if self._failure is None else [str(self._failure)])])
        yield FellBack("no plan of two parts or more" + (f": {why}" if why else ""))
        yield from self._write_directly(None)

    # Writing

    def _launch(self) -> Iterator[Event]:
        for launch in self._schedule.start():
            part_id, max_tokens = launch.part.id, launch.max_new_tokens
            if not self._is_planned and not self._server.can_continue:
                max_tokens += self._schedule.extend(part_id)  # it cannot get more later
            messages, holds = self._conversation(launch)
            beginning = heading(launch.part.title)
            if not self._server.can_continue:
                beginning, ask = "", messages.pop()["content"]
                messages.append({"role": "user", "content": f"{ask} Leave out the title."})
            request = self._request(messages, max_tokens, part_id)
            writing = RemoteText(request, launch.part, beginning, holds | {part_id}, self._now_s())
            self._written[part_id] = self._texts.start(writing)
            yield PartStarted(part_id)

    def _conversation(self, launch: Launch) -> tuple[list[Message], frozenset[int]]:
        """Return what a part answers, and the parts in it: the plan or a parent's conversation, parts that it lacks."""
        part, plan = launch.part, self._answer.plan
        if self._options.mode == "sot":
            titles = [each.title for each in self._parts]
            return list(point_messages(self._question, titles, part.id)), frozenset()
        if launch.primary is not None:
            parent = self._written[launch.primary]
            before, holds = [*parent.request.messages, parent.message], parent.holds
        else:
            is_whole = plan is not None and self._options.visibility == "full"
            written = plan_text(self._parts if is_whole else self._parts[: part.id], is_whole=is_whole)
            before, holds = [*planning_messages(self._question), assistant_message(written)], frozenset()
        missing = [need for need in launch.needs_all if need not in holds]
        quoted = [QuotedPart(self._parts[need - 1], self._written[need].text.strip()) for need in missing]
        lost = [self._parts[need - 1] for need in launch.lost]
        ask = part_request(part, quoted, is_last=plan is not None and part.id == len(plan), lost=lost)
        return [*before, {"role": "user", "content": ask}], holds | set(missing)

    def _end_part(self, writing: RemoteText, part: Part, error: RemoteError | None) -> Iterator[Event]:
        is_cut = writing.finish_reason == "length"
        if is_cut and error is None and self._server.can_continue and (more := self._schedule.extend(part.id)):
            self._texts.go_on(writing, more)
            return
        reason: PartEnd = "length" if is_cut else "stop" if error is None else "failed"
        self._results[part.id] = PartResult(
            part=part,
            text=writing.text,
            num_tokens=writing.num_tokens,
            num_computed=writing.num_computed,
            num_reused=writing.num_reused,
            started_s=writing.started_s,
            ended_s=self._now_s(),
            reason=reason,
        )
        self._schedule.end(part.id, writing.num_tokens, reason)
        yield PartEnded(part.id, reason, writing.num_tokens)
        yield from self._show()
        yield from self._launch()

    def _show(self) -> Iterator[Event]:
        """Give the answer the text of the first part that has not ended; those after it may still be written anew."""
        fresh = ""
        while self._frontier <= len(self._parts):
            writing = self._written.get(self._frontier)
            if writing is not None and len(writing.text) > writing.num_shown:
                fresh += self._assembly.push(self._frontier, writing.text[writing.num_shown :])
                writing.num_shown = len(writing.text)
            if self._frontier not in self._results and not (self._is_closed and writing is None):
                break
            fresh += self._assembly.end(self._frontier)
            self._frontier += 1
        if fresh:
            yield self._answer_text(fresh)

    def _end_parts(self) -> Iterator[Event]:
        self._is_closed = True
        yield from self._show()
        answer = self._answer
        if not answer.text.strip():
            yield FellBack(f"no part was written: {self._failure or 'all are empty'}")
            yield from self._write_directly(None)
            return
        answer.parts = [self._results[part_id] for part_id in sorted(self._results)]
        answer.num_answer_tokens = sum(result.num_tokens for result in answer.parts)
        self._is_done = True

    # The question as it is

    def _write_directly(self, reason: str | None) -> Iterator[Event]:
        """Ask for the whole answer; without a reason it takes the place of a plan that was given up."""
        if reason is not None:
            yield Routed(True, None, reason)
        for writing in self._texts:
            self._texts.stop(writing)
        self._answer.is_direct, self._answer.plan = True, None
        messages: list[Message] = [{"role": "user", "content": self._question}]
        self._texts.start(RemoteText(self._request(messages, self._options.max_answer_tokens)))

    def _end_directly(self, writing: RemoteText, error: RemoteError | None) -> None:
        if error is not None:
            if not writing.text.strip():
                raise error
            self._answer.repairs += (f"the answer broke off: {error}",)
        self._answer.num_answer_tokens = writing.num_tokens
        self._is_done = True

    # What all share

    def _finish(self) -> Finished:
        answer, planning = self._answer, self._planning
        if planning is not None:
            if planning in self._texts:
                self._texts.stop(planning)
            answer.num_plan_tokens = planning.num_tokens
        answer.num_computed, answer.num_reused = self._texts.num_computed, self._texts.num_reused
        answer.total_s = self._now_s()
        return Finished(answer)

    def _route(self, reason: str) -> Routed:
        self._is_routed = True
        return Routed(False, None, reason)

    def _request(self, messages: Sequence[Message], max_tokens: int, part_id: int = 0) -> ChatRequest:
        seed = None if self._options.seed is None else self._options.seed + part_id
        return ChatRequest(messages=messages, max_tokens=max_tokens, temperature=self._options.temperature, seed=seed)
