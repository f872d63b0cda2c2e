"""Prompt tokens from text to answers: packed anchors, runs that go on, files that serve their target."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.errors import ConfigError
from foretell.llm import LLM
from foretell.models.layers import PackedLinear
from foretell.models.load import load_model
from foretell.params import SamplingParams
from foretell.passes.compiled import plain_copy
from foretell.train import text as text_module
from foretell.train.anchors import Anchors, choose_anchors, read_texts, run_prompts
from foretell.train.draft import TargetTensors
from foretell.train.examples import Batch, Examples
from foretell.train.produce import own_examples
from foretell.train.produce_prompts import produce_prompts
from foretell.train.prompt_module import PromptRecipe
from foretell.train.prompts import TrainedPrompts, train_prompts
from tiny import save_model

RECIPE = PromptRecipe(num_epochs=1, num_anchors=8, num_slots=2, num_chains=2)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("FORETELL_HOME", str(folder))
        patch.setattr(text_module, "SHARD_DOCUMENTS", 30)
        patch.setattr(text_module, "DOCUMENT_TOKENS", 60)
        yield folder
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_model(tmp_path_factory.mktemp("tiny"), initializer_range=0.6)
    return LLM(folder, dtype="float32", threads=1, draft="none")


@pytest.fixture(scope="module")
def examples(llm: LLM) -> Examples:
    return own_examples(llm, 3000, 0, None, None)


def tensors_of(thing: Any) -> list[Tensor]:
    """Return every tensor in a decoder."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, list):
        return [tensor for each in thing for tensor in tensors_of(each)]
    if isinstance(thing, PackedLinear):
        return [tensor for each in vars(thing).values() for tensor in tensors_of(each)]
    if dataclasses.is_dataclass(thing):
        return [tensor for each in dataclasses.fields(thing) for tensor in tensors_of(getattr(thing, each.name))]
    return []


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_anchors_are_one_anchor_at_a_time(family: str, tmp_path: Path) -> None:
    """States and gradients are those of transformers with one chain behind one prefix; the second has a window of 6."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {"sliding_window": 6} if family == "mistral" else {}
    theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **fields)).double()
    theirs.save_pretrained(tmp_path)
    theirs.requires_grad_(False)
    model = load_model(tmp_path, dtype=torch.float64, device=torch.device("cpu"))
    plain: Any = plain_copy(model, 64)  # type: ignore[arg-type]
    token_ids = torch.randint(64, (2, 20))  # [B, T]
    anchors = Anchors(torch.tensor([[2, 9, 12], [5, 6, 16]]), torch.ones(2, 3, dtype=torch.bool))
    packed = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)  # [C, m, E]
    alone = packed.detach().clone().requires_grad_()
    before = [tensor.clone() for each in vars(plain).values() for tensor in tensors_of(each)]
    states = run_prompts(plain, read_texts(model, token_ids), anchors, packed)  # [B, A, m, E]
    expected = torch.zeros_like(states)
    for text in range(2):
        for place in range(3):
            known = theirs.get_input_embeddings()(token_ids[text, : anchors.places[text, place] + 1])  # [a + 1, E]
            for chain in alone:
                hidden = theirs.model(inputs_embeds=torch.cat((known, chain))[None]).last_hidden_state  # [1, N, E]
                expected[text, place] = expected[text, place] + hidden[0, -3:] / 2
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)  # transformers norms in float32
    weights = torch.randn_like(states)
    (states * weights).sum().backward()  # type: ignore[no-untyped-call]
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert packed.grad is not None
    torch.testing.assert_close(packed.grad, alone.grad, atol=1e-4, rtol=1e-3)
    after = [tensor for each in vars(plain).values() for tensor in tensors_of(each)]
    assert len(after) > 10
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not any(tensor.requires_grad for tensor in after)


def test_anchors_lie_in_answers_with_enough_behind_them() -> None:
    is_real = torch.arange(12) < torch.tensor([[11], [4], [2]])  # [B, T]
    batch = Batch(torch.zeros(3, 12), torch.zeros(3, 12, 4), is_real, is_real & (torch.arange(12) >= 3))
    anchors = choose_anchors(batch, 4, 3, torch.Generator().manual_seed(0))
    assert anchors.is_real.tolist() == [[True] * 4, [False] * 4, [False] * 4]
    assert anchors.places[0].tolist() == sorted(set(anchors.places[0].tolist()))
    assert 3 <= int(anchors.places[0].min()) <= int(anchors.places[0].max()) <= 7  # 12 tokens, the last at place 11
    assert choose_anchors(batch, 9, 3, torch.Generator()).is_real.sum() == 5


def train(llm: LLM, examples: Examples, checkpoint: Path, recipe: PromptRecipe, **options: Any) -> TrainedPrompts:
    model: Any = llm.engine.runner.model
    target = options.pop("target", None) or TargetTensors.read(llm.config, llm.folder, llm.fingerprint)
    return train_prompts(model, plain_copy(model, 64), target, examples, recipe, checkpoint, **options)


class Stop(Exception): ...


@pytest.mark.parametrize("capacity", ["embeddings", "prefix+sampler", "lora"])
def test_an_interrupted_training_ends_like_a_whole_one(
    llm: LLM, examples: Examples, tmp_path: Path, capacity: Any
) -> None:
    recipe = dataclasses.replace(RECIPE, capacity=capacity)

    def stop(progress: Any) -> None:
        if progress.step == 7:
            raise Stop

    whole = train(llm, examples, tmp_path / "whole.pt", recipe, evaluate_every=5)
    with pytest.raises(Stop):
        train(llm, examples, tmp_path / "cut.pt", recipe, evaluate_every=5, progress=stop)
    rest = train(llm, examples, tmp_path / "cut.pt", recipe, evaluate_every=5)
    assert set(whole.tensors) == set(rest.tensors)
    assert ("sampler.out.weight" in whole.tensors) == ("sampler" in capacity)
    assert all(torch.equal(tensor, rest.tensors[name]) for name, tensor in whole.tensors.items())
    assert whole.scores["chat"] == rest.scores["chat"]
    assert (whole.ranks.counts == rest.ranks.counts).all()
    assert whole.ranks.counts.sum() > 0


@pytest.mark.parametrize("other", ["text", "target", "recipe"])
def test_another_training_starts_anew(llm: LLM, examples: Examples, tmp_path: Path, other: str) -> None:
    steps: list[int] = []

    def note(progress: Any) -> None:
        steps.append(progress.step)
        if progress.step % 2 == 0:
            raise Stop

    changed, recipe, options = copy.copy(examples), RECIPE, {}
    if other == "text":
        documents = examples.documents
        changed.documents = dataclasses.replace(documents, token_ids=documents.token_ids[::-1].copy())
    elif other == "target":
        options["target"] = TargetTensors.read(llm.config, llm.folder, "another")
    else:
        recipe = dataclasses.replace(RECIPE, learning_rate=0.1)
    for text, wanted, given in ((examples, RECIPE, {}), (examples, RECIPE, {}), (changed, recipe, options)):
        with pytest.raises(Stop):
            train(llm, text, tmp_path / "c.pt", wanted, evaluate_every=2, progress=note, **given)
    assert steps == [1, 2, 3, 4, 1, 2]


def test_trained_prompt_tokens_serve_their_target(llm: LLM, examples: Examples, tmp_path: Path) -> None:
    out, losses = tmp_path / "prompts", []
    recipe = dataclasses.replace(RECIPE, num_epochs=4)
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    (plain,) = llm.generate(prompt, sampling, drafter="none")
    result = produce_prompts(llm, out, recipe, 3000, trained=lambda told: losses.append(told.loss))
    assert result is not None
    assert losses[-1] < losses[2]
    facts = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    assert facts["recipe"] == dataclasses.asdict(recipe)
    assert facts["fingerprint"] == llm.fingerprint
    assert facts["scores"]["chat"]["by_slot"] == result.scores["chat"]["by_slot"]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "2 prompt tokens in 2 chain(s), capacity `sampler`" in card
    assert [path.name for path in tmp_path.iterdir()] == ["prompts"]
    served = LLM(llm.folder, dtype="float32", threads=1, draft="none", prompts=out)
    assert served.settings["prompts"] == str(out)
    for name in ("prompts", "all"):
        (completion,) = served.generate(prompt, sampling, drafter=name)
        assert completion.token_ids == plain.token_ids, name
    assert served.prompts is not None
    assert (served.prompts.tokens.ranks.counts == result.ranks.counts).all()
    assert served.prompts.tokens.sampler is not None
    assert served.prompts.tokens.sampler.kept_ids.tolist() == result.kept_ids.tolist()


def test_a_finished_training_is_not_repeated(llm: LLM, tmp_path: Path) -> None:
    out, notes, recipe = tmp_path / "prompts", [], dataclasses.replace(RECIPE, num_epochs=0.2)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in out.iterdir()}

    assert produce_prompts(llm, out, recipe, 3000, note=notes.append) is not None
    before = files()
    assert produce_prompts(llm, out, recipe, 3000, note=notes.append) is None
    assert files() == before
    assert notes == []
    for other, damage in ((dataclasses.replace(recipe, seed=0, num_slots=1), False), (RECIPE, True)):
        if damage:
            (out / "prompts.safetensors").write_bytes(b"cut")
        assert produce_prompts(llm, out, other, 3000, note=notes.append) is not None
    assert notes == [f"{out} holds what other settings or other text gave: it is replaced when this training ends"] * 2


def test_recipes_and_places_are_checked(llm: LLM, tmp_path: Path) -> None:
    for fields, message in (
        ({"capacity": "huge"}, "there is no capacity 'huge': choose one of embeddings, prefix, sampler"),
        ({"num_slots": 6}, "`num_slots` must be from 1 to 5, got 6"),
        ({"num_chains": 0}, "`num_chains` must be from 1 to 16, got 0"),
        ({"num_epochs": 0}, "`epochs` must be above 0, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            PromptRecipe(**fields)  # type: ignore[arg-type]
    for fields, message in (
        ({"capacity": "prefix"}, "`capacity`='prefix' is of no use with `draft`.*: take sampler or prefix"),
        ({"capacity": "lora+sampler"}, "`capacity`='lora.sampler' is of no use with `draft`"),
        ({"num_slots": 2}, "`slots`=2 is of no use with `draft`.*: leave `--slots` out"),
        ({"num_slots": 1, "num_chains": 2}, "`ensemble`=2 is of no use with `draft`"),
    ):
        with pytest.raises(ConfigError, match=message):
            produce_prompts(llm, tmp_path / "x", PromptRecipe(**fields), 100, draft=tmp_path)  # type: ignore[arg-type]
    PromptRecipe(capacity="prefix+sampler", num_slots=1).check_for_draft()
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something that is no prompt tokens"):
        produce_prompts(llm, tmp_path, RECIPE, 100)
