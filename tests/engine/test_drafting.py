"""What drafting costs and brings, on a clock that only moves when rows are computed or drafts are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from foretell.drafters.calibration import Calibration
from foretell.drafters.drafter import Outcome, Proposal, TableDrafter
from foretell.engine.engine import Engine
from foretell.hardware.profile import LatencyProfile
from foretell.params import SamplingParams
from foretell.tree.token_tree import TokenTree

STAIRCASE = LatencyProfile(
    key={"model": "staircase"},
    contexts=(0,),
    num_rows=(1, 4, 8, 16),
    pass_s=((0.010, 0.0102, 0.0125, 0.0165),),  # as a small model's on two cores
)
LONG = SamplingParams(max_new_tokens=257)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(TableDrafter):
    """A drafter whose proposals take time."""

    def __init__(self, drafter: Any, clock: Clock, draft_s: float) -> None:
        self.drafter, self.clock, self.draft_s = drafter, clock, draft_s
        self.name, self.needs, self.memory_bytes = drafter.name, drafter.needs, 0

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None:
        self.drafter.begin(prompt_ids)

    def observe(self, outcome: Outcome) -> None:
        self.drafter.observe(outcome)

    def propose(self, proposal: Proposal) -> TokenTree:
        self.clock.now_s += self.draft_s
        tree: TokenTree = self.drafter.propose(proposal)
        return tree

    def fork(self) -> Timed:
        return self


@dataclass
class Machine:
    """An engine whose passes take exactly what the profile says."""

    lab: Any
    calibration: Calibration = field(default_factory=Calibration)
    clock: Clock = field(default_factory=Clock)

    def engine(self) -> Engine:
        engine: Engine = self.lab.engine(profile=STAIRCASE, calibration=self.calibration, clock=self.clock)
        decode = engine.runner.decode

        def timed(rows: Any) -> Any:
            self.clock.now_s += STAIRCASE.seconds(max(len(each.token_ids) for each in rows), 0)
            return decode(rows)

        engine.runner.decode = timed  # type: ignore[assignment, method-assign]
        return engine

    def run(self, drafter: Any, prompt: list[int], params: SamplingParams = LONG, draft_s: float = 0.0) -> Any:
        timed = Timed(drafter, self.clock, draft_s)
        return self.lab.run(self.engine(), self.lab.request(prompt, timed, params))


@pytest.fixture(scope="module")
def truth(lab: Any) -> list[int]:
    ids: list[int] = lab.decode(None, lab.prompt(1), SamplingParams(max_new_tokens=300))
    return ids


def plain_s(num_tokens: int) -> float:
    return STAIRCASE.seconds(1, 0) * num_tokens


@pytest.mark.parametrize("draft_s", [0.0, 0.00005, 0.0002, 0.001, 0.005])
@pytest.mark.parametrize("drafter", ["Liar", "Silent"])
def test_a_useless_drafter_costs_at_most_3_percent(lab: Any, truth: list[int], drafter: str, draft_s: float) -> None:
    """vllm#8439, #17984: whether its drafts are refused, not bought or not even made."""
    machine = Machine(lab)
    run = machine.run(getattr(lab, drafter)(truth), truth[:5], draft_s=draft_s)
    assert run.sequence.token_ids == truth[: 5 + 257]
    assert run.sequence.stats.num_output_tokens == 257
    assert machine.clock.now_s <= 1.03 * plain_s(257)


class Late(TableDrafter):
    """Lies until `turn`, then knows everything."""

    name, needs, memory_bytes = "late", frozenset[str](), 0

    def __init__(self, lab: Any, truth: list[int], turn: int) -> None:
        self.liar, self.oracle, self.turn = lab.Liar(truth), lab.Oracle(truth), turn

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None:
        self.liar.begin(prompt_ids)
        self.oracle.begin(prompt_ids)

    def observe(self, outcome: Outcome) -> None:
        self.liar.observe(outcome)
        self.oracle.observe(outcome)

    def propose(self, proposal: Proposal) -> TokenTree:
        wise = self.oracle.position >= self.turn
        tree: TokenTree = (self.oracle if wise else self.liar).propose(proposal)
        return tree


@pytest.mark.parametrize("draft_s", [0.0, 0.001])
def test_recovers_when_drafts_start_to_hit(lab: Any, truth: list[int], draft_s: float) -> None:
    machine = Machine(lab)
    run = machine.run(Late(lab, truth, 105), truth[:5], draft_s=draft_s)
    assert run.sequence.token_ids == truth[: 5 + 257]
    assert machine.clock.now_s < 0.75 * plain_s(257)
    assert all(len(block) > 4 for block in run.blocks[-5:-1])


def test_a_good_drafter_is_asked_every_step(lab: Any, truth: list[int]) -> None:
    machine = Machine(lab)
    run = machine.run(lab.Oracle(truth), truth[:5], draft_s=0.0005)
    assert run.sequence.stats.num_plain_passes <= 1
    assert machine.clock.now_s < 0.4 * plain_s(257)


class Witness(Calibration):
    """Remembers what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.lessons: list[tuple[TokenTree, list[int]]] = []

    def update(self, tree: TokenTree, token_ids: Sequence[int], *, is_sampled: bool = False) -> None:
        self.lessons.append((tree, list(token_ids)))
        super().update(tree, token_ids)


@pytest.mark.parametrize("policy", ["canonical", "copy"])
@pytest.mark.parametrize("drafter", ["Liar", "Oracle", "Sideways", "RandomTrees"])
def test_calibration_learns_from_the_text(lab: Any, truth: list[int], drafter: str, policy: Any) -> None:
    """Every proposal is judged whole, by the tokens that followed its root, whether its nodes were bought or not."""
    witness, drafting = Witness(), getattr(lab, drafter)(truth, 1)
    params = SamplingParams(max_new_tokens=60)
    lab.run(lab.engine(policy, calibration=witness), lab.request(truth[:5], drafting, params))
    assert witness.lessons
    assert len(witness.lessons) == len(drafting.proposals)
    position = 5
    for proposal, outcome, (tree, token_ids) in zip(
        drafting.proposals, drafting.outcomes, witness.lessons, strict=False
    ):
        start = position + len(proposal.ahead)
        assert tree.token_ids[0] == proposal.tip == truth[start - 1]
        assert token_ids == truth[start : start + len(token_ids)]
        assert len(token_ids) >= 1
        position += len(outcome.token_ids)


def test_rows_are_bought_where_the_staircase_is_flat(lab: Any, truth: list[int]) -> None:
    """A row that costs nothing is taken, one that costs more than it brings is not."""

    class Doubtful(lab.Oracle):  # type: ignore[misc]
        def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
            for token_id in future[: proposal.max_nodes]:
                tree.add(len(tree) - 1, (token_id + 1) % 64, -1.5 * len(tree), "doubtful")

    run = Machine(lab).run(Doubtful(truth), truth[:5], SamplingParams(max_new_tokens=3))
    assert run.sequence.stats.num_rows == 3 + 2 + 1  # limited by the tokens that remain, then by nothing else
    run = Machine(lab).run(Doubtful(truth), truth[:5], SamplingParams(max_new_tokens=30))
    assert max(run.sequence.stats.tokens_per_pass_counts) == 1
    assert run.sequence.stats.num_rows <= 4 * 30


def test_times_add_up(lab: Any, truth: list[int]) -> None:
    machine = Machine(lab)
    run = machine.run(lab.Sideways(truth), truth[:5], SamplingParams(max_new_tokens=60), draft_s=0.001)
    stats = run.sequence.stats
    assert stats.forward_s + stats.draft_s == pytest.approx(machine.clock.now_s)
    assert stats.first_token_s + stats.decode_s == pytest.approx(machine.clock.now_s)
    assert stats.num_first_tokens == len(run.blocks[0])
    assert stats.tokens_per_s == pytest.approx((60 - len(run.blocks[0])) / stats.decode_s)
    assert stats.tokens_per_pass == pytest.approx(60 / len(run.blocks))


def test_sources_and_counts(lab: Any, truth: list[int]) -> None:
    """EAGLE#62: acceptance counts draft tokens alone, tokens per pass count what each pass emitted."""
    for policy in ("canonical", "copy"):
        engine = lab.engine(policy)
        run = lab.run(engine, lab.request(truth[:5], lab.Oracle(truth), SamplingParams(max_new_tokens=64)))
        stats = run.sequence.stats
        assert [len(block) for block in run.blocks] == [16, 16, 16, 16]
        assert stats.drafted == {"oracle": 60}
        assert stats.accepted == {"oracle": 60}
        assert stats.acceptance_rate == 1.0
        assert stats.tokens_per_pass == 16.0
        assert [each.source for each in run.blocks[0]] == ["oracle"] * 15 + ["target"]


def test_what_lies_beside_the_chain_is_computed_again(lab: Any, truth: list[int]) -> None:
    """Canonical rows: accepted beside the first chain, emitted once its own slot confirms it."""
    params = SamplingParams(max_new_tokens=64)
    copied = lab.run(lab.engine("copy"), lab.request(truth[:5], lab.Sideways(truth), params))
    refed = lab.run(lab.engine("canonical"), lab.request(truth[:5], lab.Sideways(truth), params))
    assert copied.sequence.token_ids == refed.sequence.token_ids == truth[: 5 + 64]
    assert copied.sequence.stats.num_refed_rows == 0
    assert refed.sequence.stats.num_refed_rows > 20
    assert [len(block) for block in copied.blocks][:2] == [8, 8]
    assert len(refed.blocks[0]) == 1
    assert len(refed.blocks) <= len(copied.blocks) + 4
    sources = [each.source for block in refed.blocks for each in block]
    assert sources[:8] == ["sideways"] * 7 + ["target"]


def test_what_a_drafter_is_told(lab: Any, truth: list[int]) -> None:
    """Hidden states and best ids are those of the rows that chose the tokens; none is computed unasked."""
    params = SamplingParams(max_new_tokens=40)
    for policy in ("canonical", "copy"):
        for name in ("Oracle", "Sideways", "RandomTrees"):
            drafter = getattr(lab, name)(truth, 2, frozenset({"hidden", "top_ids"}))
            lab.run(lab.engine(policy), lab.request(truth[:5], drafter, params))
            for outcome in drafter.outcomes:
                assert outcome.hidden.shape == (len(outcome.token_ids), 32)
                assert [ids[0] for ids in outcome.top_ids] == list(outcome.token_ids)
                assert all(len(ids) == 8 for ids in outcome.top_ids)
                best = lab.model.logits(outcome.hidden).argmax(-1)
                assert best.tolist() == list(outcome.token_ids)
    drafter = lab.Oracle(truth)
    lab.run(lab.engine(), lab.request(truth[:5], drafter, params))
    assert all(outcome.hidden is None and outcome.top_ids is None for outcome in drafter.outcomes)


def test_what_a_drafter_may_propose(lab: Any, truth: list[int]) -> None:
    """ArcticInference: every limit is named in every proposal."""
    drafter = lab.Sideways(truth)
    lab.run(lab.engine("canonical"), lab.request(truth[:5], drafter, SamplingParams(max_new_tokens=40)))
    assert any(proposal.ahead for proposal in drafter.proposals)
    for proposal in drafter.proposals:
        assert proposal.max_nodes + 1 + len(proposal.ahead) == 16
        assert proposal.max_depth >= 1
        assert proposal.sampling is None
    sampled = SamplingParams(max_new_tokens=10, temperature=1.0, seed=77)
    ids = lab.decode(None, truth[:5], sampled)
    drafter = lab.Oracle(ids)
    lab.run(lab.engine(), lab.request(truth[:5], drafter, sampled))
    assert {proposal.sampling.seed for proposal in drafter.proposals} == {77}
