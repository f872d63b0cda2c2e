"""Samples of a draft: what each row sees, which law is drawn from, and what lies in the shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import ConfigError, InputError
from foretell.models.draft import DraftKind, DraftModel
from foretell.passes.rows import Rows
from foretell.passes.runner import Runner
from foretell.train.examples import Examples
from foretell.train.sample import Sampler, Samples, SampleSettings, draw, sample_text

EOS = 3
KEPT = [EOS, *range(10, 50)]
GREEDY = SampleSettings(temperature=0, length=6)
MakeDraft = Callable[..., DraftModel]
MakeExamples = Callable[..., Examples]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.train.sample.SHARD_DOCUMENTS", 4)


@pytest.fixture
def examples(make_examples: MakeExamples, tmp_path: Path) -> Examples:
    return make_examples(tmp_path, [40, 7, 69, 33, 5, 61])


def plain_continuation(draft: DraftModel, examples: Examples, number: int, start: int, length: int) -> list[int]:
    """Return the draft's own choices after the first `start` tokens, each from a pass over all before it."""
    runner = Runner(draft, 512)
    text = examples.documents[number][:start].tolist()
    for _ in range(length):
        size = len(text)
        features = None
        if draft.no_feature is not None:
            features = draft.no_feature.repeat(size, 1)  # [T, E]
            features[1:start] = examples.batch([number]).features[0, 1:start].to(features)
        region = runner.cache.allocate(size)
        rows = Rows.chain(region, text, features)
        logits = draft.logits(runner.prefill(rows))  # [T, K]
        runner.cache.free(region)
        text.append(KEPT[int(logits[-1].argmax())])
        if text[-1] == EOS:
            break
    return text[start:]


@pytest.mark.parametrize("kind", ["lm", "feature"])
@pytest.mark.parametrize("window", [None, 12])
def test_rows_side_by_side_see_what_they_would_alone(
    make_draft: MakeDraft, examples: Examples, kind: DraftKind, window: int | None
) -> None:
    """Continuations share a document's slots; with a window, more slots lie before it than positions do."""
    draft = make_draft(kind, window)
    found = Sampler(draft, examples, SampleSettings(temperature=0, length=11)).continue_all(np.arange(6), 0).documents
    texts = [found[number].tolist() for number in range(len(found))]
    by_given = {tuple(text[:2]): text[2:] for text in texts}
    assert len(by_given) == len(texts)
    num_tested = 0
    for number in (0, 2, 3, 5):
        text = examples.documents[number]
        for start in range(5, len(text), 7):
            assert by_given[tuple(text[start - 2 : start].tolist())] == plain_continuation(
                draft, examples, number, start, 11
            )
            num_tested += 1
    assert num_tested > 20
    assert len({tuple(each) for each in by_given.values()}) > 50, "the draft must depend on its context"


def test_documents_hold_two_given_tokens_and_what_the_draft_sampled(make_draft: MakeDraft, examples: Examples) -> None:
    documents = examples.documents
    sampler = Sampler(make_draft("lm"), examples, SampleSettings(length=5, temperature=2.0))
    samples = sampler.continue_all(np.array([2, 3, 4]), 0)
    found = samples.documents
    places = {tuple(documents[d][t - 2 : t].tolist()): documents.kinds[d] for d in (2, 3) for t in range(5, 69)}
    assert len(found) == 64 + 33 - 5  # of 69 tokens, the most a pass has rows for; of 33; of 5, none is an answer
    assert np.array_equal(found.answer_starts, [2] * len(found))
    assert len(samples) == len(found.token_ids) - 2 * len(found)
    num_ended = 0
    for number, kind in enumerate(found.kinds):
        text = found[number].tolist()
        assert places[tuple(text[:2])] == kind
        assert set(text[2:]) <= set(KEPT)
        assert len(text) == 7 or text[-1] == EOS
        assert EOS not in text[2:-1]
        num_ended += text[-1] == EOS
    assert num_ended > 0


def test_choices_are_what_the_draft_would_rather_have_said(make_draft: MakeDraft, examples: Examples) -> None:
    draft = make_draft("lm")
    greedy = Sampler(draft, examples, GREEDY).continue_all(np.arange(6), 0)
    assert np.array_equal(greedy.choices, greedy.documents.token_ids)
    samples = Sampler(draft, examples, SampleSettings(length=4, temperature=2.0)).continue_all(np.arange(6), 0)
    documents, num_other = samples.documents, 0
    for number in range(0, len(documents), 9):
        place = int(documents.starts[number])
        given = documents.token_ids[place : place + 2].tolist()
        assert samples.choices[place : place + 2].tolist() == given
        source, start = place_of(examples, given)
        assert samples.choices[place + 2] == plain_continuation(draft, examples, source, start, 1)[0]
        num_other += samples.choices[place + 2] != documents.token_ids[place + 2]
    assert num_other > 5


def place_of(examples: Examples, given: list[int]) -> tuple[int, int]:
    """Return the document that holds two tokens, and how many tokens lie before what follows them."""
    for number in range(len(examples.documents)):
        text = examples.documents[number].tolist()
        for start in range(2, len(text)):
            if text[start - 2 : start] == given:
                return number, start
    raise AssertionError(given)


def test_equal_seeds_give_equal_samples(make_draft: MakeDraft, examples: Examples) -> None:
    def sample(seed: int, key: int) -> list[int]:
        settings = SampleSettings(length=3, seed=seed)
        samples = Sampler(make_draft(), examples, settings).continue_all(np.arange(4), key)
        return samples.documents.token_ids.tolist()  # type: ignore[no-any-return]

    assert sample(0, 1) == sample(0, 1)
    assert sample(0, 1) != sample(0, 2)
    assert sample(0, 1) != sample(1, 1)


@given(
    st.lists(st.integers(-80, 80).map(lambda tenths: tenths / 10), min_size=2, max_size=9),
    st.floats(0.1, 3),
    st.integers(0, 10),
)
def test_draws_follow_the_law(row: list[float], temperature: float, top_k: int) -> None:
    """Evenly spread uniform numbers choose a column as often as it is probable."""
    size = 2000
    settings = SampleSettings(temperature=temperature, top_k=top_k)
    uniform = ((np.arange(size) + 0.5) / size).astype(np.float32)
    logits = torch.tensor(row, dtype=torch.float64).expand(size, -1)
    columns = draw(logits, settings, uniform)
    scores = np.array(row) / temperature
    if 0 < top_k < len(row):
        least = np.sort(scores)[-top_k]
        if (scores == least).sum() > 1:
            return  # which of equals is left out is open
        scores[scores < least] = -np.inf
    law = np.exp(scores - scores.max())
    counts = np.bincount(columns.numpy(), minlength=len(row))
    assert np.abs(counts - size * law / law.sum()).max() < 2.1


def test_extreme_uniform_numbers_choose_what_is_possible() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]] * 2)
    ends = np.array([0, np.nextafter(np.float32(1), np.float32(0))], dtype=np.float32)
    assert draw(logits, SampleSettings(), ends).tolist() == [1, 2]


def test_temperature_0_takes_the_best() -> None:
    logits = torch.tensor([[0.1, 0.3, 0.2], [5.0, -1.0, 5.0]])
    assert draw(logits, GREEDY, np.array([0.99, 0.99], dtype=np.float32)).tolist() == [1, 0]


# Shards


def test_an_interrupted_run_goes_on(
    make_draft: MakeDraft, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, folder, seen = make_draft(), tmp_path / "samples", list[tuple[int, int]]()
    settings = SampleSettings(length=4)
    whole = sample_text(draft, examples, folder, 1500, settings=settings, progress=lambda *done: seen.append(done))
    assert len(whole) >= 1500
    assert seen[-1] == (1500, 1500)
    shards = sorted(folder.iterdir())
    assert len(shards) == 2 * len(seen) > 2
    contents = [path.read_bytes() for path in shards]
    shards[-1].unlink()
    again = sample_text(draft, examples, folder, 1500, settings=settings)
    assert np.array_equal(again.documents.token_ids, whole.documents.token_ids)
    assert np.array_equal(again.choices, whole.choices)
    assert [path.read_bytes() for path in shards] == contents
    monkeypatch.setattr(Sampler, "shard", None)  # nothing is left to sample
    sample_text(draft, examples, folder, 1500, settings=settings)


@pytest.mark.parametrize("change", ["draft", "settings", "text"])
def test_shards_of_something_else_do_not_count(
    make_draft: MakeDraft, make_examples: MakeExamples, examples: Examples, tmp_path: Path, change: str
) -> None:
    first: dict[str, Any] = {"draft": make_draft(), "settings": SampleSettings(length=2), "text": examples}
    (tmp_path / "other").mkdir()
    second = first | {
        "draft": make_draft(seed=1),
        "settings": SampleSettings(length=2, temperature=1.4),
        "text": make_examples(tmp_path / "other", [30, 40]),
    }
    folder = tmp_path / "samples"
    for each in (first, first | {change: second[change]}):
        sample_text(each["draft"], each["text"], folder, 10, settings=each["settings"])
    assert len({path.name.split("-")[0] for path in folder.iterdir()}) == 2


def test_a_damaged_shard_is_told(make_draft: MakeDraft, examples: Examples, tmp_path: Path) -> None:
    def sample() -> Samples:
        return sample_text(make_draft(), examples, tmp_path / "samples", 10, settings=GREEDY)

    sample()
    choices, shard = sorted((tmp_path / "samples").iterdir())
    contents = choices.read_bytes()
    choices.write_bytes(contents[:100])
    with pytest.raises(InputError, match=rf"{shard.name} lacks its choices .*: delete it"):
        sample()
    np.save(choices, np.zeros(3, np.int32))
    with pytest.raises(InputError, match=rf"{shard.name} has other choices beside it: delete both"):
        sample()
    choices.write_bytes(contents)
    sample()
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(InputError, match="is damaged"):
        sample()


def test_texts_without_answers_are_refused(make_draft: MakeDraft, make_examples: MakeExamples, tmp_path: Path) -> None:
    short = make_examples(tmp_path, [5, 5, 4])
    with pytest.raises(InputError, match="none of 2 texts of the target has an answer to continue"):
        sample_text(make_draft(), short, tmp_path / "samples", 10)


@pytest.mark.parametrize(("name", "value"), [("temperature", -0.1), ("top_k", -1), ("length", 0)])
def test_settings_are_checked(name: str, value: float) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"{name} is {value}, the least is \d: raise it"):
        SampleSettings(**wrong)
