"""Under a constraint every drafter says what plain decoding says, and what it says matches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretell.drafters.drafter import Drafter
from foretell.engine.sequence import Request
from foretell.params import SamplingParams
from foretell.verify.choose import TokenChooser
from foretell.verify.constraint import Grammars
from tiny import letters

VOCAB_SIZE, EOS = 64, 2
LETTERS = letters(VOCAB_SIZE, EOS)
GRAMMARS = Grammars(LETTERS, [EOS])
REGEX = r"((ab|cd)[e-h]{2,4}-?){2,4}|[^a-c]{3,9}z|(.b){3,8}"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "seed": 1},
    "filtered": {"temperature": 2.0, "seed": 2, "top_k": 9, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 1.0, "min_new_tokens": 7},
    "cut": {"temperature": 3.0, "seed": 3, "max_new_tokens": 4},
}


def request(lab: Any, prompt: Sequence[int], drafter: Drafter | None, params: SamplingParams, key: int) -> Request:
    """Return a constrained request; `key` is that of the noise."""
    plain = lab.request(prompt, drafter, replace(params, regex=None), stop_ids=[EOS], sequence_key=key)
    chooser = TokenChooser(
        params,
        num_prompt_tokens=len(prompt),
        eos_ids=[EOS],
        seed=params.seed,
        sequence_key=key,
        vocab_size=VOCAB_SIZE,
        constraint=GRAMMARS.constraint(params),
    )
    return replace(plain, chooser=chooser)


@pytest.mark.parametrize("policy", ["canonical", "copy"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_trees_of_any_shape(lab: Any, name: str, policy: Any) -> None:
    engine = lab.engine(policy)
    params = SamplingParams(regex=REGEX, **SAMPLINGS[name])
    num_passes = num_tokens = 0
    for key in range(12):
        prompt = lab.prompt(key)
        truth = lab.run(engine, request(lab, prompt, None, params, key)).sequence
        text = LETTERS.decode(truth.token_ids[len(prompt) :])
        if name == "cut":
            assert (truth.num_new_tokens, truth.finish_reason) == (4, "length") or re.fullmatch(REGEX, text)
        else:
            assert truth.finish_reason == "stop"
            assert truth.token_ids[-1] == EOS
            assert re.fullmatch(REGEX, text), text
        for drafter in (lab.RandomTrees, lab.Sideways, lab.Oracle, lab.Liar):
            run = lab.run(engine, request(lab, prompt, drafter(truth.token_ids, key), params, key))
            assert run.sequence.token_ids == truth.token_ids
            assert run.sequence.finish_reason == truth.finish_reason
            num_passes, num_tokens = num_passes + len(run.blocks), num_tokens + len(run.output_ids)
    assert num_tokens > 1.3 * num_passes  # or the trees were of no consequence


def test_sequences_of_a_pass_do_not_meet(lab: Any) -> None:
    params = SamplingParams(regex=REGEX, temperature=1.5, seed=4)
    prompt, engine = lab.prompt(3), lab.engine("copy")
    truths = [lab.run(engine, request(lab, prompt, None, params, key)).sequence.token_ids for key in range(5)]
    first = engine.start(request(lab, prompt, lab.RandomTrees(truths[0], 0), params, 0))
    others = [
        engine.fork(first, request(lab, prompt, lab.RandomTrees(truths[key], key), params, key)) for key in range(1, 5)
    ]
    for other in others:
        other.request.drafter.begin(prompt)
    active = [first, *others]
    while active:
        engine.step(active)
        active = [sequence for sequence in active if not sequence.is_finished]
    assert [sequence.token_ids for sequence in (first, *others)] == truths
    for sequence in (first, *others):
        engine.finish(sequence)
