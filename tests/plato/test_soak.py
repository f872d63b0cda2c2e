"""Two hundred requests of all kinds, half of them given up: no slot is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from foretell.llm import LLM
from foretell.params import SamplingParams
from foretell.plato import embedded
from foretell.plato.events import Mode
from foretell.plato.options import PlatoOptions
from tiny import save_model

pytest.importorskip("llguidance")

NUM_REQUESTS = 200
MODES: tuple[Mode, ...] = ("plato", "sot", "sequential")
GRAMMAR = "1\\. [a-z]{3} < -\n2\\. [a-z]{3} < (-|1)\n(3\\. [a-z]{3} < (-|1|2|1,2)\n)?END\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(embedded, "plan_grammar", lambda *args, **options: GRAMMAR)
        folder = save_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096, initializer_range=0.6)
        yield LLM(folder, dtype="float32", threads=1)
    torch.set_num_threads(before)


def test_no_slot_is_lost(llm: LLM) -> None:
    chance, open_streams = random.Random(0), []
    num_planned = 0
    for number in range(NUM_REQUESTS):
        kind = chance.choice(["plan", "plan", "generate", "stream"])
        drafter = chance.choice(["none", "suffix"])
        if kind == "plan":
            options = PlatoOptions(
                mode=chance.choice(MODES),
                force_plan=True,
                max_answer_tokens=chance.randint(12, 40),
                max_parts=3,
                max_parallel=chance.randint(1, 3),
                max_slots=chance.choice([None, 2048, 4096]),
                is_pipelined=chance.random() < 0.7,
                is_reusing=chance.random() < 0.7,
                temperature=chance.choice([0.0, 1.0]),
                seed=number,
                drafter=drafter,
            )
            open_streams.append(llm.stream_plan(f"Question {number}?", options))
            num_planned += 1
        elif kind == "generate":
            llm.generate(["abc", "defg" * chance.randint(1, 40)], SamplingParams(max_new_tokens=6), drafter=drafter)
        else:
            open_streams.append(
                llm.stream("hij" * chance.randint(1, 9), SamplingParams(max_new_tokens=20), drafter=drafter)
            )
        chance.shuffle(open_streams)
        for stream in open_streams[3:]:
            if chance.random() < 0.5:
                for _ in islice(stream, chance.randint(0, 20)):
                    pass
            else:
                for _ in stream:
                    pass
            stream.close()  # type: ignore[attr-defined]
        del open_streams[3:]
        for stream in open_streams:  # several answers are under way at once, and take turns
            next(stream, None)
    for stream in open_streams:
        stream.close()  # type: ignore[attr-defined]
    assert num_planned > 60
    assert llm.prefixes.num_reused > 0
    llm.prefixes.close()
    assert llm.engine.runner.cache.num_bytes == 0


def test_prefixes_stay_within_their_number(llm: LLM) -> None:
    prefixes, prompts = llm.prefixes, [[1, *range(20 + 7 * place, 60 + 7 * place)] for place in range(20)]
    jobs = []
    for place, prompt in enumerate(prompts):
        assert prefixes.take(prompt) is None
        job = llm.start(prompt, SamplingParams(max_new_tokens=2), drafter="none")
        prefixes.keep(job.sequence, 30, is_pinned=place == 0)
        prefixes.keep(job.sequence, 30)
        jobs.append(job)
    assert len(prefixes) == 8
    for place, num_shared in ((0, 30), (19, 30), (1, None)):
        region = prefixes.take([*prompts[place][:30], 5, 6])
        assert (None if region is None else region.length) == num_shared
        if region is not None:
            llm.engine.runner.cache.free(region)
    for job in jobs:
        llm.finish(job)
    prefixes.close()
    assert llm.engine.runner.cache.num_bytes == 0
