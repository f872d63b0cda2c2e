"""From a question to an answer, with the real default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foretell.drafters.catalog import DRAFTERS
from foretell.drafters.next_ids import NextIdsStore
from foretell.errors import ModelError
from foretell.hardware.profile import LatencyProfile
from foretell.llm import LLM
from foretell.models.files import find_default_gguf, resolve
from foretell.models.fingerprint import model_fingerprint
from foretell.params import SamplingParams

GREEDY = SamplingParams(max_new_tokens=48)
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
COPY = [
    {
        "role": "user",
        "content": "Repeat word for word: The old lighthouse keeper climbed the stairs every evening, "
        "lit the lamp, wound the clock, and wrote the weather into a thick blue book.",
    }
]


def has_default_model() -> bool:
    try:
        find_default_gguf()
    except ModelError:
        return False
    return True


def has_exact_bfloat16() -> bool:
    """Return whether rows in bfloat16 are known to be exact here: with AVX-512 BF16, and not with AMX."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8").split() if info.is_file() else []
    return "avx512_bf16" in flags and "amx_bf16" not in flags


pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not has_default_model(), reason="the default model's wheel is not installed"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    before = torch.get_num_threads()
    llm = LLM(dtype="bfloat16" if has_exact_bfloat16() else "float32", device="cpu", threads=1, context_tokens=1024)
    # Rows at half their price: more drafts are bought, so more can go wrong.
    llm.engine.profile = LatencyProfile(
        key={"model": "cheap rows"}, contexts=(0,), num_rows=(1, 4, 8, 12), pass_s=((0.02, 0.02, 0.022, 0.024),)
    )
    yield llm
    assert llm.engine.runner.cache.num_bytes == 0
    torch.set_num_threads(before)


def test_answers_a_question(llm: LLM) -> None:
    (*chunks, last) = llm.stream_chat(QUESTION, GREEDY)
    completion = last.completion
    assert completion is not None
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    assert "".join(chunk.text for chunk in [*chunks, last]) == completion.text
    assert completion.token_ids[-1] in llm.config.eos_ids


def test_its_table_of_next_ids_ships(llm: LLM, tmp_path: Path) -> None:
    vocab_size = llm.config.vocab_size
    fingerprint = model_fingerprint(resolve(None).folder, llm.tokenizer, vocab_size)
    found = NextIdsStore(tmp_path, fingerprint, vocab_size).find()
    assert found is not None
    assert found.origin == "shipped"
    assert llm.settings["next_ids"] in ("shipped", "cached")


def test_every_drafter_says_what_plain_decoding_says(llm: LLM) -> None:
    prompts = [llm.tokenizer.encode_chat(messages) for messages in (QUESTION, COPY)]
    for prompt in prompts:
        (plain,) = llm.generate(prompt, GREEDY, drafter="none")
        for name in DRAFTERS:
            (drafted,) = llm.generate(prompt, GREEDY, drafter=name)
            assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids), name


def test_together_as_alone(llm: LLM) -> None:
    """TGI#1411: in one pass with others, and from forks of one prompt."""
    params = SamplingParams(max_new_tokens=16, temperature=0.7, seed=5, n=2)
    prompts = [llm.tokenizer.encode_chat(messages) for messages in (QUESTION, COPY)]
    alone = [each.token_ids for prompt in prompts for each in llm.generate(prompt, params, drafter="none")]
    assert [each.token_ids for each in llm.generate(prompts, params, drafter="all")] == alone
    assert alone[0] != alone[1]


def test_a_quotation_takes_fewer_passes(llm: LLM) -> None:
    plain, drafted = (llm.chat(COPY, GREEDY, drafter=name) for name in ("none", "all"))
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.tokens_per_pass == 1.0
    assert drafted.stats.tokens_per_pass > 1.3
    assert drafted.stats.acceptance_rate > 0.1


def test_the_same_seed_says_the_same(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.95, seed=11)
    plain, drafted = (llm.chat(COPY, params, drafter=name) for name in ("none", "all"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.seed == 11
