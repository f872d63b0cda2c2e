"""Prompt tokens of the draft model itself: they guess below nodes that are not read, and change no other estimate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draft_lab import CPU, KEPT, MODELS, VOCAB_SIZE, begun, draft, engine, observe, paths
from foretell.drafters.draft_engine import DraftEngine
from foretell.drafters.expansion import GUESS
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.hardware.prompt_policy import GuessRanks
from foretell.models.sampler import Sampler
from foretell.passes.rows import Rows
from foretell.passes.runner import Runner
from foretell.tree.token_tree import TokenTree


def prompts_of(kind: str) -> PromptTokens:
    random = torch.Generator().manual_seed(4)
    width = MODELS[kind].config.hidden_size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    tensors = {
        "sampler.mix.weight": draw(width, 2 * width),
        "sampler.mix.bias": draw(width),
        "sampler.out.weight": draw(width, width),
    }
    sampler = Sampler(tensors, draw(VOCAB_SIZE, width), draw(len(KEPT), width), KEPT, torch.float64, CPU)
    return PromptTokens(draw(1, 1, width), GuessRanks(np.ones(5, dtype=np.int64)), sampler)


def with_prompts(kind: str, pass_s: float = 0.3) -> DraftEngine:
    shared = engine(kind, pass_s=pass_s)
    shared.prompts = prompts_of(kind)
    shared.prompts.install(shared.runner)
    # As in bfloat16 on a CPU, where passes have at least four rows.
    shared.runner.padded = lambda num_rows, *_, **__: max(4, num_rows)  # type: ignore[method-assign]
    return shared


@pytest.mark.parametrize("kind", ["lm", "feature"])
def test_guesses_come_on_top_of_what_is_read(kind: str) -> None:
    text, price = [1, 2, 3], [1.0] * 24
    plain = begun(engine(kind, pass_s=0.3), text)
    guessing = begun(with_prompts(kind), text, has_prompts=True)
    num_guessed = 0
    for new in ([], [8], [9, 4]):
        text = [*text, *new]
        if new:
            observe(plain, text[: -len(new)], new)
            observe(guessing, text[: -len(new)], new)
        with_guesses = draft(guessing, text[-1], pass_s=price)
        num_guessed += with_guesses.sources.count(GUESS)
        known = paths(draft(plain, text[-1], pass_s=price))
        for node in range(1, len(with_guesses)):
            path = tuple(with_guesses.token_ids[each] for each in with_guesses.path(node))
            if with_guesses.sources[node] != GUESS and path in known:
                assert with_guesses.log_accept[node] == pytest.approx(known[path], abs=1e-9)
    assert num_guessed > 3


def test_a_prompt_tokens_state_is_that_of_its_path_alone() -> None:
    shared, text = with_prompts("lm"), [1, 2, 3]
    drafter = begun(shared, text, has_prompts=True)
    staged = TokenTree.chain([3, 4, 8], [0.0, -0.1, -0.2], "toy")
    read = drafter._reader.read_tip((), staged, 3)
    assert read.prompted is not None
    alone = Runner(MODELS["lm"], 64)
    shared.prompts.install(alone)  # type: ignore[union-attr]
    for num_nodes in range(3):
        region = alone.cache.allocate(32)
        output = alone.decode([Rows.chain(region, [*text, *[4, 8][:num_nodes], VOCAB_SIZE])])
        torch.testing.assert_close(read.prompted[num_nodes], output.hidden[0][len(text) + num_nodes])
    assert drafter._reader.region.length == len(text) + 2, "prompt tokens leave nothing behind"
