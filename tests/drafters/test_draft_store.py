"""Which draft model serves a target, and what of it fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.drafters.katz import FILE, KatzLevel, KatzTable, level_dtypes, write_katz
from foretell.drafters.prompt_store import write_prompts
from foretell.errors import ConfigError
from foretell.hardware.profile import LatencyProfile
from foretell.hardware.prompt_policy import GuessRanks
from foretell.llm import LLM
from foretell.models.config import FULL, read_config
from foretell.models.draft_files import draft_digest, write_draft
from foretell.params import SamplingParams
from foretell.train.draft_module import DraftModule
from foretell.train.prompt_module import PromptModule, PromptRecipe
from tiny import save_model

FLAT = LatencyProfile(key={"model": "flat"}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.0),))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that foretell keeps goes here; threads are those of before."""
    before = torch.get_num_threads()
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    yield
    torch.set_num_threads(before)


def say_last_id(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Make every third token the last id of the vocabulary."""
    scores[0, -1] += 1e4 * (input_ids.shape[1] % 3 == 0)
    return scores


@pytest.mark.parametrize("sizes", [(259, 257), (257, 259)], ids=["target has more ids", "draft has more ids"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_at_the_end_of_either_vocabulary_is_tolerated(
    tmp_path: Path, sizes: tuple[int, int], temperature: float
) -> None:
    target, draft = (save_model(tmp_path / str(size), vocab_size=size) for size in sizes)
    llm = LLM(target, dtype="float64", threads=1, draft=draft)
    llm.engine.profile = FLAT
    sampling = SamplingParams(
        max_new_tokens=20, ignore_eos=True, temperature=temperature, seed=1, logits_processors=[say_last_id]
    )
    prompt = [5, sizes[0] - 1, 7]
    expected = llm.generate([prompt], sampling, drafter="none")[0].token_ids
    (completion,) = llm.generate([prompt], sampling, drafter="draft")
    assert completion.token_ids == expected
    assert sizes[0] - 1 in expected
    assert completion.stats.drafted["draft"] > 0


def test_a_draft_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, draft = save_model(tmp_path / "target"), save_model(tmp_path / "draft")
    path = draft / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError, match="has another tokenizer: 2 of 259 ids differ"):
        LLM(target, dtype="float32", threads=1, draft=draft)


def write_random_draft(folder: Path, llm: LLM, seed: int) -> None:
    torch.manual_seed(seed)
    config = replace(read_config(llm.folder), num_layers=1, layer_types=(FULL,))
    tensors = DraftModule(config, "lm").tensors()
    write_draft(
        folder, config, tensors, np.arange(259), fingerprint=llm.fingerprint, card="card", provenance={"seed": seed}
    )


def test_adapters_of_a_drafts_own_prompts_are_left_out_of_compiled_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, folder = LLM(save_model(tmp_path / "target"), dtype="float32", threads=1), tmp_path / "draft"
    write_random_draft(folder, llm, seed=0)
    body = replace(read_config(llm.folder), num_layers=1, layer_types=(FULL,))
    module = PromptModule(PromptRecipe(capacity="lora+sampler", num_slots=1), body, torch.zeros(32), 1.0)
    ranks, facts = GuessRanks(np.ones(11, dtype=np.int64)), {"card": "", "provenance": {}}
    write_prompts(folder / "prompts", module.tensors(), np.arange(9), ranks, fingerprint=draft_digest(folder), **facts)
    monkeypatch.setattr("foretell.passes.compiled.load_compiled", lambda *_, **__: None)
    for is_compiled in (False, True):
        notes: list[str] = []
        loaded = LLM(llm.folder, dtype="float32", threads=1, draft=folder, compile=is_compiled, notify=notes.append)
        assert loaded.draft is not None
        assert (loaded.draft.engine.prompts is None) == is_compiled
        assert len(notes) == is_compiled
        assert all("left out: train others, with `--capacity sampler`" in note for note in notes)


def empty_table() -> KatzTable:
    arrays = {"contexts": [], "starts": [0], "ids": [], "codes": [], "backoff_codes": []}
    levels = [
        KatzLevel(**{name: np.array(arrays[name], dtype) for name, dtype in level_dtypes(order, 259).items()})
        for order in range(3)
    ]
    return KatzTable(levels, 259)


def test_a_table_of_an_earlier_draft_is_left_out(tmp_path: Path) -> None:
    llm, folder = LLM(save_model(tmp_path / "target"), dtype="float32", threads=1), tmp_path / "draft"
    write_random_draft(folder, llm, seed=0)
    write_katz(folder / FILE, empty_table(), {"fingerprint": llm.fingerprint, "draft": draft_digest(folder)})
    said: list[str] = []
    for seed, has_table in ((0, True), (1, False)):
        write_random_draft(folder, llm, seed)
        loaded = LLM(llm.folder, dtype="float32", threads=1, draft=folder, notify=said.append).draft
        assert loaded is not None
        assert (loaded.ngram_table is not None) == has_table
    (line,) = said
    assert line == f"{folder / FILE} was made for another draft, it is left out: run `foretell train ngram` again"
