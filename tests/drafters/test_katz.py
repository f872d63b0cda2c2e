"""The table of trigrams: what a lookup finds, what is refused of a file, and the drafter that reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from foretell.drafters.drafter import Outcome, Proposal
from foretell.drafters.grow import MAX_PROBABILITY
from foretell.drafters.katz import (
    FORMAT,
    MAX_RANKED,
    Context,
    KatzDrafter,
    KatzLevel,
    KatzTable,
    encode,
    encode_backoff,
    level_dtypes,
    read_facts,
    read_katz,
    write_katz,
)
from foretell.errors import ConfigError, ModelError
from foretell.tree.token_tree import TokenTree

V, EOS, MODEL, OTHER = 50, 0, "a1" * 32, "b2" * 32
FACTS = {"fingerprint": MODEL, "draft": "tiny", "num_tokens": "1000"}
Rows = dict[Context, tuple[float, dict[int, float]]]
"""For each context its backoff weight, and its continuations with their probabilities, best first."""

UNIGRAMS: Rows = {(): (0.5, {4: 0.3, 5: 0.2})}
BIGRAMS: Rows = {(1,): (0.5, {2: 0.6, 3: 0.2}), (2,): (2.0, {3: 0.9}), (3,): (0.25, {0: 0.75})}
TRIGRAMS: Rows = {(1, 2): (0.125, {7: 0.5, 3: 0.25}), (2, 3): (0.0, {1: 1.0})}


def level_of(order: int, rows: Rows, vocab_size: int = V) -> KatzLevel:
    contexts = sorted(rows)
    keys = [sum(token_id * vocab_size**place for place, token_id in enumerate(reversed(each))) for each in contexts]
    arrays: dict[str, Any] = {
        "contexts": np.array(keys),
        "starts": np.cumsum([0, *(len(rows[context][1]) for context in contexts)]),
        "ids": np.array([token_id for context in contexts for token_id in rows[context][1]]),
        "codes": encode(np.array([chance for context in contexts for chance in rows[context][1].values()])),
        "backoff_codes": encode_backoff(np.array([rows[context][0] for context in contexts])),
    }
    dtypes = level_dtypes(order, vocab_size)
    return KatzLevel(**{name: array.astype(dtypes[name]) for name, array in arrays.items()})


def table_of(*levels: Rows, vocab_size: int = V) -> KatzTable:
    return KatzTable([level_of(order, rows, vocab_size) for order, rows in enumerate(levels)], vocab_size)


TABLE = table_of(UNIGRAMS, BIGRAMS, TRIGRAMS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some" / "ngram.safetensors"


# Lookups


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ((), [(0.3, 4), (0.2, 5)]),
        ((1,), [(0.6, 2), (0.2, 3), (0.15, 4), (0.1, 5)]),
        ((9,), [(0.3, 4), (0.2, 5)]),
        ((1, 2), [(0.5, 7), (0.25, 3), (0.075, 4), (0.05, 5)]),  # what (2,) says of 3 is not asked
        ((9, 2), [(0.9, 3), (0.6, 4), (0.4, 5)]),  # a weight above 1
        ((2, 3), [(1.0, 1), (0.0, 0), (0.0, 4), (0.0, 5)]),
        ((9, 9), [(0.3, 4), (0.2, 5)]),
    ],
)
def test_longer_contexts_come_before_shorter_ones(context: Context, expected: list[tuple[float, int]]) -> None:
    ranked = TABLE.ranked(context)
    assert [token_id for _, token_id in ranked] == [token_id for _, token_id in expected]
    assert [chance for chance, _ in ranked] == pytest.approx([chance for chance, _ in expected], rel=0.1)
    assert TABLE.ranked(context) is ranked, "the second time it is cached"


def test_only_the_best_are_returned() -> None:
    many = {(): (0.0, {token_id: 0.02 for token_id in range(30)})}
    assert TABLE.vocab_size > len(table_of(many, {(1,): (0.5, {40: 0.01, 41: 0.001})}, {}).ranked((1,))) == MAX_RANKED


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.drafters.katz._CACHE_SIZE", 3)
    table = table_of(UNIGRAMS, BIGRAMS, TRIGRAMS)
    sizes = []
    for token_id in range(8):
        table.ranked((token_id,))
        sizes.append(table.num_bytes - table.mapped_bytes)
    assert sizes[2] == max(sizes) > 0


@given(st.floats(0, 1))
def test_codes_are_close(value: float) -> None:
    ((decoded, _),) = table_of({(): (0.0, {1: value})}, {}, {}).ranked(())
    assert decoded == (0 if value == 0 else pytest.approx(max(value, math.exp(-254 / 16)), rel=0.032))


@pytest.mark.parametrize(("weight", "expected"), [(0.0, 0.0), (1e-3, 1e-3), (0.7, 0.7), (40.0, 40.0), (1e9, 64.0)])
def test_backoff_weights_are_close(weight: float, expected: float) -> None:
    table = table_of({(): (0.0, {1: 1.0})}, {(3,): (weight, {2: 0.5})}, {})
    chances = {token_id: chance for chance, token_id in table.ranked((3,))}
    assert chances[1] == pytest.approx(expected, rel=0.032)


# File


@pytest.mark.parametrize("vocab_size", [V, 50_000, 300_000])
def test_what_is_written_is_read(path: Path, vocab_size: int) -> None:
    high = vocab_size - 1
    bigrams = BIGRAMS | {(high,): (0.5, {high: 0.5})}
    table = table_of(UNIGRAMS, bigrams, TRIGRAMS | {(high, high): (0.5, {1: 0.4})}, vocab_size=vocab_size)
    write_katz(path, table, FACTS)
    found = read_katz(path, MODEL, vocab_size)
    for context in [(), (1,), (1, 2), (9, 2), (high,), (high, high), (high, 2)]:
        assert found.ranked(context) == table.ranked(context)
    assert read_facts(path) == {**FACTS, "format_version": FORMAT, "vocab_size": str(vocab_size)}
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert table.levels[1].ids.dtype == (np.uint16 if vocab_size <= 65536 else np.int32)
    arrays = [getattr(level, name) for level in found.levels for name in KatzLevel.__slots__]
    assert all(array.flags.aligned and not array.flags.owndata for array in arrays), "mapped, not copied"


def test_the_library_reads_the_file_and_equal_tables_are_equal_bytes(path: Path) -> None:
    write_katz(path, TABLE, FACTS)
    with safe_open(path, framework="np") as file:
        assert sorted(file.keys())[:2] == ["bigram.backoff_codes", "bigram.codes"]
        assert np.array_equal(file.get_tensor("trigram.ids"), TABLE.levels[2].ids)
    first = path.read_bytes()
    write_katz(path, read_katz(path, MODEL, V), dict(reversed(FACTS.items())))
    assert path.read_bytes() == first


@pytest.mark.parametrize("size", [0, 7, 8, 100, 1000, -1])
def test_a_truncated_file_is_refused(path: Path, size: int) -> None:
    write_katz(path, TABLE, FACTS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"is truncated, corrupt or unreadable \(.*\): delete it and run"):
        read_katz(path, MODEL, V)


def test_no_file_is_refused(path: Path) -> None:
    with pytest.raises(ModelError, match="unreadable"):
        read_katz(path, MODEL, V)


def test_a_table_of_another_model_is_refused(path: Path) -> None:
    write_katz(path, TABLE, FACTS)
    with pytest.raises(ModelError, match=f"belongs to model {MODEL[:16]}, this one is {OTHER[:16]}"):
        read_katz(path, OTHER, V)


@pytest.mark.parametrize("facts", [{"format_version": "2", "fingerprint": MODEL}, {"fingerprint": MODEL}, None])
def test_another_format_is_refused(path: Path, facts: dict[str, str] | None) -> None:
    path.parent.mkdir()
    save_file({"trigram.ids": np.zeros(1, np.uint16)}, path, metadata=facts)
    with pytest.raises(ModelError, match=f"has format .*, this version reads {FORMAT}"):
        read_katz(path, MODEL, V)


def damage(name: str, array: Any) -> dict[str, Any]:
    return {name: np.array(array)}


@pytest.mark.parametrize(
    "change",
    [
        damage("trigram.ids", np.full(3, V, np.uint16)),
        damage("trigram.ids", np.zeros(3, np.int32)),
        damage("trigram.ids", np.zeros((3, 1), np.uint16)),
        damage("trigram.ids", np.zeros(2, np.uint16)),
        damage("bigram.starts", np.array([0, 3, 2, 4], np.uint32)),
        damage("bigram.starts", np.array([0, 2, 3, 5], np.uint32)),
        damage("bigram.starts", np.array([1, 2, 3, 4], np.uint32)),
        damage("bigram.starts", np.array([0, 2, 4], np.uint32)),
        damage("bigram.contexts", np.array([1, 3, 2], np.uint16)),
        damage("unigram.codes", np.zeros(3, np.uint8)),
        damage("unigram.codes", np.zeros(2, np.float16)),
        damage("bigram.backoff_codes", np.zeros(2, np.uint8)),
    ],
)
def test_what_is_no_table_is_refused(path: Path, change: dict[str, Any]) -> None:
    write_katz(path, TABLE, FACTS)
    save_file(load_file(path) | change, path, metadata=dict(read_facts(path)))
    (name,) = change
    with pytest.raises(ModelError, match=f"holds no table of {name.split('.')[0]}s over 50 ids: delete it"):
        read_katz(path, MODEL, V)


@pytest.mark.parametrize("order", ["unigram", "trigram"])
def test_a_file_without_a_level_is_refused(path: Path, order: str) -> None:
    write_katz(path, TABLE, FACTS)
    kept = {name: array for name, array in load_file(path).items() if not name.startswith(order)}
    save_file(kept, path, metadata=dict(read_facts(path)))
    with pytest.raises(ModelError, match=f"holds no table of {order}s"):
        read_katz(path, MODEL, V)


def test_another_vocabulary_is_refused(path: Path) -> None:
    write_katz(path, TABLE, FACTS)
    with pytest.raises(ModelError, match="holds no table of unigrams over 4 ids"):
        read_katz(path, MODEL, 4)


def test_a_folder_that_cannot_be_written_is_told(path: Path) -> None:
    path.parent.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_katz(path, TABLE, FACTS)


# Drafter


def make(prompt: Sequence[int] = (1, 2), eos_ids: Sequence[int] = (EOS,)) -> KatzDrafter:
    drafter = KatzDrafter(TABLE, eos_ids=frozenset(eos_ids))
    drafter.begin(prompt)
    return drafter


def paths(drafter: KatzDrafter, root: int, max_nodes: int = 20, max_depth: int = 4, **more: Any) -> dict[Any, float]:
    tree = drafter.propose(Proposal(root=root, max_nodes=max_nodes, max_depth=max_depth, **more))
    assert len(tree) <= max_nodes + 1
    assert max(tree.depths()) <= max_depth
    assert set(tree.sources[1:]) <= {"katz"}
    return {
        tuple(tree.token_ids[i] for i in tree.path(node)): math.exp(tree.log_accept[node])
        for node in range(1, len(tree))
    }


def test_drafts_follow_the_table() -> None:
    found = paths(make(), 2)
    assert found[7,] == pytest.approx(0.5, rel=0.1)
    assert found[3,] == pytest.approx(0.25, rel=0.1)
    assert found[3, 1] == pytest.approx(0.25 * MAX_PROBABILITY, rel=0.1), "after (2, 3)"
    assert found[3, 1, 2] == pytest.approx(0.25 * 0.6, rel=0.1), "after (3, 1), which backs off to (1,)"


def test_the_text_and_tokens_ahead_move_the_context() -> None:
    drafter = make((9, 1))
    assert max(paths(drafter, 1).items(), key=lambda item: item[1])[0] == (2,)
    assert max(paths(drafter, 1, ahead=(2,)).items(), key=lambda item: item[1])[0] == (7,)
    drafter.observe(Outcome([5, 2, 3]))
    assert max(paths(drafter, 3).items(), key=lambda item: item[1])[0] == (1,)
    drafter.begin([9])
    assert paths(drafter, 9) == paths(make((9, 9)), 9)


def test_nothing_is_drafted_below_eos() -> None:
    assert (0,) in paths(make((9, 3)), 3)
    assert not any(path[0] == EOS and len(path) > 1 for path in paths(make((9, 3)), 3))
    assert any(path[0] == EOS and len(path) > 1 for path in paths(make((9, 3), eos_ids=()), 3))


@pytest.mark.parametrize("limits", [(0, 5), (5, 0)])
def test_nothing_allowed_gives_the_root_alone(limits: tuple[int, int]) -> None:
    assert make().propose(Proposal(root=2, max_nodes=limits[0], max_depth=limits[1])) == TokenTree.root(2)


def test_forks_are_independent() -> None:
    drafter = make((9, 1))
    fork = drafter.fork()
    fork.observe(Outcome([2]))
    assert paths(drafter, 1) == paths(make((9, 1)), 1)
    assert paths(fork, 2) == paths(make((1, 2)), 2)
    assert fork.memory_bytes == drafter.memory_bytes >= TABLE.mapped_bytes
