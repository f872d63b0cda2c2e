"""T(N) as it is measured, and the test of whether draft rows change a row's bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.engine.measure import QUICK_ROW_COUNTS, ROW_COUNTS, compare_rows, measure_profile, quick_profile
from foretell.errors import ModelError
from foretell.models.files import find_default_gguf, resolve
from foretell.models.load import has_fast_bfloat16, load_model
from foretell.passes.rows import Rows
from foretell.passes.runner import PassOutput, Runner

KEY = {"model": "tiny"}
CPU = torch.device("cpu")


class CostlyRows:
    """Stands for a runner's `decode`: moves the clock by a cost per row, and by noise."""

    def __init__(self, runner: Runner, noise_s: float = 0.0) -> None:
        self.decode, self.noise = runner.decode, itertools.cycle((0.0, noise_s, 3 * noise_s, -noise_s))
        self.now_s = 0.0
        self.calls: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now_s

    def __call__(self, rows: Any) -> PassOutput:
        (only,) = rows
        size, context = len(only.token_ids), only.region.length
        self.calls.append((context, size))
        self.now_s += 0.01 + 0.001 * size + 1e-5 * context + next(self.noise)
        return self.decode(rows)


def costly(lab: Any, noise_s: float = 0.0, context_tokens: int = 600) -> tuple[Runner, CostlyRows]:
    runner = Runner(lab.model, context_tokens)
    rows = CostlyRows(runner, noise_s)
    runner.decode = rows  # type: ignore[assignment, method-assign]
    return runner, rows


def test_measures_every_count_at_every_context(lab: Any) -> None:
    runner, rows = costly(lab)
    rounds: list[tuple[int, int]] = []
    profile = measure_profile(
        runner, KEY, contexts=(0, 256), repeats=2, clock=rows.clock, progress=lambda *each: rounds.append(each)
    )
    assert (profile.key, profile.contexts, profile.num_rows) == (KEY, (0, 256), ROW_COUNTS)
    for context, row in zip(profile.contexts, profile.pass_s, strict=True):
        assert row == pytest.approx([0.01 + 0.001 * size + 1e-5 * context for size in ROW_COUNTS])
    assert rounds == [(done, 6) for done in range(1, 7)]  # one round of three to warm up
    assert rows.calls[: len(ROW_COUNTS)] == [(0, size) for size in ROW_COUNTS]
    assert runner.cache.num_bytes == 0


def test_more_rows_never_cost_less(lab: Any) -> None:
    runner, rows = costly(lab, noise_s=0.003)
    (row,) = measure_profile(runner, KEY, contexts=(0,), repeats=4, clock=rows.clock).pass_s
    assert list(row) == sorted(row)
    assert all(value > 0 for value in row)


def test_contexts_that_do_not_fit_are_left_out(lab: Any) -> None:
    runner, rows = costly(lab, context_tokens=300)
    assert measure_profile(runner, KEY, contexts=(0, 200, 290), repeats=1, clock=rows.clock).contexts == (0, 200)
    assert measure_profile(runner, KEY, contexts=(290,), repeats=1, clock=rows.clock).contexts == (0,)


def test_quick_profile(lab: Any) -> None:
    runner = Runner(lab.model, 600)
    profile = quick_profile(runner, KEY)
    assert profile.num_rows == QUICK_ROW_COUNTS
    assert profile.is_bit_exact is None
    assert runner.cache.num_bytes == 0


# Bits


@pytest.mark.parametrize(("start", "end"), [(0, 40), (450, 511), (450, 512), (450, 513), (500, 599)])
def test_rows_of_the_tiny_model_in_float64_differ_by_rounding_at_most(lab: Any, start: int, end: int) -> None:
    runner = Runner(lab.model, 600)
    exactness = compare_rows(runner, lab.prompt(0, end), num_prefilled=start)
    assert exactness.num_rows == end - start
    assert exactness.largest_gap < 1e-10
    assert exactness.is_bit_exact == (exactness.num_different_rows == 0) == (exactness.largest_gap == 0)
    assert runner.cache.num_bytes == 0


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_row_that_differs_is_found(lab: Any, error: float) -> None:
    """What is compared are all rows of a chain, not the last, and NaN equals nothing."""
    runner = Runner(lab.model, 600)
    decode = runner.decode

    def perturbed(rows: Any) -> PassOutput:
        output = decode(rows)
        if len(rows[0].token_ids) < 8:
            return output
        logits = output.logits[0].clone()
        logits[2, 5] += error
        return PassOutput(output.hidden, (logits,))

    runner.decode = perturbed  # type: ignore[assignment, method-assign]
    exactness = compare_rows(runner, lab.prompt(0, 62))
    assert not exactness.is_bit_exact
    assert exactness.num_different_rows >= 4


def has_default_model() -> bool:
    try:
        find_default_gguf()
    except ModelError:
        return False
    return True


def has_known_kernels() -> bool:
    """Return whether this is the kind of CPU on which rows were found to be exact."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8").split() if info.is_file() else []
    return has_fast_bfloat16(CPU) and "avx512_bf16" in flags and "amx_bf16" not in flags


def needs_default_model(test: Any) -> Any:
    """Mark a test of the default model's bits in bfloat16."""
    reason = "rows in bfloat16 are known to be exact with AVX-512 BF16 and without AMX only"
    test = pytest.mark.skipif(not has_known_kernels(), reason=reason)(test)
    test = pytest.mark.skipif(not has_default_model(), reason="the default model's wheel is not installed")(test)
    return pytest.mark.real_model(test)


@pytest.fixture(scope="module")
def real_runner() -> Runner:
    return Runner(load_model(resolve().folder, dtype=torch.bfloat16, device=CPU), 1024)


@pytest.fixture(scope="module")
def real_ids(real_runner: Runner) -> list[int]:
    """528 tokens of text, which reach across the edge of a block of 512 slots."""
    from foretell.text.tokenizer import Tokenizer

    text = (
        "The history of science is the study of how knowledge of the natural world came about, and of who paid for it. "
    )
    lines = [
        f"{number}. {text}In {1600 + 7 * number} somebody measured {number * number} stars.\n" for number in range(20)
    ]
    return Tokenizer.load(resolve().folder).encode("".join(lines))[:528]


@needs_default_model
@pytest.mark.parametrize(("start", "end"), [(0, 31), (113, 144), (369, 400), (497, 528)])
def test_rows_of_the_default_model_in_bfloat16_are_those_of_plain_decoding_bit_for_bit(
    real_runner: Runner, real_ids: list[int], start: int, end: int
) -> None:
    """vllm#54506: parity needs a pass whose bits do not depend on how many rows ride along.

    At the start, and where a pass begins to read more slots.
    """
    exactness = compare_rows(real_runner, real_ids[:end], num_prefilled=start)
    assert exactness.num_rows == end - start
    assert (exactness.num_different_rows, exactness.largest_gap) == (0, 0.0)
    assert exactness.is_bit_exact


@needs_default_model
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 5, 1), (2, 3, 9, 1), (1, 1, 12, 1)])
def test_and_those_of_sequences_that_share_a_pass(
    real_runner: Runner, real_ids: list[int], sizes: tuple[int, ...]
) -> None:
    regions = [real_runner.cache.allocate(512) for _ in sizes]
    for index, region in enumerate(regions):
        real_runner.prefill(Rows.chain(region, real_ids[: 100 + 37 * index]))
    rows = [Rows.chain(region, real_ids[300 : 300 + size]) for region, size in zip(regions, sizes, strict=True)]
    together = real_runner.decode(rows)
    for index, size in enumerate(sizes):
        alone = real_runner.decode([rows[index]])
        assert torch.equal(together.logits[index][:size], alone.logits[0][:size])
    for region in regions:
        real_runner.cache.free(region)


@needs_default_model
def test_and_without_padding_they_are_not(
    real_runner: Runner, real_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers#39421: one row alone takes other kernels than several; this is what padding is for."""
    monkeypatch.setattr(real_runner, "padded", lambda num_rows, *_, **__: num_rows)
    exactness = compare_rows(real_runner, real_ids[:31])
    assert not exactness.is_bit_exact
    assert exactness.num_different_rows > 15
    assert exactness.largest_gap > 0
