from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from foretell.bench.aggregate import (
    BenchResult,
    forward_share,
    pass_counts,
    result_rows,
    rows_per_pass,
    summarise_prompts,
)
from foretell.bench.arms import PLAIN_AGAIN, Arm, ForetellArm, with_second_plain
from foretell.bench.divergence import divergence_gaps, first_divergences
from foretell.bench.measurement import Measurement, Round
from foretell.bench.runner import measure_rounds
from foretell.params import SamplingParams
from foretell.result import DraftWork

SAMPLING = SamplingParams(max_new_tokens=21)


def measurement(num_tokens: int, decode_s: float, *, first: int = 0, **values: Any) -> Measurement:
    token_ids = tuple(range(first, first + num_tokens))
    return Measurement(token_ids=token_ids, decode_s=decode_s, **{"wall_s": 1.0, "ttft_s": 0.5, **values})


def round_of(prompt: int, repeat: int = 0, **arms: Measurement) -> Round:
    measurements = {"none": arms["plain"], PLAIN_AGAIN: arms.get("again", arms["plain"])}
    measurements |= {name: each for name, each in arms.items() if name not in ("plain", "again")}
    return Round(prompt=prompt, repeat=repeat, measurements=measurements)


def rows(rounds: Sequence[Round], *categories: str, **options: Any) -> dict[tuple[str, str], BenchResult]:
    results = result_rows(summarise_prompts(rounds), categories, **options)
    return {(result.name, result.category): result for result in results}


def test_each_arm_has_totals_and_one_row_per_category_and_the_second_plain_has_none() -> None:
    rounds = [round_of(index, plain=measurement(5, 1.0), all=measurement(5, 0.5)) for index in range(3)]
    found = rows(rounds, "a", "b", "a")
    assert list(found) == [(name, category) for name in ("none", "all") for category in ("all", "a", "b")]
    assert [result.num_prompts for result in found.values()] == [3, 2, 1, 3, 2, 1]


def test_speed_is_a_ratio_of_sums_over_medians_of_repeats() -> None:
    rounds = [
        round_of(prompt, repeat, plain=measurement(11, plain_s), all=measurement(11, all_s))
        for prompt, repeat, plain_s, all_s in [
            (0, 0, 1.0, 0.5), (0, 1, 9.0, 0.4), (0, 2, 1.2, 7.0), (1, 0, 4.0, 4.0), (1, 1, 3.0, 5.0), (1, 2, 5.0, 3.0),
        ]
    ]  # fmt: skip
    found = rows(rounds, "a", "b")
    assert found["none", "a"].tokens_per_s == pytest.approx(10 / 1.2)
    assert found["all", "a"].speedup_vs_plain == pytest.approx(1.2 / 0.5)
    assert found["all", "b"].speedup_vs_plain == pytest.approx(1.0)
    assert found["all", "all"].speedup_vs_plain == pytest.approx((1.2 + 4.0) / (0.5 + 4.0))
    assert {found["none", category].speedup_vs_plain for category in ("all", "a", "b")} == {1.0}


def test_tokens_that_arrive_together_with_the_first_are_not_decoded_later() -> None:
    found = rows([round_of(0, plain=measurement(11, 1.0), all=measurement(11, 0.5, num_first_tokens=6))], "a")
    assert found["all", "a"].tokens_per_s == pytest.approx(10.0)
    assert found["all", "a"].speedup_vs_plain == pytest.approx(1.0)


def test_outputs_of_other_lengths_are_compared_per_token() -> None:
    found = rows([round_of(0, plain=measurement(11, 1.0), hf=measurement(6, 1.0))], "a")
    assert found["hf", "a"].speedup_vs_plain == pytest.approx(0.5)
    assert found["hf", "a"].identical == 0.0


def test_speedup_without_a_second_token_falls_back_to_the_whole_request() -> None:
    plain, drafted = measurement(1, 0.0, wall_s=2.0), measurement(1, 0.0, wall_s=1.0)
    found = rows([round_of(0, plain=plain, all=drafted)], "a")
    assert found["all", "all"].tokens_per_s == 0.0
    assert found["all", "all"].speedup_vs_plain == pytest.approx(2.0)


def test_noise_is_the_second_plain_against_the_first_in_each_category() -> None:
    rounds = [
        round_of(0, plain=measurement(11, 1.0), again=measurement(11, 1.25), all=measurement(11, 1.0)),
        round_of(1, plain=measurement(11, 1.0), again=measurement(11, 1.0), all=measurement(11, 1.0)),
    ]
    found = rows(rounds, "a", "b")
    assert found["none", "a"].noise == found["all", "a"].noise == pytest.approx(0.2)
    assert found["all", "b"].noise == pytest.approx(0.0)


def test_end_to_end_uses_the_wall_clock_and_all_tokens() -> None:
    rounds = [round_of(0, plain=measurement(10, 1.0, wall_s=4.0)), round_of(1, plain=measurement(6, 1.0, wall_s=4.0))]
    assert rows(rounds, "a", "a")["none", "a"].end_to_end_tokens_per_s == pytest.approx(2.0)


def test_first_token_and_prefill_are_medians_over_prompts() -> None:
    rounds = [round_of(n, plain=measurement(3, 1.0, ttft_s=s, prefill_s=s / 2)) for n, s in enumerate((1.0, 9.0, 2.0))]
    result = rows(rounds, "a", "a", "a")["none", "a"]
    assert (result.ttft_s, result.prefill_s) == (2.0, 1.0)


def test_identical_is_the_share_of_all_outputs_repeats_included() -> None:
    rounds = [
        round_of(0, 0, plain=measurement(5, 1.0), all=measurement(5, 1.0)),
        round_of(0, 1, plain=measurement(5, 1.0), all=measurement(5, 1.0, first=1)),
    ]
    found = rows(rounds, "a")
    assert found["all", "a"].identical == 0.5
    assert found["none", "a"].identical == 1.0


def test_counters_are_summed_and_missing_ones_are_null() -> None:
    counted = measurement(
        9, 1.0, tokens_per_pass_counts={1: 2, 3: 2}, drafted={"lookup": 8, "ngram": 2}, accepted={"lookup": 4}
    )
    found = rows([round_of(0, plain=measurement(9, 1.0), all=counted)], "a")
    result = found["all", "a"]
    assert result.tokens_per_pass == pytest.approx(2.0)
    assert result.acceptance_rate == pytest.approx(0.4)
    assert result.accepted_by_source == {
        "lookup": {"drafted": 8, "accepted": 4},
        "ngram": {"drafted": 2, "accepted": 0},
    }
    bare = found["none", "a"]
    assert (bare.tokens_per_pass, bare.acceptance_rate, bare.prefill_s, bare.accepted_by_source) == (
        None,
        None,
        None,
        {},
    )


def test_memory_is_repeated_on_every_row_of_its_arm() -> None:
    plain = measurement(5, 1.0)
    rounds = [round_of(n, plain=plain, all=measurement(5, 1.0, drafter_memory_bytes=10 * n)) for n in range(3)]
    found = rows(rounds, "a", "b", "a", memory={"all": 7})
    assert {found["all", category].peak_rss_bytes for category in ("all", "a")} == {7}
    assert found["none", "a"].peak_rss_bytes is None
    assert [found["all", category].drafter_memory_bytes for category in ("all", "a", "b")] == [20, 20, 10]
    assert found["none", "a"].drafter_memory_bytes == 0


def test_json_row_has_exactly_the_documented_keys() -> None:
    (result, *_) = rows([round_of(0, plain=measurement(5, 1.0))], "a").values()
    assert list(result.to_json()) == [
        "name", "category", "num_prompts", "tokens_per_s", "ttft_s", "prefill_s", "end_to_end_tokens_per_s",
        "speedup_vs_plain", "noise", "tokens_per_pass", "acceptance_rate", "identical", "first_divergence_gap",
        "peak_rss_bytes", "drafter_memory_bytes", "draft_passes_per_token", "draft_share", "e2", "relative_bytes",
        "second_stage_gain", "second_stage_bound", "accepted_by_source",
    ]  # fmt: skip


def test_what_a_draft_model_cost_is_a_ratio_of_sums() -> None:
    costs = {"prefill_s": 0.5, "target_bytes": 50, "num_draft_passes": 0, "num_confirmed": 0, "draft_bytes": 0}
    drafting = {**costs, "draft_s": 0.4, "num_draft_passes": 8, "num_confirmed": 4, "draft_bytes": 10}
    plain = measurement(10, 1.0, **costs | {"target_bytes": 200})
    rounds = [
        round_of(0, plain=plain, all=measurement(10, 1.0, **drafting)),
        round_of(1, plain=plain, all=measurement(30, 3.0, **costs)),
    ]
    found = rows(rounds, "a", "b")
    alone, total = found["all", "a"], found["all", "all"]
    assert (alone.draft_passes_per_token, alone.e2, alone.draft_share) == pytest.approx((0.8, 1.5, 0.4))
    assert alone.relative_bytes == pytest.approx((60 / 10) / (200 / 10))
    assert (total.draft_passes_per_token, total.e2, total.draft_share) == pytest.approx((0.2, 1.5, 0.1))
    assert total.relative_bytes == pytest.approx((110 / 40) / (400 / 20))
    assert (found["none", "a"].relative_bytes, found["none", "a"].e2) == (1.0, 1.0)
    assert (total.second_stage_gain, total.second_stage_bound) == (None, None)


def test_an_arm_that_counts_nothing_has_no_draft_columns() -> None:
    plain = measurement(5, 1.0, target_bytes=100)
    result = rows([round_of(0, plain=plain, hf=measurement(5, 1.0))], "a")["hf", "a"]
    assert (result.draft_passes_per_token, result.draft_share, result.e2, result.relative_bytes) == (None,) * 4


@pytest.mark.parametrize(("name", "without"), [("staged", "draft"), ("staged-chain", "draft-chain")])
def test_a_second_stage_is_held_against_the_arm_without_it(
    fake_llm: Callable[..., Any], name: str, without: str
) -> None:
    llm = fake_llm(
        tokens_per_pass={"none": 1, without: 4, name: 4},
        work={without: DraftWork(num_passes=20), name: DraftWork(num_passes=8, num_confirmed=12)},
    )
    found = {
        (result.name, result.category): result
        for result in result_rows(measured(llm, [[100], [200]], without, name), ["a", "b"])
    }
    assert found[without, "a"].draft_share == pytest.approx(0.1 / (0.1 + 0.1 + 0.1))
    assert found[name, "a"].e2 == pytest.approx(2.5)
    assert found[name, "all"].second_stage_gain == pytest.approx((0.1 + 0.1) / (0.1 + 0.04))
    assert found[name, "all"].second_stage_bound == pytest.approx(1 / (1 - (1 - 1 / 2.5) / 3))
    assert found[without, "all"].second_stage_gain is found[without, "all"].second_stage_bound is None


def test_a_second_stage_that_confirms_nothing_can_bring_nothing(fake_llm: Callable[..., Any]) -> None:
    work = DraftWork(num_passes=20)
    llm = fake_llm(tokens_per_pass={"none": 1, "draft": 4, "staged": 4}, work={"draft": work, "staged": work})
    staged = result_rows(measured(llm, [[100]], "draft", "staged"), ["a"])[-1]
    assert (staged.name, staged.second_stage_bound, staged.second_stage_gain) == ("staged", 1.0, 1.0)
    alone = result_rows(measured(llm, [[100]], "staged"), ["a"])[-1]
    assert (alone.name, alone.second_stage_bound, alone.second_stage_gain) == ("staged", None, None)


def test_report_figures() -> None:
    counted = measurement(
        9, 2.0, tokens_per_pass_counts={2: 4}, num_rows=12, num_passes=4, forward_s=1.5, ttft_s=0.4, prefill_s=0.4
    )
    summaries = summarise_prompts([round_of(0, plain=measurement(9, 1.0), all=counted)])
    assert pass_counts(summaries["all"]) == {2: 4}
    assert rows_per_pass(summaries["all"]) == 3.0
    assert forward_share(summaries["all"]) == 0.75
    assert rows_per_pass(summaries["none"]) is None
    assert forward_share(summaries["none"]) is None


def measured(llm: Any, prompts: Sequence[Sequence[int]], *names: str) -> Any:
    own: list[Arm] = [ForetellArm(key=name, drafter=name, llm=llm, clock=llm.clock) for name in ("none", *names)]
    arms = with_second_plain(own, llm, clock=llm.clock)
    return summarise_prompts(measure_rounds(arms, prompts, SAMPLING, repeats=1))


def test_divergence_gap_is_measured_where_the_output_first_differs(fake_llm: Callable[..., Any]) -> None:
    llm = fake_llm(changes={("all", 100): (3, 9), ("lookup", 100): (5, 9), ("all", 200): (7, 9)})
    prompts = [[100], [200], [300]]
    summaries = measured(llm, prompts, "lookup", "all")
    assert first_divergences(summaries) == {"lookup": {0: 5}, "all": {0: 3, 1: 7}}
    num_calls = len(llm.calls)
    gaps = divergence_gaps(llm, prompts, SAMPLING, summaries)
    reruns = [(drafter, prompt, sampling.max_new_tokens, sampling.logprobs) for drafter, prompt, sampling in llm.calls]
    assert reruns[num_calls:] == [("none", (100,), 6, 2), ("none", (200,), 8, 2)]
    assert gaps["lookup"][0] == pytest.approx(0.25 * 6)
    assert gaps["all"] == pytest.approx({0: 0.25 * 4, 1: 0.25 * 8})
    found = {
        (result.name, result.category): result.first_divergence_gap
        for result in result_rows(summaries, ["a", "b", "b"], gaps=gaps)
    }
    assert found["all", "all"] == found["all", "b"] == pytest.approx(2.0)
    assert found["lookup", "b"] is found["none", "all"] is None


def test_no_gap_where_the_rerun_does_not_repeat_plains_tokens(fake_llm: Callable[..., Any]) -> None:
    llm = fake_llm(changes={("all", 100): (9, 9)})
    summaries = measured(llm, [[100]], "all")
    llm.changes = {("none", 100): (2, 9)}
    assert divergence_gaps(llm, [[100]], SAMPLING, summaries) == {"all": {0: None}}


def test_an_output_that_goes_on_after_plains_end_has_no_gap(fake_llm: Callable[..., Any]) -> None:
    rounds = [round_of(0, plain=measurement(4, 1.0), hf=measurement(9, 1.0))]
    summaries = summarise_prompts(rounds)
    assert first_divergences(summaries) == {"hf": {0: 4}}
    gaps = divergence_gaps(fake_llm(), [[-1]], SamplingParams(max_new_tokens=4), summaries)
    assert gaps == {"hf": {0: None}}


def test_identical_outputs_need_no_rerun(fake_llm: Callable[..., Any]) -> None:
    llm = fake_llm()
    summaries = measured(llm, [[100]], "all")
    num_calls = len(llm.calls)
    assert divergence_gaps(llm, [[100]], SAMPLING, summaries) == {}
    assert len(llm.calls) == num_calls
