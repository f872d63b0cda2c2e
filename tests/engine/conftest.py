"""Tiny random models of every family behind an engine, and drafters that know too much, too little, or lie."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.drafters.calibration import Calibration
from foretell.drafters.drafter import Drafter, DraftSampling, NoDrafter, Outcome, Proposal, TableDrafter
from foretell.engine.engine import CommitPolicy, Engine
from foretell.engine.sequence import DecodingSequence, Emission, Request
from foretell.hardware.profile import LatencyProfile
from foretell.models.decoder import Model
from foretell.models.load import DECODERS, load_model
from foretell.params import SamplingParams
from foretell.passes.runner import Runner
from foretell.tree.token_tree import TokenTree
from foretell.verify.choose import TokenChooser

VOCAB_SIZE = 64
CPU = torch.device("cpu")

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # wide enough that greedy outputs wander
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def save_tiny_model(family: str, folder: Path, **fields: Any) -> Path:
    """Save a random model of a family, as transformers does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**_SHAPE, **_FAMILY_FIELDS[family], **fields}
    if family == "gpt2":
        del shape["num_key_value_heads"]
        shape = {_GPT2_NAMES.get(name, name): value for name, value in shape.items()}
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config  # its stated types differ from what it takes
    build(AutoConfig.for_model(family, **shape)).save_pretrained(folder)
    return folder


@dataclass
class Scripted(TableDrafter):
    """A drafter that knows what plain decoding says: subclasses decide what to make of it."""

    truth: Sequence[int]
    """Prompt and output of plain decoding."""
    seed: int = 0
    needs: frozenset[str] = frozenset()
    memory_bytes: int = 0
    position: int = 0
    """Tokens observed so far."""
    outcomes: list[Outcome] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def begin(self, prompt_ids: Sequence[int], hidden: Any = None) -> None:
        assert list(prompt_ids) == list(self.truth[: len(prompt_ids)])
        self.position = len(prompt_ids)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.position += len(outcome.token_ids)

    def propose(self, proposal: Proposal) -> TokenTree:
        self.proposals.append(proposal)
        assert proposal.root == self.truth[self.position - 1]
        start = self.position + len(proposal.ahead)
        tree = TokenTree.root(proposal.tip)
        self.fill(tree, self.truth[start : start + proposal.max_depth], proposal)
        assert len(tree) <= proposal.max_nodes + 1
        assert max(tree.depths()) <= proposal.max_depth
        return tree

    def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
        raise NotImplementedError

    def fork(self) -> Scripted:
        return type(self)(self.truth, self.seed)


class Silent(Scripted):
    """Knows, and proposes nothing."""

    def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None: ...


class Oracle(Scripted):
    """A chain of what will come."""

    def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
        for token_id in future[: proposal.max_nodes]:
            tree.add(len(tree) - 1, token_id, -0.01 * len(tree), self.name)


class Liar(Scripted):
    """A chain in which every token is wrong, however sure it is of itself."""

    def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
        for token_id in future[: proposal.max_nodes]:
            tree.add(len(tree) - 1, (token_id + 1) % VOCAB_SIZE, -0.01 * len(tree), self.name)


class Sideways(Scripted):
    """What will come, but as the less likely child at every node: nothing of it lies in the first chain."""

    def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
        node = 0
        for token_id in future[: proposal.max_nodes // 2]:
            tree.add(node, (token_id + 1) % VOCAB_SIZE, tree.log_accept[node] - 0.01, self.name)
            node = tree.add(node, token_id, tree.log_accept[node] - 0.02, self.name)


class RandomTrees(Scripted):
    """Trees of any shape around what will come: right and wrong tokens, ties, certainties, no nodes at all."""

    def fill(self, tree: TokenTree, future: Sequence[int], proposal: Proposal) -> None:
        draw, depths = self.random, [0]
        on_path = [True]
        deepen = draw.random()
        for _ in range(min(proposal.max_nodes, draw.choice((0, 1, 2, 5, 9, 15)))):
            parent = len(tree) - 1 if draw.random() < deepen else draw.randrange(len(tree))
            depth = depths[parent]
            if depth >= proposal.max_depth:
                continue
            is_right = on_path[parent] and depth < len(future) and draw.random() < 0.6
            token_id = future[depth] if is_right else draw.randrange(VOCAB_SIZE)
            if token_id in tree.children()[parent]:
                continue
            step = draw.choice((0.0, -0.1, -0.1, -draw.random(), -5.0))
            tree.add(parent, token_id, tree.log_accept[parent] + step, self.name)
            depths.append(depth + 1)
            on_path.append(on_path[parent] and depth < len(future) and token_id == future[depth])


class Free(Calibration):
    """Believes every drafter, whatever happened."""

    def calibrate(self, tree: TokenTree, *, is_sampled: bool = False) -> TokenTree:
        return tree

    def update(self, *args: Any, **options: Any) -> None: ...


FLAT = LatencyProfile(key={"model": "flat"}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.0),))
"""Every row is free, so that all drafts are bought."""


@dataclass(frozen=True)
class Lab:
    """One model, and engines around it."""

    model: Model
    folder: Path
    VOCAB_SIZE: int = VOCAB_SIZE
    Silent: type[Scripted] = Silent
    Oracle: type[Scripted] = Oracle
    Liar: type[Scripted] = Liar
    Sideways: type[Scripted] = Sideways
    RandomTrees: type[Scripted] = RandomTrees
    FLAT: LatencyProfile = FLAT

    def engine(
        self,
        commit: CommitPolicy = "canonical",
        *,
        context_tokens: int = 2048,
        profile: LatencyProfile = FLAT,
        calibration: Calibration | None = None,
        **options: Any,
    ) -> Engine:
        """Return an engine that buys every draft, unless a profile says otherwise; its clock stands still."""
        options.setdefault("clock", lambda: 0.0)
        runner = Runner(self.model, context_tokens)
        return Engine(runner, profile, Free() if calibration is None else calibration, commit, **options)

    def prompt(self, seed: int, size: int = 5) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]

    def request(
        self,
        prompt: Sequence[int],
        drafter: Drafter | None = None,
        params: SamplingParams | None = None,
        *,
        stop_ids: Sequence[int] = (),
        should_stop: Callable[[int], bool] | None = None,
        sequence_key: int = 0,
        vocab_size: int = VOCAB_SIZE,
    ) -> Request:
        params = params or SamplingParams(max_new_tokens=24)
        chooser = TokenChooser(
            params,
            num_prompt_tokens=len(prompt),
            eos_ids=stop_ids,
            seed=params.seed,
            sequence_key=sequence_key,
            vocab_size=vocab_size,
        )
        return Request(
            prompt_ids=prompt,
            chooser=chooser,
            drafter=drafter or NoDrafter(),
            max_new_tokens=params.max_new_tokens,
            stop_ids=frozenset(stop_ids),
            should_stop=should_stop,
            num_logprobs=params.logprobs,
            draft_sampling=None
            if params.is_greedy
            else DraftSampling(seed=params.seed or 0, sequence_key=sequence_key, temperature=params.temperature),
        )

    def run(self, engine: Engine, request: Request) -> Run:
        """Decode a request alone, checking after every step what must always hold."""
        run = Run(engine.start(request))
        try:
            while not run.sequence.is_finished:
                (emitted,) = engine.step([run.sequence])
                run.take(emitted)
        finally:
            engine.finish(run.sequence)
        return run

    def decode(self, drafter: Drafter | None, prompt: Sequence[int], *args: Any, **options: Any) -> list[int]:
        """Return prompt and output."""
        return self.run(self.engine(), self.request(prompt, drafter, *args, **options)).sequence.token_ids


@dataclass
class Run:
    """A sequence, and what each of its steps emitted."""

    sequence: DecodingSequence
    blocks: list[list[Emission]] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return self.sequence.token_ids[len(self.sequence.request.prompt_ids) :]

    def take(self, emitted: list[Emission]) -> None:
        sequence = self.sequence
        stats = sequence.stats
        self.blocks.append(emitted)
        assert emitted, "a step emits a token"
        assert [each.token_id for block in self.blocks for each in block] == self.output_ids
        assert sequence.region.length == len(sequence.token_ids) - 1
        assert sequence.region.length <= sequence.region.capacity
        assert len(sequence.provisional) == len(sequence.provisional_sources)
        assert stats.num_passes == len(self.blocks) == stats.tokens_per_pass_counts.total()
        assert stats.num_output_tokens == len(self.output_ids)
        assert stats.num_output_tokens == sum(size * count for size, count in stats.tokens_per_pass_counts.items())
        num_nodes = stats.num_passes + stats.num_refed_rows + stats.drafted.total()
        assert stats.num_rows == num_nodes or (
            "guesses" in sequence.request.drafter.needs and stats.num_rows > num_nodes
        )
        assert all(stats.accepted[source] <= stats.drafted[source] for source in stats.accepted)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _lab(family: str, factory: pytest.TempPathFactory, dtype: torch.dtype = torch.float64, **fields: Any) -> Lab:
    if importlib.util.find_spec(f"foretell.models.{family}") is None:
        pytest.skip(f"there is no decoder for {family} yet")
    folder = save_tiny_model(family, factory.mktemp(family), **fields)
    return Lab(load_model(folder, dtype=dtype, device=CPU), folder)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A llama in float64, where what is equal on paper is equal."""
    return _lab("llama", tmp_path_factory)


@pytest.fixture(scope="session", params=DECODERS)
def family_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Every family in turn, in float64; those that have a window have one of 8 positions."""
    return _lab(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def make_lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lab]:
    """A model of one's own: family, dtype, and fields of its config."""

    def make(family: str = "llama", dtype: torch.dtype = torch.float64, **fields: Any) -> Lab:
        return _lab(family, tmp_path_factory, dtype, **fields)

    return make
