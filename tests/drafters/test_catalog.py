"""Every drafter by name."""

from __future__ import annotations

import pytest

from draft_lab import (
    EOS,
    Guesses,
    draft,
    engine,
    states_of,
    wild,
)
from foretell.drafters.catalog import DRAFTERS, MODEL_DRAFTERS, check_drafter_name, make_drafter
from foretell.drafters.drafter import Drafter
from foretell.errors import ConfigError


def test_drafters_that_run_a_model_ask_for_one() -> None:
    for name in (*DRAFTERS, *MODEL_DRAFTERS):
        check_drafter_name(name)
    for name in MODEL_DRAFTERS:
        with pytest.raises(ConfigError, match=r"`foretell train draft`.*`--draft`"):
            make_drafter(name, eos_ids=frozenset())
    with pytest.raises(ConfigError, match=r"no drafter 'eagle': choose one of none, .*, staged"):
        check_drafter_name("eagle")


@pytest.mark.parametrize("name", [*MODEL_DRAFTERS, "all"])
@pytest.mark.parametrize("has_table", [False, True])
def test_every_name_makes_a_drafter_that_drafts(name: str, has_table: bool) -> None:
    shared = engine("feature")
    made: list[frozenset[int]] = []

    def make_table(eos_ids: frozenset[int]) -> Drafter:
        made.append(eos_ids)
        return Guesses(wild, "katz")

    table = make_table if has_table else None
    drafter = make_drafter(name, eos_ids=frozenset({EOS}), draft=shared, ngram_table=table)
    drafter.begin([1, 2, 3, 1, 2], states_of([1, 2, 3, 1, 2])[:-1])
    tree = draft(drafter, 2)
    assert drafter.name == name
    assert "draft" in {source.split("<")[0] for source in tree.sources}
    assert all(source.split("<")[0] in ("", "draft", "suffix", "recycle") for source in tree.sources)
    assert bool(made) == (has_table and name not in ("draft", "draft-chain"))
    if name.endswith("chain"):
        assert tree.parents == list(range(-1, len(tree) - 1))
    drafter.close()
