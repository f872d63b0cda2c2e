from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.arms import PLAIN_AGAIN, Arm, ForetellArm, with_second_plain
from foretell.bench.journal import Journal
from foretell.bench.measurement import Measurement, Round
from foretell.bench.runner import WARM_UP_TOKENS, measure_rounds
from foretell.errors import CapacityError, ConfigError
from foretell.params import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=21)


def arms_of(llm: Any, *names: str) -> list[Arm]:
    own: list[Arm] = [ForetellArm(key=name, drafter=name, llm=llm, clock=llm.clock) for name in ("none", *names)]
    return with_second_plain(own, llm, clock=llm.clock)


class Notes:
    def __init__(self) -> None:
        self.num_steps = 0
        self.steps: list[str] = []
        self.notes: list[str] = []

    def begin(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def step(self, label: str) -> None:
        self.steps.append(label)

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_second_plain_stands_half_way(fake_llm: Callable[..., Any]) -> None:
    keys = [arm.key for arm in arms_of(fake_llm(), "lookup", "suffix", "ngram", "all")]
    assert keys == ["none", "lookup", "suffix", PLAIN_AGAIN, "ngram", "all"]
    assert [arm.key for arm in arms_of(fake_llm())] == ["none", PLAIN_AGAIN]


def test_every_arm_runs_once_per_prompt_and_repeat_in_rotating_order(fake_llm: Callable[..., Any]) -> None:
    notes = Notes()
    rounds = measure_rounds(arms_of(fake_llm(), "all"), [[1], [2]], SAMPLING, repeats=3, progress=notes)
    assert [(each.prompt, each.repeat) for each in rounds] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    orders = [list(each.measurements) for each in rounds]
    assert orders[0] == ["none", "all", PLAIN_AGAIN]
    assert orders[1] == orders[2] == ["all", PLAIN_AGAIN, "none"]
    assert orders[3] == orders[4] == [PLAIN_AGAIN, "none", "all"]
    assert notes.num_steps == len(notes.steps) == 18
    assert notes.steps[0] == "prompt 1, repeat 1: none"


def test_warm_up_comes_first_is_short_and_is_not_reported(fake_llm: Callable[..., Any]) -> None:
    llm = fake_llm()
    measure_rounds(arms_of(llm, "all"), [[1], [2]], SamplingParams(max_new_tokens=30, min_new_tokens=20), repeats=1)
    assert len(llm.calls) == 3 + 2 * 3
    for _, prompt_ids, sampling in llm.calls[:3]:
        assert prompt_ids == (1,)
        assert sampling.max_new_tokens == sampling.min_new_tokens == WARM_UP_TOKENS
    assert {sampling.max_new_tokens for _, _, sampling in llm.calls[3:]} == {30}


def test_wall_time_is_the_benchmarks_own_and_holds_what_the_engine_does_not_count(
    fake_llm: Callable[..., Any],
) -> None:
    (finished,) = measure_rounds(arms_of(fake_llm(), "all"), [[1]], SAMPLING, repeats=1)
    plain, drafted = finished.measurements["none"], finished.measurements["all"]
    assert plain.wall_s == pytest.approx(0.5 + 20 * 0.02 + 0.1)
    assert drafted.wall_s == pytest.approx(0.5 + 5 * 0.02 + 0.1)
    assert (drafted.ttft_s, drafted.prefill_s, drafted.num_passes) == (0.5, 0.4, 5)
    assert drafted.tokens_per_pass_counts == {4: 5}
    assert drafted.accepted == {"all": 15}


def test_an_error_names_arm_and_prompt() -> None:
    class Failing:
        key = "all"

        def measure(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Measurement:
            if prompt_ids == [2]:
                raise CapacityError("too long")
            return Measurement(token_ids=(1, 2), wall_s=1.0, ttft_s=0.1, decode_s=0.1)

    with pytest.raises(CapacityError, match="all on prompt 2 of the suite: too long"):
        measure_rounds([Failing()], [[1], [2]], SAMPLING, repeats=1)


def test_measurement_survives_json() -> None:
    measurement = Measurement(
        token_ids=(3, 4),
        wall_s=1.0,
        ttft_s=0.5,
        decode_s=0.25,
        tokens_per_pass_counts={2: 7},
        drafted={"lookup": 3},
    )
    import json

    assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement
    assert measurement.num_decode_tokens == 1


def test_resumed_run_measures_only_what_is_missing(fake_llm: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "rounds.jsonl"
    first = fake_llm()
    partial = measure_rounds(arms_of(first, "all"), [[1]], SAMPLING, repeats=2, journal=Journal(path, {"a": 1}))
    with path.open("a") as file:
        file.write('{"configuration": "torn')
    second = fake_llm()
    rounds = measure_rounds(arms_of(second, "all"), [[1], [2]], SAMPLING, repeats=2, journal=Journal(path, {"a": 1}))
    assert {call[1] for call in second.calls[3:]} == {(2,)}
    assert [each for each in rounds if each.prompt == 0] == partial
    third = fake_llm()
    again = measure_rounds(arms_of(third, "all"), [[1], [2]], SAMPLING, repeats=2, journal=Journal(path, {"a": 1}))
    assert again == rounds
    assert third.calls == []


def test_rounds_of_a_version_that_counted_less_are_measured_again(fake_llm: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    measure_rounds(arms_of(fake_llm()), [[1]], SAMPLING, repeats=1, journal=Journal(path, {"a": 1}))
    old = path.read_text().replace('"target_bytes": ', '"other_bytes": ')
    path.write_text(old)
    second = fake_llm()
    rounds = measure_rounds(arms_of(second), [[1]], SAMPLING, repeats=1, journal=Journal(path, {"a": 1}))
    assert len(second.calls) > 0
    assert path.read_text().startswith(old)
    assert Journal(path, {"a": 1}).find(0, 0) == rounds[0]


def test_rounds_of_another_configuration_are_not_used_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    finished = Round(prompt=0, repeat=0, measurements={})
    Journal(path, {"a": 1}).add(finished)
    other = Journal(path, {"a": 2})
    assert other.find(0, 0) is None
    other.add(Round(prompt=1, repeat=0, measurements={}))
    assert Journal(path, {"a": 1}).find(0, 0) == finished
    assert Journal(path, {"a": 1}).find(1, 0) is None


def test_unusable_resume_file_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read resume file"):
        Journal(tmp_path, {})
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "rounds.jsonl", {})
    with pytest.raises(ConfigError, match="cannot write resume file"):
        journal.add(Round(prompt=0, repeat=0, measurements={}))


def test_a_resume_file_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(b"Dear \xff friend,\nhow are you?\n")
    with pytest.raises(ConfigError, match="holds something else than a benchmark's rounds"):
        Journal(path, {})
    assert path.read_bytes() == b"Dear \xff friend,\nhow are you?\n"
