from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.run import run_bench
from foretell.bench.runner import NoProgress
from foretell.bench.settings import BenchSettings, EngineSettings
from foretell.errors import ConfigError, InputError
from foretell.params import SamplingParams

pytest.importorskip("foretell.drafters.catalog")

SAMPLING = SamplingParams(max_new_tokens=21)
REJECTION = SamplingParams(max_new_tokens=21, temperature=1.0, verification="rejection")


def refuse(*_: object) -> Any:
    raise AssertionError("loaded before everything was checked")


def settings(**options: Any) -> BenchSettings:
    return BenchSettings(
        **{"drafters": ["lookup", "all"], "limit": 4, "sampling": SAMPLING, "has_memory": False} | options
    )


def run(llm: Any, **options: Any) -> Any:
    return run_bench(settings(**options), open_llm=lambda *_: llm, clock=llm.clock)


def test_a_run_from_settings_to_rows(fake_llm: Callable[..., Any]) -> None:
    report = run(fake_llm(), repeats=2)
    assert report.names == ["none", "lookup", "all"]
    assert report.categories == ["writing", "qa", "math_reasoning", "coding"]
    totals = {name: report.result(name) for name in report.names}
    assert totals["none"].tokens_per_s == pytest.approx(20 / 0.4)
    assert totals["lookup"].speedup_vs_plain == pytest.approx(2.0)
    assert totals["all"].speedup_vs_plain == pytest.approx(4.0)
    assert totals["all"].tokens_per_pass == pytest.approx(4.0)
    assert totals["all"].acceptance_rate == pytest.approx(0.5)
    assert totals["all"].noise == pytest.approx(0.0)
    assert {result.identical for result in report.results} == {1.0}
    assert {result.num_prompts for result in totals.values()} == {4}


def test_document_says_what_was_measured(fake_llm: Callable[..., Any]) -> None:
    document = run(fake_llm()).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    bench = document["provenance"]["bench"]
    assert (bench["dtype"], bench["device"], bench["threads"]) == ("float32", "cpu", 2)
    assert (bench["suite"], bench["limit"], bench["repeats"], bench["max_new_tokens"]) == ("builtin", 4, 3, 21)
    assert document["profile"] is None


def test_chat_prompts_go_through_the_template_where_there_is_one(fake_llm: Callable[..., Any]) -> None:
    with_template, without = fake_llm(), fake_llm(has_chat_template=False)
    for llm in (with_template, without):
        run(llm, limit=1, repeats=1)
    assert {prompt[1:] for _, prompt, _ in with_template.calls} == {(7,)}
    assert {prompt[1:] for _, prompt, _ in without.calls} == {()}


def test_plain_is_always_an_arm_and_only_once(fake_llm: Callable[..., Any]) -> None:
    assert run(fake_llm(), drafters=["all", "none", "all"], limit=1).names == ["none", "all"]
    assert run(fake_llm(), drafters=[], limit=1).names == ["none"]


def test_a_draft_model_adds_an_arm_unless_arms_are_named(fake_llm: Callable[..., Any]) -> None:
    speeds = dict.fromkeys(("none", "lookup", "suffix", "ngram", "staged", "all"), 1)
    with_draft, without = fake_llm(speeds, draft="a/draft"), fake_llm(speeds)
    assert run(without, drafters=None, limit=1).names == ["none", "lookup", "suffix", "ngram", "all"]
    assert run(with_draft, drafters=None, limit=1).names == ["none", "lookup", "suffix", "ngram", "staged", "all"]
    assert run(with_draft, drafters=["lookup"], limit=1).names == ["none", "lookup"]


def test_divergence_is_reported_with_its_gap(fake_llm: Callable[..., Any]) -> None:
    first_id = 1000 + len("What is the difference between a glacier and an iceberg? Answer in one paragraph.")
    report = run(fake_llm(changes={("all", first_id): (2, 5)}), category="qa", limit=None)
    assert report.result("all").identical == 0.5
    assert report.result("all").first_divergence_gap == pytest.approx(0.75)
    assert report.result("lookup").first_divergence_gap is None


def test_sampling_is_passed_on_and_gets_a_seed(fake_llm: Callable[..., Any]) -> None:
    llm = fake_llm()
    run(llm, sampling=SamplingParams(max_new_tokens=5, temperature=0.8), limit=1)
    assert {(sampling.temperature, sampling.seed) for _, _, sampling in llm.calls} == {(0.8, 0)}


def test_what_takes_long_at_loading_is_told(fake_llm: Callable[..., Any]) -> None:
    class Notes(NoProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    def open_llm(engine: EngineSettings, notify: Callable[[str], None]) -> Any:
        notify("compiling passes")
        return fake_llm()

    notes: list[str] = []
    run_bench(settings(limit=1, repeats=1), Notes(), open_llm=open_llm)
    assert notes[:2] == ["loading the model", "compiling passes"]


def test_memory_is_asked_for_each_arm_with_the_resolved_engine(fake_llm: Callable[..., Any]) -> None:
    asked: list[Any] = []

    def memory_of(names: Any, engine: Any, progress: Any) -> dict[str, int]:
        asked.extend([list(names), engine])
        return {"all": 5}

    llm = fake_llm()
    engine = EngineSettings(model="some/model")
    report = run_bench(
        settings(has_memory=True, engine=engine), open_llm=lambda *_: llm, memory_of=memory_of, clock=llm.clock
    )
    assert asked[0] == ["none", "lookup", "all"]
    assert asked[1] == EngineSettings(model="some/model", dtype="float32", device="cpu", threads=2, draft="none")
    assert report.result("all", "qa").peak_rss_bytes == 5
    assert report.result("none").peak_rss_bytes is None


def test_resumed_run_gives_the_same_rows_without_measuring(fake_llm: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    first, second, third = fake_llm(), fake_llm(), fake_llm()
    report = run(first, resume=path)
    assert run(second, resume=path).to_json()["results"] == report.to_json()["results"]
    assert second.calls == []
    run(third, resume=path, sampling=SamplingParams(max_new_tokens=9))
    assert len(third.calls) == len(first.calls)
    fourth = fake_llm(draft="another/draft")
    run(fourth, resume=path)
    assert len(fourth.calls) == len(first.calls)


def test_a_retrained_draft_is_measured_again(fake_llm: Callable[..., Any], tmp_path: Path) -> None:
    path, weights = tmp_path / "rounds.jsonl", tmp_path / "draft.safetensors"
    num_calls = []
    for size in (5, 5, 6):
        if not weights.exists() or weights.stat().st_size != size:
            weights.write_bytes(bytes(size))
        llm = fake_llm(draft=str(tmp_path))
        run(llm, resume=path)
        num_calls.append(len(llm.calls))
    assert num_calls[0] == num_calls[2] > num_calls[1] == 0


def test_report_is_written(fake_llm: Callable[..., Any], profile: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(fake_llm(profile=profile), report=tmp_path / "report")
    assert "T(N)" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafters": ["magic"]}, ConfigError, "magic"),
        (
            {"drafters": ["staged"], "engine": EngineSettings(draft="none")},
            ConfigError,
            r"which `draft`='none' \(`--draft none`\) switched off",
        ),
        (
            {"drafters": None, "sampling": REJECTION},
            ConfigError,
            "tests drawn drafts, lookup, suffix, ngram draw none: name `drafters` among none, all, draft-chain, draft",
        ),
        ({"drafters": ["draft", "ngram"], "sampling": REJECTION}, ConfigError, "tests drawn drafts, ngram draw none"),
        (
            {"drafters": ["all"], "sampling": REJECTION, "engine": EngineSettings(draft="none")},
            ConfigError,
            r"which `draft`='none' \(`--draft none`\) switched off",
        ),
        ({"baselines": ["vllm"]}, ConfigError, "baseline 'vllm' does not exist"),
        ({"category": "poetry"}, ConfigError, "category 'poetry' is not in suite 'builtin'"),
        ({"suite": "missing.jsonl"}, InputError, "cannot read suite"),
        ({"report": Path("/dev/null/report")}, ConfigError, "cannot write a report"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_bench(settings(**options), open_llm=refuse)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "`repeats` must be at least 1"),
        ({"sampling": SamplingParams(max_new_tokens=1)}, "`max_new_tokens` must be at least 2"),
        ({"sampling": SamplingParams(n=2, temperature=1.0)}, "`n`=2 with a benchmark"),
        ({"drafters": ["all", ""]}, "`drafters` holds an empty name"),
    ],
)
def test_settings_are_checked_once(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**options)


def test_importing_the_benchmark_loads_no_heavy_package() -> None:
    program = (
        "import sys, foretell.bench.run, foretell.bench.peak_rss\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
