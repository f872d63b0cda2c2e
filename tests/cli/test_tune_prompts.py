"""What `foretell tune` says about prompt tokens, and what is left of it after Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell.cli import tune
from foretell.cli.main import run
from foretell.cli.tune_prompts import PromptVerdict, SizedRun, sizes_table, sweep_sizes
from foretell.drafters.prompt_store import write_prompts
from foretell.hardware.profile import LatencyProfile
from foretell.hardware.prompt_policy import GuessRanks
from foretell.llm import LLM
from foretell.params import SamplingParams

NUM_ROWS = (1, 2, 4, 6, 8, 12)
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    torch.set_num_threads(threads)


@pytest.fixture
def prompts_folder(home: Path, tiny_model: Path) -> Path:
    """Two prompt tokens whose best guesses are right at nine places of ten."""
    fingerprint = LLM(str(tiny_model), dtype="float32", threads=1, draft="none").fingerprint
    counts = np.ones((11, 11), dtype=np.int64)
    counts[0, 0] = 1000
    embeddings = {"embeddings": torch.randn(1, 2, 64)}  # [C, m, E]
    folder = home.with_name("prompts")
    kept_ids = np.arange(16)
    write_prompts(folder, embeddings, kept_ids, GuessRanks(counts), fingerprint=fingerprint, card="", provenance={})
    return folder


def profile_of(key: dict[str, str], seconds: Callable[[int], float]) -> LatencyProfile:
    return LatencyProfile(key=key, contexts=(128,), num_rows=NUM_ROWS, pass_s=(tuple(map(seconds, NUM_ROWS)),))


def sweep(llm: LLM, seconds: Callable[[int], float]) -> tuple[list[SizedRun], list[tuple[int, int]]]:
    prompts, counted = [[5, 6, 7], [8, 9, 10]], []
    plain = [llm.generate(prompt, SHORT, drafter="none")[0].stats for prompt in prompts]
    texts = [np.zeros((3, 2), dtype=np.int64)] * 2  # [A, m]
    llm.engine.profile = profile = profile_of(llm.profile_key, seconds)
    runs = sweep_sizes(llm, profile, prompts, SHORT, texts, plain, lambda *each: counted.append(each))
    return runs, counted


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        (lambda size: 0.01 * size, [1]),  # a row costs a pass: nothing is bought
        (lambda size: 0.01 + 0.1 * (size > 4), [1, 2, 4]),  # nobody buys a fifth row
    ],
    ids=["dear", "four"],
)
def test_no_purchase_is_measured_twice(
    tiny_model: Path, prompts_folder: Path, seconds: Callable[[int], float], sizes: list[int]
) -> None:
    llm = LLM(str(tiny_model), dtype="float32", threads=1, draft="none", prompts=prompts_folder)
    engine = llm.engine
    runs, counted = sweep(llm, seconds)
    assert [run.max_rows for run in runs] == sizes
    assert all(run.rows_per_pass <= run.max_rows for run in runs)
    assert (runs[0].rows_per_pass, runs[0].tokens_per_pass, runs[0].predicted_tokens_per_pass) == (1, 1, 1)
    num_answers = 2 * (len(sizes) - 1)  # plain decoding was measured before
    num_turns = num_answers and num_answers + 1  # one teaches the estimates
    assert counted == [(done, num_turns) for done in range(1, num_turns + 1)]
    assert llm.engine is engine


def sized(max_rows: int, tokens_per_s: float, predicted: float, **changes: float) -> SizedRun:
    sized_run = SizedRun(
        max_rows=max_rows,
        predicted_tokens_per_pass=1.6,
        predicted_tokens_per_s=predicted,
        tokens_per_pass=1.5,
        tokens_per_s=tokens_per_s,
        rows_per_pass=5.2,
    )
    return replace(sized_run, **changes)


PLAIN = sized(1, 40.0, 50.0, tokens_per_pass=1.0, rows_per_pass=1.0)


def test_the_verdict_on_prompt_tokens_says_why() -> None:
    assert PromptVerdict.of([PLAIN, sized(4, 70.0, 60.0), sized(6, 50.0, 65.0)]).sentence() == (
        "prompt tokens pay here: alone 1.25 × plain decoding (1.30 × predicted), 1.50 tokens from passes of 5.2 rows "
        "on average, which by T(N) take 1.23 × as long as plain ones"
    )
    slow = PromptVerdict.of([PLAIN, sized(6, 30.0, 55.0)]).sentence()
    assert slow.startswith("prompt tokens do not pay here: alone 0.75 × plain decoding (1.10 × predicted)")
    assert slow.endswith("which by T(N) take 1.45 × as long as plain ones; use --prompts none")
    assert "none are used" in PromptVerdict.of([PLAIN]).sentence()


def test_no_two_columns_have_the_same_name() -> None:
    headings = [str(column.header) for column in sizes_table([PLAIN]).columns]
    assert len(set(headings)) == len(headings) == 6


def quick(measure: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: measure(*args, **{**options, "contexts": (128,), "repeats": 1})


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_what_was_measured_before_the_sweep_outlives_ctrl_c(
    tiny_model: Path,
    prompts_folder: Path,
    home: Path,
    is_interrupted: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from foretell.engine import measure

    def interrupted(*args: Any) -> list[SizedRun]:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_profile", quick(measure.measure_profile))
    monkeypatch.setattr(tune, "NUM_NEW_TOKENS", 4)
    if is_interrupted:
        monkeypatch.setattr(tune, "sweep_sizes", interrupted)
    args = ["--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--draft", "none", "--json"]
    code = run(["tune", *args, "--prompts", str(prompts_folder), "--next-ids", "never"])
    output = capsys.readouterr()
    (file,) = (home / "profiles").iterdir()
    kept = LatencyProfile.from_json(json.loads(file.read_text(encoding="utf-8")))
    assert kept.is_bit_exact is not None
    assert kept.calibration
    assert np.sum(kept.guess_ranks["counts"]) > 0
    if is_interrupted:
        assert code == 130
        assert f"what was measured before is kept in {file}" in output.err
    else:
        assert code == 0
        document = json.loads(output.out.splitlines()[-1])
        assert document["prompt_verdict"].keys() == PromptVerdict.__annotations__.keys()
        assert document["profile"] == kept.to_json()
