"""Distil a draft model from a target's own text and hidden states; an interrupted run goes on where it was saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.errors import ConfigError, InputError, ModelError
from foretell.models.config import SLIDING, ModelConfig
from foretell.models.draft import DraftKind
from foretell.models.draft_files import shared_names
from foretell.models.weights import WeightReader
from foretell.train.checkpoint import load_checkpoint, save_checkpoint
from foretell.train.distill import Agreement, choose_kept_ids, distill, measure_agreement, run_module
from foretell.train.draft_module import DraftModule
from foretell.train.examples import Batch, Examples
from foretell.train.schedule import learning_rate_factor
from foretell.train.text import CHAT, RAW

WINDOW: Final = 256
"""Positions that a draft sees: training texts are hardly longer, and its passes then cost the same in any context."""

STREAM_WEIGHTS: Final = (1.0, 0.6, 0.4, 0.3)
"""Weight of each depth in the loss: a deeper node is reached only where those above it were right."""

Size = Literal["tiny", "small"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Dimensions of a draft beside those it has from its target."""

    num_layers: int
    num_kept: int
    """Most output ids."""


PRESETS: Final[Mapping[Size, Preset]] = {
    "tiny": Preset(num_layers=1, num_kept=8192),
    "small": Preset(num_layers=2, num_kept=12288),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train; all that decides what comes out, but the text."""

    kind: DraftKind = "feature"
    size: Size = "tiny"
    num_epochs: float = 6.0
    batch_size: int = 4
    """Documents of a step. Of equal text, 4 a step left a lower loss than 8 or fewer steps."""
    num_streams: int = 3
    """Depths that kind `feature` learns."""
    shallow_share: float = 0.6
    """Share of the steps, the first ones, that learn depth 1 alone, at 0.4 of the price: it counts most."""
    learning_rate: float = 1e-3
    sharpness: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in PRESETS:
            raise ConfigError(f"there is no size {self.size!r}: choose one of {', '.join(PRESETS)}")
        if not 0 < self.num_epochs <= 1000:
            raise ConfigError(f"`epochs` must be above 0, got {self.num_epochs}; 1,000 at most")

    @property
    def streams(self) -> int:
        """Most streams of a training pass, see `DraftModule`."""
        return self.num_streams if self.kind == "feature" else 1

    def streams_at(self, progress: float) -> int:
        """Return the streams of a training pass after this share of the steps."""
        return 1 if progress < self.shallow_share else self.streams


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """What a draft shares with its target."""

    config: ModelConfig
    folder: Path
    fingerprint: str
    embedding: Tensor
    """[V, E]."""
    head: Tensor
    """[V, E]."""

    @classmethod
    def read(cls, config: ModelConfig, folder: Path, fingerprint: str) -> TargetTensors:
        """Return the target's embedding and head, bfloat16.

        Raises:
            ModelError: the embedding has none of the names that drafts know.
        """
        with WeightReader(folder) as reader:
            name, head_name = shared_names(reader, config)
            if not reader.has(name):
                raise ModelError(
                    f"nothing can be trained for {config.model_type!r} models, whose embedding is no {name!r}: "
                    "take a target of another family"
                )
            embedding = reader.get(name).bfloat16().clone()  # [V, E]
            head = embedding if head_name == name else reader.get(head_name).bfloat16().clone()  # [V, E]
        return cls(config, folder, fingerprint, embedding, head)


@dataclass(slots=True)
class Progress:
    """How far a training is."""

    step: int
    num_steps: int
    loss: float
    elapsed_s: float
    chat: Agreement | None = None
    raw: Agreement | None = None


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A draft's weights and how they came about."""

    config: ModelConfig
    kind: DraftKind
    tensors: dict[str, Tensor]
    kept_ids: NDArray[np.int64]
    scores: dict[str, Any]


def draft_config(target: ModelConfig, num_layers: int) -> ModelConfig:
    """Return the shape of a draft's body: the target's layers, fewer of them, with a window."""
    return ModelConfig(
        model_type="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        norm_eps=target.norm_eps,
        max_positions=target.max_positions,
        hidden_act="silu",
        rope_theta=target.rope_theta or 10_000.0,
        sliding_window=WINDOW,
        layer_types=(SLIDING,) * num_layers,
        attention_scale=target.head_dim**-0.5,
        eos_ids=target.eos_ids,
    )


@dataclass(slots=True)
class _State:
    """What a checkpoint holds."""

    module: DraftModule
    optimizer: torch.optim.Optimizer
    kept_ids: NDArray[np.int64]
    step: int = 0
    elapsed_s: float = 0.0
    losses: list[float] = field(default_factory=list)


def train_draft(
    target: TargetTensors,
    examples: Examples,
    recipe: Recipe,
    checkpoint: Path,
    *,
    always_kept: frozenset[int] = frozenset(),
    evaluate_every: int = 500,
    progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainedDraft:
    """Distil a draft; kept ids and order of the documents follow from the recipe's seed.

    Args:
        target: what the draft shares with it.
        examples: text and hidden states.
        recipe: how to train.
        checkpoint: where the state is kept; a run with the same recipe, text and target goes on from it.
        always_kept: ids that are kept whatever the text has, such as EOS.
        evaluate_every: steps between evaluations; the state is saved with each.
        progress: told of every step.
        clock: seconds.

    Raises:
        InputError: there is too little text, or the checkpoint is damaged.

    Cost: on two cores 4,000 tokens/s of depth 1 alone, 1,500 of three depths (one layer, hidden width 576).
    """
    training = examples.training()
    if len(training) < recipe.batch_size:
        raise InputError(f"{len(training)} documents are too few to learn from: give at least {recipe.batch_size}")
    steps_per_epoch = len(training) // recipe.batch_size
    num_steps = max(1, round(recipe.num_epochs * steps_per_epoch))
    key = {**asdict(recipe), "text": examples.documents.digest, "target": target.fingerprint, "num_steps": num_steps}
    state = _resume(target, examples, recipe, checkpoint, key, always_kept)
    head = target.head[state.kept_ids]  # [K, E]
    first, num_done = divmod(state.step, steps_per_epoch)
    epochs = (
        examples.batches(training, recipe.batch_size, recipe.seed + 1 + epoch, skip=num_done if epoch == first else 0)
        for epoch in count(first)
    )
    agreement = None
    for batch in islice(chain.from_iterable(epochs), num_steps - state.step):
        started_s = clock()
        for group in state.optimizer.param_groups:
            factor = learning_rate_factor(state.step, num_steps, min(100, max(1, num_steps // 20)))
            group["lr"] = recipe.learning_rate * factor
        streams = recipe.streams_at(state.step / num_steps)
        loss = _take_step(state, batch, target.embedding, head, streams, recipe.sharpness)
        state.step += 1
        state.losses = [*state.losses[-99:], loss]
        state.elapsed_s += clock() - started_s
        told = Progress(state.step, num_steps, sum(state.losses) / len(state.losses), state.elapsed_s)
        if state.step % evaluate_every == 0 or state.step == num_steps:
            agreement = told.chat, told.raw = _evaluate(state, examples, target, recipe)
            _save(checkpoint, state, key)
        if progress is not None:
            progress(told)
    chat, raw = agreement or _evaluate(state, examples, target, recipe)  # a run may have only the files left to write
    scores = {
        "chat": asdict(chat),
        "raw": asdict(raw),
        "loss": sum(state.losses) / max(1, len(state.losses)),
        "training_s": round(state.elapsed_s),
        "num_steps": num_steps,
    }
    return TrainedDraft(state.module.config, recipe.kind, state.module.tensors(), state.kept_ids, scores)


def _take_step(
    state: _State, batch: Batch, embedding: Tensor, head: Tensor, num_streams: int, sharpness: float
) -> float:
    """Learn from one batch; returns the loss."""
    state.module.train()
    hidden = run_module(state.module, batch, embedding, num_streams)  # [B, D, T, E]
    is_real = batch.is_real[:, None].expand(hidden.shape[:3]).clone()  # [B, D, T]
    weights = torch.tensor(STREAM_WEIGHTS[:num_streams])[None, :, None].expand(hidden.shape[:3])  # [B, D, T]
    for depth in range(1, num_streams):
        is_real[:, depth, :depth] = False  # no path of that depth ends there
    rows = hidden[is_real]  # [R, E]
    wanted = batch.hidden[:, None].expand(-1, num_streams, -1, -1)[is_real]  # [R, E]
    gradient = distill(rows.detach(), wanted, weights[is_real], head, sharpness=sharpness)
    state.optimizer.zero_grad(set_to_none=True)
    rows.backward(gradient.hidden)  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(state.module.parameters(), 1.0)
    state.optimizer.step()
    return gradient.loss


def _evaluate(state: _State, examples: Examples, target: TargetTensors, recipe: Recipe) -> tuple[Agreement, Agreement]:
    """Return how well the draft does in chat and in raw text."""
    state.module.eval()
    chat, raw = (
        measure_agreement(
            state.module,
            examples.batches(examples.held_out(kind)[:96], 8),
            target.embedding,
            target.head,
            state.kept_ids,
            recipe.streams,
        )
        for kind in (CHAT, RAW)
    )
    return chat, raw


def _resume(
    target: TargetTensors,
    examples: Examples,
    recipe: Recipe,
    checkpoint: Path,
    key: Mapping[str, Any],
    always_kept: frozenset[int],
) -> _State:
    """Return the saved state of this very training, or a new one."""
    preset = PRESETS[recipe.size]
    torch.manual_seed(recipe.seed)
    module = DraftModule(draft_config(target.config, preset.num_layers), recipe.kind)
    _initialise(module, target)
    decayed = [each for each in module.parameters() if each.ndim > 1]
    others = [each for each in module.parameters() if each.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), foreach=True)
    saved = load_checkpoint(checkpoint, key)
    if saved is not None:
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        kept_ids = saved["kept_ids"].numpy()  # [K]
        return _State(module, optimizer, kept_ids, saved["step"], saved["elapsed_s"], saved["losses"])
    kept_ids = choose_kept_ids(examples.documents, examples.training(), preset.num_kept, always_kept)
    return _State(module, optimizer, kept_ids)


def _save(checkpoint: Path, state: _State, key: Mapping[str, Any]) -> None:
    document = {
        "module": state.module.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "kept_ids": torch.from_numpy(state.kept_ids),  # [K]
        "step": state.step,
        "elapsed_s": state.elapsed_s,
        "losses": state.losses,
    }
    save_checkpoint(checkpoint, key, document)


@torch.no_grad()
def _initialise(module: DraftModule, target: TargetTensors) -> None:
    """Begin with the target's layers where their shapes fit: the last one, before it the first; else at random."""
    tensors = module.tensors()
    for tensor in tensors.values():
        if tensor.ndim > 1:
            tensor.normal_(0.0, 0.02)
    num_layers = target.config.num_layers
    sources = {module.config.num_layers - 1: num_layers - 1, 0: 0 if module.config.num_layers > 1 else num_layers - 1}
    with WeightReader(target.folder) as reader:
        for layer, source in sources.items():
            for name, tensor in tensors.items():
                wanted = name.replace(f"model.layers.{layer}.", f"model.layers.{source}.")
                if (wanted == name and layer != source) or not reader.has(wanted):
                    continue
                found = reader.get(wanted)
                if found.shape == tensor.shape:
                    tensor.copy_(found.float())
        if reader.has("model.norm.weight"):
            tensors["model.norm.weight"].copy_(reader.get("model.norm.weight").float())
    if module.kind == "feature":
        width = module.config.hidden_size
        tensors["fuse.weight"].normal_(0.0, 0.01)
        tensors["fuse.weight"][:, :width].diagonal().add_(1.0)
        tensors["fuse.weight"][:, width:].diagonal().add_(1.0)
