"""Training end to end on a tiny target: text by itself, a draft that helps, runs that go on where they stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import ConfigError, InputError, ModelError
from foretell.llm import LLM
from foretell.models.draft_files import is_draft
from foretell.models.weights import WeightReader
from foretell.params import SamplingParams
from foretell.train import produce as produce_module
from foretell.train import text as text_module
from foretell.train.draft import Recipe, TargetTensors, train_draft
from foretell.train.examples import Examples, add_hidden
from foretell.train.produce import Reports, check_place, produce_draft, produce_ngram, text_home
from foretell.train.produce_prompts import produce_prompts
from foretell.train.prompt_module import PromptRecipe
from foretell.train.text import (
    CHAT,
    RAW,
    Documents,
    hidden_path,
    read_prompts,
    shard_paths,
    take_text,
    write_text,
)
from tiny import EOS, save_model

RECIPE = Recipe(num_epochs=3, batch_size=4, learning_rate=3e-3)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("FORETELL_HOME", str(folder))
        patch.setattr(text_module, "SHARD_DOCUMENTS", 30)
        patch.setattr(text_module, "DOCUMENT_TOKENS", 80)
        yield folder
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_model(tmp_path_factory.mktemp("tiny"), initializer_range=0.6)
    return LLM(folder, dtype="float32", threads=1, draft="none")


@pytest.fixture(scope="module")
def shards(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("text")
    write_text(llm, folder, 6000)
    return shard_paths(folder, 6000)


@pytest.fixture(scope="module")
def draft(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    produce_draft(llm, folder, RECIPE, 6000)
    return folder


def test_the_target_writes_what_it_would_say(llm: LLM, shards: list[Path]) -> None:
    """Greedy answers are those of plain decoding, and hidden states those that a prefill computes."""
    documents = Documents.load(shards[0])
    assert set(documents.kinds) == {CHAT}
    number = int((documents.temperatures == 0).argmax())
    text, start = documents[number].tolist(), int(documents.answer_starts[number])
    (completion,) = llm.generate(text[:start], SamplingParams(max_new_tokens=80 - start), drafter="none")
    assert text[start:] == completion.token_ids
    assert text.count(EOS) <= 2 + (text[-1] == EOS)  # of the system's or user's turn and the answer's
    batch = Examples(shards).batch([number])
    hidden = hidden_path(shards[0]).read_bytes()
    add_hidden(llm, shards[0])
    again = Examples(shards).batch([number])
    torch.testing.assert_close(batch.hidden.float(), again.hidden.float(), atol=0.05, rtol=0.05)
    hidden_path(shards[0]).write_bytes(hidden)


def test_text_goes_on_where_it_stopped(llm: LLM, shards: list[Path]) -> None:
    kept = {path: path.stat().st_mtime_ns for path in shards}
    documents = write_text(llm, shards[0].parent, 6000)
    assert {path: path.stat().st_mtime_ns for path in shards} == kept
    assert len(documents) == 30 * len(shards)
    assert set(documents.kinds) == {CHAT, RAW}


def test_text_of_another_folder_is_taken_over(llm: LLM, shards: list[Path], tmp_path: Path) -> None:
    """Without its hidden states, which are computed again."""
    assert take_text(shards[0].parent, tmp_path / "text", llm.fingerprint, llm.config.vocab_size) == len(shards)
    taken = shard_paths(tmp_path / "text", 6000)
    for path, shard in zip(taken, shards, strict=True):
        assert not hidden_path(path).exists()
        assert Documents.load(path).token_ids.tolist() == Documents.load(shard).token_ids.tolist()
    with pytest.raises(InputError, match="holds no shards of text"):
        take_text(tmp_path, tmp_path / "other", llm.fingerprint, llm.config.vocab_size)


def test_text_by_another_target_is_not_taken(llm: LLM, shards: list[Path], tmp_path: Path) -> None:
    """All or none: the first shard would do."""
    fingerprint, vocab_size = llm.fingerprint, llm.config.vocab_size
    with pytest.raises(InputError, match=r"is text by model .*, this one is other: give text by this very target"):
        take_text(shards[0].parent, tmp_path / "text", "other", vocab_size)
    source = tmp_path / "source"
    source.mkdir()
    Documents.load(shards[0]).save(source / "shard-0000.npz")  # does not say whose it is
    for token_id in (vocab_size, -1):
        Documents.of([[1, token_id]], [CHAT], [0], [0.0]).save(source / "shard-0001.npz")
        with pytest.raises(InputError, match=f"shard-0001.npz has token {token_id}, this model's go to"):
            take_text(source, tmp_path / "text", fingerprint, vocab_size)
    assert not list((tmp_path / "text").glob("*.npz"))
    (source / "shard-0001.npz").unlink()
    assert take_text(source, tmp_path / "text", fingerprint, vocab_size) == 1


def test_given_prompts_are_answered(llm: LLM, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n\n{"turns": ["Bye", "more"]}\n{"prompt": "' + "x" * 100 + '"}\n')
    documents = write_text(llm, tmp_path / "text", 100, prompts=prompts)
    turns = [llm.tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in ("Hello", "Bye")]
    for number in range(len(documents)):
        wanted = turns[number % 2]
        assert documents[number][: len(wanted)].tolist() == wanted
        assert documents.answer_starts[number] == len(wanted)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", r'prompts.jsonl:1 is no object with "prompt", a text, or "turns", a list of texts'),
        ('{"question": 3}', "prompts.jsonl:1 is no object"),
        ('{"turns": "abc"}', "prompts.jsonl:1 is no object"),
        ("", "prompts.jsonl is empty"),
        ('{"prompt": "' + "x" * 100 + '"}', "has 1 turns, none of 1 to 40 tokens"),
    ],
)
def test_bad_prompts_are_told(llm: LLM, tmp_path: Path, line: str, message: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line + "\n")
    with pytest.raises(InputError, match=message):
        write_text(llm, tmp_path / "text", 100, prompts=prompts)
    with pytest.raises(InputError, match="cannot be read"):
        produce_draft(llm, tmp_path / "draft", RECIPE, 100, prompts=tmp_path / "missing")


def test_prompts_may_begin_with_a_mark_and_hold_any_line_end(llm: LLM, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    assert read_prompts(prompts, llm.tokenizer) == [
        llm.tokenizer.encode(text, add_special_tokens=False) for text in ("a\u2028b", "c")
    ]


@pytest.mark.parametrize("kind", ["feature", "lm"])
def test_an_interrupted_training_ends_like_a_whole_one(llm: LLM, shards: list[Path], tmp_path: Path, kind: Any) -> None:
    target, examples = TargetTensors.read(llm.config, llm.folder, llm.fingerprint), Examples(shards)
    recipe = Recipe(kind=kind, num_epochs=2, batch_size=4, size="small")
    whole = train_draft(target, examples, recipe, tmp_path / "whole.pt", evaluate_every=5)

    class Stop(Exception): ...

    def stop(progress: Any) -> None:
        if progress.step == 12:
            raise Stop

    with pytest.raises(Stop):
        train_draft(target, examples, recipe, tmp_path / "cut.pt", evaluate_every=5, progress=stop)
    rest = train_draft(target, examples, recipe, tmp_path / "cut.pt", evaluate_every=5)
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(tensor, rest.tensors[name], atol=0, rtol=0)
    assert whole.scores["chat"] == rest.scores["chat"]


@pytest.mark.parametrize("other", ["text", "target"])
def test_a_training_goes_on_with_its_own_text_and_target_only(
    llm: LLM, shards: list[Path], tmp_path: Path, other: str
) -> None:
    target, recipe, first_steps = TargetTensors.read(llm.config, llm.folder, "a"), Recipe(num_epochs=1), []

    def note(progress: Any) -> None:
        if progress.step in (1, 2):
            first_steps.append(progress.step)

    examples = Examples(shards)
    train_draft(target, examples, recipe, tmp_path / "c.pt", evaluate_every=2, progress=note)
    if other == "text":
        token_ids = examples.documents.token_ids
        examples.documents = dataclasses.replace(examples.documents, token_ids=token_ids[::-1].copy())
    else:
        target = dataclasses.replace(target, fingerprint="b")
    train_draft(target, examples, recipe, tmp_path / "c.pt", progress=note)
    train_draft(target, examples, recipe, tmp_path / "c.pt", progress=note)
    assert first_steps == [1, 2, 1, 2]


@pytest.mark.parametrize("data", [b"", b"cut"])
def test_damaged_hidden_states_are_told(shards: list[Path], tmp_path: Path, data: bytes) -> None:
    shard = tmp_path / "shard-0000.npz"
    Documents.load(shards[0]).save(shard)
    hidden_path(shard).write_bytes(data)
    with pytest.raises(InputError, match=r"hidden\.npy is missing or damaged .*: delete it, and it is computed again"):
        Examples([shard])


def test_training_lowers_the_loss(llm: LLM, shards: list[Path], tmp_path: Path) -> None:
    losses: list[float] = []
    target = TargetTensors.read(llm.config, llm.folder, llm.fingerprint)
    recipe = Recipe(num_epochs=6, batch_size=4, learning_rate=3e-3, shallow_share=1.0)
    train_draft(target, Examples(shards), recipe, tmp_path / "c.pt", progress=lambda told: losses.append(told.loss))
    assert losses[-1] < 0.8 * losses[2]


def test_a_trained_draft_is_found_by_its_folder(llm: LLM, draft: Path) -> None:
    facts = json.loads((draft / "provenance.json").read_text())
    assert facts["text"]["num_tokens"] >= 6000
    assert facts["recipe"]["kind"] == "feature"
    assert "held out" in (draft / "README.md").read_text()
    assert not draft.with_name("draft.training.pt").exists()
    assert text_home(llm.fingerprint, 0).is_dir()
    with_draft = LLM(llm.folder, dtype="float32", threads=1, draft=draft)
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    (plain,) = llm.generate(prompt, sampling, drafter="none")
    for name in ("draft-chain", "draft", "staged-chain", "staged", "all"):
        (drafted,) = with_draft.generate(prompt, sampling, drafter=name)
        assert drafted.token_ids == plain.token_ids, name
        if name != "all":
            assert drafted.stats.num_draft_passes > 0, name


def test_a_finished_draft_is_not_trained_again(llm: LLM, draft: Path) -> None:
    notes: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in draft.iterdir()}
    assert produce_draft(llm, draft, RECIPE, 6000, reports=Reports(note=notes.append)) is None
    assert {path: path.stat().st_mtime_ns for path in draft.iterdir()} == before
    assert notes == []


def test_a_table_for_the_draft(llm: LLM, draft: Path) -> None:
    scores = produce_ngram(llm, draft, num_tokens=2000, max_bytes=100_000, seed=0, text_tokens=6000)
    produce_ngram(llm, draft, num_tokens=2000, max_bytes=100_000, seed=0, text_tokens=6000)
    card = (draft / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# Draft for ")
    assert card.count("## Its trigram table") == 1
    assert scores
    assert (draft / "ngram.safetensors").stat().st_size <= 100_000
    with_draft = LLM(llm.folder, dtype="float32", threads=1, draft=draft)
    assert with_draft.draft is not None
    assert with_draft.draft.ngram_table is not None
    (drafted,) = with_draft.generate("Hello", SamplingParams(max_new_tokens=30, ignore_eos=True), drafter="staged")
    (plain,) = llm.generate("Hello", SamplingParams(max_new_tokens=30, ignore_eos=True), drafter="none")
    assert drafted.token_ids == plain.token_ids


def test_prompt_tokens_of_the_draft(llm: LLM, draft: Path) -> None:
    recipe = PromptRecipe(num_slots=1, num_epochs=0.2, num_anchors=8)
    produce_prompts(llm, draft / "prompts", recipe, 6000, draft=draft)
    with_draft = LLM(llm.folder, dtype="float32", threads=1, draft=draft)
    assert with_draft.draft is not None
    assert with_draft.draft.engine.prompts is not None
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    (drafted,) = with_draft.generate("Hello", sampling, drafter="staged+prompts")
    (plain,) = llm.generate("Hello", sampling, drafter="none")
    assert drafted.token_ids == plain.token_ids
    with pytest.raises(ConfigError, match="runs a draft model"):
        llm.generate("Hello", sampling, drafter="staged+prompts")
    (draft / "prompts" / "prompts.safetensors").write_bytes(b"x")
    notes: list[str] = []
    again = LLM(llm.folder, dtype="float32", threads=1, draft=draft, notify=notes.append)
    assert again.draft is not None
    assert again.draft.engine.prompts is None
    assert any("prompts.safetensors is truncated" in note for note in notes)


def test_another_target_refuses_the_draft(draft: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = save_model(tmp_path / "other", initializer_range=0.5)
    with pytest.raises(ModelError, match=r"was trained for target .* another model or fine-tuned since"):
        LLM(other, dtype="float32", threads=1, draft=draft)


def test_nothing_else_is_overwritten(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something that is no draft"):
        produce_draft(llm, tmp_path, RECIPE, 100)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_what_cannot_end_well_is_told_before_any_text_is_written(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("text was written")

    monkeypatch.setattr(produce_module, "write_text", refuse)
    with pytest.raises(ConfigError, match=r"/dev/null/x/y cannot be written: .*; choose another place"):
        produce_draft(llm, Path("/dev/null/x/y"), RECIPE, 100)
    with pytest.raises(ConfigError, match="`prompts` and `text` were both given"):
        produce_draft(llm, tmp_path / "a", RECIPE, 100, prompts=tmp_path / "p", text=tmp_path)
    monkeypatch.setattr(WeightReader, "has", lambda self, name: False)
    with pytest.raises(ModelError, match="nothing can be trained for 'llama' models, whose embedding is no"):
        produce_draft(llm, tmp_path / "a", RECIPE, 100)


def test_a_place_may_be_named_by_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_place(Path(), is_draft, "draft") == tmp_path.resolve()
    assert not list(tmp_path.iterdir())


def test_a_table_without_a_draft_is_told(llm: LLM, tmp_path: Path) -> None:
    for folder, message in ((tmp_path, "holds no draft: make one"), (tmp_path / "x", "does not exist: make a draft")):
        with pytest.raises(ModelError, match=rf"{message} first, with `foretell train draft`"):
            produce_ngram(llm, folder, num_tokens=10, max_bytes=10_000, seed=0, text_tokens=10)


def test_a_model_of_its_own_drafts_too(llm: LLM, tmp_path: Path) -> None:
    """The target drafts for itself: everything is accepted."""
    with_draft = LLM(llm.folder, dtype="float32", threads=1, draft=llm.folder)
    (drafted,) = with_draft.generate("Hello", SamplingParams(max_new_tokens=30, ignore_eos=True), drafter="draft-chain")
    (plain,) = llm.generate("Hello", SamplingParams(max_new_tokens=30, ignore_eos=True), drafter="none")
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.acceptance_rate == 1.0


def test_a_model_with_another_vocabulary_is_refused(llm: LLM, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"A":', '"tmp":').replace('"B":', '"A":').replace('"tmp":', '"B":'))
    with pytest.raises(ConfigError, match=r"has another tokenizer: 2 of 259 ids differ, the first is \d+ \('B', the"):
        LLM(llm.folder, dtype="float32", threads=1, draft=other)


def test_recipes_are_checked() -> None:
    with pytest.raises(ConfigError, match="there is no size 'huge': choose one of tiny, small"):
        Recipe(size="huge")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`epochs` must be above 0"):
        Recipe(num_epochs=0)
