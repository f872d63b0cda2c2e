"""Run every arm on every prompt, in an order that spreads the machine's moods over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from foretell.bench.arms import Arm
from foretell.bench.journal import Journal
from foretell.bench.measurement import Measurement, Round
from foretell.errors import ForetellError
from foretell.params import SamplingParams

WARM_UP_TOKENS: Final = 16


class Progress(Protocol):
    """Where a long run says how far it is."""

    def begin(self, num_steps: int) -> None:
        """Announce the number of steps."""

    def step(self, label: str) -> None:
        """Say what runs now; the one before it is done."""

    def note(self, text: str) -> None:
        """Say something that the reader should know, in one line."""


class NoProgress:
    """Say nothing."""

    def begin(self, num_steps: int) -> None: ...

    def step(self, label: str) -> None: ...

    def note(self, text: str) -> None: ...


def measure_rounds(
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    repeats: int,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> list[Round]:
    """Measure each arm once per prompt and repeat, after one short run of each to warm up.

    All prompts are done before any is repeated: a minute in which the machine is busy then touches one repeat of some
    prompts, which their medians ignore, instead of all repeats of one.

    Args:
        arms: what to compare; each round runs all of them, beginning with another one each time.
        prompts: token ids of each prompt.
        sampling: passed to every arm; sampling needs a seed for outputs to be comparable.
        repeats: rounds per prompt, at least 1.
        journal: finished rounds are taken from it, and new ones added to it.
        progress: told about every run.

    Raises:
        ForetellError: an arm failed; the message names the arm and the prompt.
    """
    assert repeats >= 1
    progress = progress or NoProgress()
    places = [(prompt, repeat) for repeat in range(repeats) for prompt in range(len(prompts))]
    found = {place: journal.find(*place) if journal else None for place in places}
    todo = [place for place in places if found[place] is None]
    progress.begin(len(todo) * len(arms))
    if todo:
        _warm_up(arms, prompts[0], sampling, progress)
    rounds = []
    for prompt, repeat in places:
        finished = found[prompt, repeat]
        if finished is None:
            finished = _measure_round(
                _rotate(arms, prompt + repeat), prompts[prompt], sampling, prompt, repeat, progress
            )
            if journal:
                journal.add(finished)
        rounds.append(finished)
    return rounds


def _warm_up(arms: Sequence[Arm], prompt_ids: Sequence[int], sampling: SamplingParams, progress: Progress) -> None:
    num_tokens = min(WARM_UP_TOKENS, sampling.max_new_tokens)
    short = replace(sampling, max_new_tokens=num_tokens, min_new_tokens=min(sampling.min_new_tokens, num_tokens))
    for arm in arms:
        progress.note(f"warming up {arm.key}")
        _measure(arm, prompt_ids, short, prompt=0)


def _measure_round(
    arms: Sequence[Arm],
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    prompt: int,
    repeat: int,
    progress: Progress,
) -> Round:
    measurements = {}
    for arm in arms:
        progress.step(f"prompt {prompt + 1}, repeat {repeat + 1}: {arm.key}")
        measurements[arm.key] = _measure(arm, prompt_ids, sampling, prompt=prompt)
    return Round(prompt=prompt, repeat=repeat, measurements=measurements)


def _measure(arm: Arm, prompt_ids: Sequence[int], sampling: SamplingParams, *, prompt: int) -> Measurement:
    try:
        return arm.measure(prompt_ids, sampling)
    except ForetellError as error:
        raise type(error)(f"{arm.key} on prompt {prompt + 1} of the suite: {error}") from error


def _rotate(arms: Sequence[Arm], turns: int) -> list[Arm]:
    first = turns % len(arms)
    return [*arms[first:], *arms[:first]]
