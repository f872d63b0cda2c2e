"""Rules beside match, through the engine: laws of what it emits, seeds, ends, and what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chisquare

from foretell.drafters.calibration import Calibration
from foretell.drafters.draft import DraftModelDrafter
from foretell.drafters.draft_engine import DraftEngine
from foretell.drafters.drafter import DrawingDrafter, NoDrafter, Outcome, Proposal, TableDrafter
from foretell.drafters.drawn import DraftLaw, draw_tree
from foretell.errors import ConfigError, NumericsError
from foretell.hardware.profile import LatencyProfile
from foretell.models.draft import DraftModel
from foretell.params import SamplingParams
from foretell.passes.rows import Rows
from foretell.passes.runner import PassOutput
from foretell.tree.pack import pack
from foretell.tree.token_tree import TokenTree
from foretell.verify.draws import DrawPlan
from foretell.verify.rule import make_rule

Paths = dict[tuple[int, ...], float]
DRAWN_RULES = ("rejection", "traversal")
PROMPT_SEED = 0
NUM_TOKENS = 3
VOCAB_SIZE = 64


@dataclass
class Drawing(TableDrafter):
    """Draws from a law over a few ids that depends on the last token alone."""

    ids: Sequence[int]
    is_sorted: bool = False
    """Whether it lists what it drew by probability, which no rule can stand."""
    stop_ids: frozenset[int] = frozenset()
    name: str = "drawing"
    needs: frozenset[str] = frozenset()
    memory_bytes: int = 0
    plans: list[DrawPlan] = field(default_factory=list)

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None: ...

    def observe(self, outcome: Outcome) -> None: ...

    def fork(self) -> Drawing:
        return replace(self, plans=[])

    def propose(self, proposal: Proposal) -> TokenTree:
        raise AssertionError("asked for ranked children")

    def draw(self, proposal: Proposal, plan: DrawPlan) -> TokenTree:
        assert proposal.ahead == ()
        assert len(plan.shape) <= proposal.max_nodes + 1
        self.plans.append(plan)
        tree = draw_tree(proposal.root, plan, self.laws, self.name, self.stop_ids)
        assert max(tree.depths()) <= proposal.max_depth
        if self.is_sorted:
            assert tree.draws is not None
            for node, draws in tree.draws.items():
                likeliest_first = sorted(draws.ids, key=lambda token_id: -draws.law_probs[draws.law_ids == token_id])
                tree.draws[node] = replace(draws, ids=tuple(likeliest_first))
        return tree

    def laws(self, tree: TokenTree, nodes: list[int]) -> list[DraftLaw]:
        return [DraftLaw(np.array(self.ids), self.probs(tree.token_ids[node])) for node in nodes]

    def probs(self, last_token: int) -> np.ndarray:
        return np.random.default_rng(last_token).dirichlet(np.ones(len(self.ids)))


def request_of(lab: Any, drafter: Any, params: SamplingParams, *, seed: int = 0, **options: Any) -> Any:
    request = lab.request(lab.prompt(PROMPT_SEED), drafter, replace(params, seed=seed), **options)
    return replace(request, rule=make_rule(params, request.chooser, seed, options.get("sequence_key", 0)))


def sampling(verification: Any, **parameters: Any) -> SamplingParams:
    is_lossy = verification == "typical"
    return SamplingParams(
        **{"temperature": 1.0, "max_new_tokens": NUM_TOKENS, "top_k": 3, **parameters},
        verification=verification,
        allow_lossy=is_lossy,
    )


def exact_law(lab: Any, params: SamplingParams) -> Paths:
    """Return the law of the first three tokens, from passes over all of them; a few are possible at each place."""
    engine, request = lab.engine(), request_of(lab, NoDrafter(), params)
    sequence = engine.start(request)
    engine.runner.cache.reserve(sequence.region, 64)
    paths: Paths = {(): 1.0}
    for _ in range(NUM_TOKENS):
        tree, nodes = TokenTree.root(sequence.token_ids[-1]), {(): 0}
        for node_path in sorted({path[:size] for path in paths for size in range(1, len(path) + 1)}, key=len):
            nodes[node_path] = tree.add(nodes[node_path[:-1]], node_path[-1], 0.0, "")
        packed = pack(tree)
        output = engine.runner.decode([Rows(sequence.region, packed.token_ids, packed.depths, packed.mask())])
        longer: Paths = {}
        for path, probability in paths.items():
            law = request.chooser.law(output.logits[0][row_of(packed, path)], [*sequence.token_ids, *path])
            for token_id, log_prob in zip(law.ids.tolist(), law.log_probs.tolist()):
                longer[(*path, token_id)] = probability * math.exp(log_prob)
        paths = longer
    engine.finish(sequence)
    return paths


def row_of(packed: Any, path: Sequence[int]) -> int:
    row = 0
    for token_id in path:
        row = packed.children[row][token_id]
    return row


def count_outputs(
    lab: Any, drafter: DrawingDrafter, params: SamplingParams, num_seeds: int, policy: str = "copy"
) -> Counter[tuple[int, ...]]:
    """Return how often each output came, from sequences that share passes; some differ by seed, some by key."""
    engine = lab.engine(policy)
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    first = engine.start(request_of(lab, NoDrafter(), params))
    for start in range(0, num_seeds, 50):
        requests = [
            request_of(lab, drafter.fork(), params, seed=seed % 2 * seed, sequence_key=seed)
            for seed in range(start, start + 50)
        ]
        sequences = [engine.fork(first, request) for request in requests]
        while active := [sequence for sequence in sequences if not sequence.is_finished]:
            engine.step(active)
            assert not any(sequence.provisional for sequence in active)
        for sequence in sequences:
            counts[tuple(sequence.token_ids[len(first.token_ids) :])] += 1
            num_accepted += sequence.stats.accepted.total()
            engine.finish(sequence)
    engine.finish(first)
    assert num_accepted > num_seeds // 5
    return counts


def p_value(counts: Counter[tuple[int, ...]], law: Paths) -> float:
    """Return the chi-square p-value; outcomes expected less than 5 times are one."""
    assert counts.keys() <= law.keys()
    num_draws = counts.total()
    common = [path for path, probability in law.items() if probability * num_draws >= 5]
    observed = [counts[path] for path in common]
    expected = [law[path] * num_draws for path in common]
    rest = num_draws - sum(expected)
    if rest > 1e-6:
        observed.append(num_draws - sum(observed))
        expected.append(rest)
    return float(chisquare(observed, expected).pvalue)


def likely_ids(law: Paths) -> list[int]:
    """Return the ids that the target says somewhere, and one that it never does."""
    ids = sorted({token_id for path in law for token_id in path})
    return [*ids, next(token_id for token_id in range(3, VOCAB_SIZE) if token_id not in ids)]


# The law of what is emitted


@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.7, "repetition_penalty": 1.8, "top_p": 0.95}])
@pytest.mark.parametrize("name", DRAWN_RULES)
def test_outputs_follow_the_target(lab: Any, name: str, parameters: dict[str, Any]) -> None:
    params = sampling(name, **parameters)
    law = exact_law(lab, params)
    drafter = Drawing(likely_ids(law))
    policy = "canonical" if parameters else "copy"
    assert p_value(count_outputs(lab, drafter, params, 300, policy), law) > 1e-3


def test_the_test_sees_a_sorted_draft(lab: Any) -> None:
    params = sampling("rejection")
    law = exact_law(lab, params)
    first_ids = sorted({path[0] for path in law})
    assert p_value(count_outputs(lab, Drawing(first_ids), params, 400), law) > 1e-3
    assert p_value(count_outputs(lab, Drawing(first_ids, is_sorted=True), params, 400), law) < 1e-6


def test_outputs_of_a_draft_model_follow_the_target(lab: Any) -> None:
    """The draft is the target with noise on its weights; it knows half of the ids, and nothing of top-k."""
    params = sampling("traversal", temperature=1.4)
    law = exact_law(lab, params)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor.double() * (1.0 + 0.5 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in load_file(lab.folder / "model.safetensors").items()
    }
    kept = np.array([token_id for token_id in range(VOCAB_SIZE) if token_id % 2 or token_id in likely_ids(law)[::2]])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]  # [K, E]
    model = DraftModel(lab.model.config, tensors, kept, torch.float64, torch.device("cpu"))
    draft = DraftEngine(model, 2048, Calibration(), clock=lambda: 0.0)
    drafter = DraftModelDrafter(draft, "draft", eos_ids=frozenset())
    drafter.begin(lab.prompt(PROMPT_SEED))
    counts = count_outputs(lab, drafter, params, 250)
    drafter.close()
    assert p_value(counts, law) > 1e-3
    assert draft.runner.cache.num_bytes == 0


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_a_perfect_draft_is_always_accepted(lab: Any, name: str) -> None:
    """A draft law equal to the target's leaves nothing to reject; the first token's is known, the others' are not."""
    engine, params = lab.engine(), sampling(name, max_new_tokens=2)
    first: dict[int, float] = {}
    for path, probability in exact_law(lab, sampling(name)).items():
        first[path[0]] = first.get(path[0], 0.0) + probability

    class Perfect(Drawing):
        def probs(self, last_token: int) -> np.ndarray:
            return np.array([first[token_id] for token_id in self.ids])

    for seed in range(20):
        run = lab.run(engine, request_of(lab, Perfect(sorted(first)), params, seed=seed))
        assert [len(block) for block in run.blocks] == [2]


# Seeds


@pytest.mark.parametrize("name", [*DRAWN_RULES, "typical"])
def test_a_seed_repeats_its_tokens_whatever_the_clock_says(lab: Any, name: str) -> None:
    params = sampling(name, max_new_tokens=20, top_k=8)
    costly = LatencyProfile(key={"model": "costly"}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.5),))
    outputs = set()
    for place in range(3):
        ticks = iter(range(10**9))
        engine = lab.engine("canonical", profile=costly, clock=lambda place=place, ticks=ticks: place * next(ticks))
        if name == "typical":
            truth = lab.decode(None, lab.prompt(PROMPT_SEED), SamplingParams(max_new_tokens=40))
            drafter: Any = Forgetful(truth)
        else:
            drafter = Drawing(range(3, 40))
        outputs.add(tuple(lab.run(engine, request_of(lab, drafter, params, seed=7)).output_ids))
    assert len(outputs) == 1
    other = lab.run(lab.engine(), request_of(lab, NoDrafter(), params, seed=8)).output_ids
    assert tuple(other) not in outputs


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_a_seed_gives_together_what_it_gives_alone_vllm_6038(lab: Any, name: str) -> None:
    params = sampling(name, max_new_tokens=16, top_k=8)
    steep = LatencyProfile(key={"model": "steep"}, contexts=(0,), num_rows=(1, 4, 16), pass_s=((1.0, 1.2, 4.0),))

    def requests() -> list[Any]:
        return [request_of(lab, Drawing(range(3, 40)), params, seed=seed) for seed in range(6)]

    alone = [lab.run(lab.engine(profile=steep), request).output_ids for request in requests()]
    engine = lab.engine(profile=steep)
    sequences = [engine.start(request) for request in requests()]
    while active := [sequence for sequence in sequences if not sequence.is_finished]:
        engine.step(active)
    assert [sequence.token_ids[5:] for sequence in sequences] == alone


class Forgetful(TableDrafter):
    """Proposes what plain decoding said at that place, whatever was said since."""

    name, needs, memory_bytes = "forgetful", frozenset[str](), 0

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth, self.num_tokens = truth, 0

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None:
        self.num_tokens = len(prompt_ids)

    def observe(self, outcome: Outcome) -> None:
        self.num_tokens += len(outcome.token_ids)

    def propose(self, proposal: Proposal) -> TokenTree:
        tree = TokenTree.root(proposal.root)
        for token_id in self.truth[self.num_tokens : self.num_tokens + min(3, proposal.max_depth)]:
            tree.add(len(tree) - 1, token_id, -0.1 * len(tree), self.name)
        return tree


def test_typical_acceptance_takes_what_match_would_not(lab: Any) -> None:
    prompt = lab.prompt(PROMPT_SEED)
    truth = lab.decode(None, prompt, SamplingParams(max_new_tokens=24))
    params = sampling("typical", max_new_tokens=16, top_k=0, temperature=0.7)
    typical = lab.run(lab.engine("canonical"), request_of(lab, Forgetful(truth), params, seed=3))
    matched = lab.run(
        lab.engine("canonical"), lab.request(prompt, Forgetful(truth), replace(params, verification="match", seed=3))
    )
    assert len(typical.blocks) < len(matched.blocks)
    assert typical.output_ids != matched.output_ids


def test_greedy_needs_no_draws(lab: Any) -> None:
    params = SamplingParams(max_new_tokens=12, verification="rejection")
    prompt = lab.prompt(PROMPT_SEED)
    truth = lab.decode(None, prompt, SamplingParams(max_new_tokens=12))
    request = lab.request(prompt, lab.Oracle(truth), params)
    assert make_rule(params, request.chooser, None, 0) is None
    assert lab.run(lab.engine(), request).sequence.token_ids == truth


# Ends, log-probabilities, numbers that are none


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_an_end_inside_a_block_ends_the_output(lab: Any, name: str) -> None:
    params = sampling(name, max_new_tokens=12)
    ids = likely_ids(exact_law(lab, sampling(name)))
    stop_ids = frozenset(ids[:2])
    num_inside = 0
    for seed in range(30):
        drafter = Drawing(ids, stop_ids=stop_ids)
        run = lab.run(lab.engine(), request_of(lab, drafter, params, seed=seed, stop_ids=stop_ids))
        is_end = [token_id in stop_ids for token_id in run.output_ids]
        assert not any(is_end[:-1])
        assert run.sequence.finish_reason == ("stop" if is_end[-1] else "length")
        num_inside += is_end[-1] and run.blocks[-1][-1].source == drafter.name
        for plan in drafter.plans:
            assert len(plan.shape) > 1
    assert num_inside > 3


@pytest.mark.parametrize("name", DRAWN_RULES)
@pytest.mark.parametrize("policy", ["canonical", "copy"])
def test_log_probabilities_are_those_of_the_text(lab: Any, name: str, policy: Any) -> None:
    params = sampling(name, max_new_tokens=10, logprobs=2)
    drafter = Drawing(likely_ids(exact_law(lab, sampling(name))))
    run = lab.run(lab.engine(policy), request_of(lab, drafter, params, seed=1))
    assert any(len(block) > 1 for block in run.blocks)
    engine, ids = lab.engine(), run.sequence.token_ids
    region = engine.runner.cache.allocate(64)
    chain = Rows.chain(region, ids)
    logits = engine.runner.decode([chain]).logits[0][: len(ids)].double()  # [N, V]
    expected = torch.log_softmax(logits, -1)  # [N, V]
    for place, emission in enumerate(emission for block in run.blocks for emission in block):
        assert emission.logprobs is not None
        assert emission.logprobs.logprob == pytest.approx(float(expected[4 + place, emission.token_id]), abs=1e-5)


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_nan_is_an_error_and_leaves_nothing_behind(lab: Any, name: str) -> None:
    engine = lab.engine()
    sequence = engine.start(request_of(lab, Drawing(range(3, 9)), sampling(name)))
    decode = engine.runner.decode

    def spoiled(rows: Any) -> Any:
        output = decode(rows)
        return PassOutput(output.hidden, [torch.full_like(each, torch.nan) for each in output.logits])

    engine.runner.decode = spoiled
    with pytest.raises(NumericsError):
        engine.step([sequence])
    assert sequence.token_ids == lab.prompt(PROMPT_SEED)
    assert not sequence.region.pool.tensor.isnan().any()


# Refusals and plans


@pytest.mark.parametrize("name", DRAWN_RULES)
def test_a_drafter_that_ranks_is_refused_before_anything_runs(lab: Any, name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"drafter 'oracle' proposes no drawn children.*'{name}'.*use 'match'"
    ) as caught:
        request_of(lab, lab.Oracle([]), sampling(name))
    assert "\n" not in str(caught.value)
    assert request_of(lab, lab.Oracle([]), sampling("typical")).rule is not None
