"""Train prompt tokens, and the sampler behind them, on a target's own text; an interrupted run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretell.errors import InputError
from foretell.hardware.prompt_policy import GuessRanks
from foretell.models.decoder import Model
from foretell.models.llama import Llama
from foretell.train.anchors import Anchors, choose_anchors, read_texts, run_prompts, take_along
from foretell.train.checkpoint import load_checkpoint, save_checkpoint
from foretell.train.distill import choose_kept_ids, distill
from foretell.train.draft import TargetTensors
from foretell.train.examples import Batch, Examples
from foretell.train.guess_ranks import count_ranks, rank_right
from foretell.train.prompt_module import PromptModule, PromptRecipe
from foretell.train.schedule import learning_rate_factor
from foretell.train.text import CHAT, RAW

_DECAY: Final = 0.8
"""A slot's weight in the loss is this much of the one before it (arXiv:2405.18628 §3.2)."""


@dataclass(frozen=True, slots=True)
class SlotAccuracy:
    """How often the target's own token was among the best guesses, on greedy text that was held out."""

    by_slot: list[list[float]]
    """`[slot][top 1, top 5, top 10]`; an id that was not kept counts as a miss."""
    num_places: int


@dataclass(slots=True)
class PromptProgress:
    """How far a training is."""

    step: int
    num_steps: int
    loss: float
    elapsed_s: float
    chat: SlotAccuracy | None = None
    raw: SlotAccuracy | None = None


@dataclass(frozen=True, slots=True)
class TrainedPrompts:
    """What came out, and how it came about."""

    tensors: dict[str, Tensor]
    kept_ids: NDArray[np.int64]
    ranks: GuessRanks
    scores: dict[str, Any]


@dataclass(slots=True)
class _State:
    """What a checkpoint holds."""

    module: PromptModule
    optimizer: torch.optim.Optimizer
    kept_ids: NDArray[np.int64]
    step: int = 0
    elapsed_s: float = 0.0
    losses: list[float] = field(default_factory=list)


def train_prompts(
    model: Model,
    plain: Model,
    target: TargetTensors,
    examples: Examples,
    recipe: PromptRecipe,
    checkpoint: Path,
    *,
    always_kept: frozenset[int] = frozenset(),
    kept_ids: NDArray[np.int64] | None = None,
    evaluate_every: int = 100,
    progress: Callable[[PromptProgress], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainedPrompts:
    """Train prompt tokens behind places drawn from the target's answers; the target's weights stay as they are.

    Args:
        model: the target, or a draft model of it; reads the texts.
        plain: the same with plain weights, through which gradients pass.
        target: the target's embedding and head, with the model's dimensions and fingerprint.
        examples: text and hidden states; the target's distributions follow from these.
        recipe: how to train.
        checkpoint: where the state is kept; a run with the same recipe, text and target goes on from it.
        always_kept: ids that are kept whatever the text has, such as EOS.
        kept_ids: ids that a sampler guesses, ascending; None chooses those that the text uses most.
        evaluate_every: steps between evaluations; the state is saved with each.
        progress: told of every step.
        clock: seconds.

    Raises:
        InputError: there is too little text, or the checkpoint is damaged.

    Cost: 2.5 s a step of 4 texts with 64 places each for a 135M model on two cores.
    """
    training = examples.training()
    if len(training) < recipe.batch_size:
        raise InputError(f"{len(training)} documents are too few to learn from: give at least {recipe.batch_size}")
    steps_per_epoch = len(training) // recipe.batch_size
    num_steps = max(1, round(recipe.num_epochs * steps_per_epoch))
    key = {**asdict(recipe), "text": examples.documents.digest, "target": target.fingerprint, "num_steps": num_steps}
    state = _resume(target, examples, recipe, checkpoint, key, always_kept, kept_ids)
    head = target.head[state.kept_ids]  # [K, E]
    told = PromptProgress(state.step, num_steps, 0.0, state.elapsed_s)
    while state.step < num_steps:
        epoch, offset = divmod(state.step, steps_per_epoch)
        for batch in examples.batches(training, recipe.batch_size, recipe.seed + 1 + epoch, skip=offset):
            started_s = clock()
            for group in state.optimizer.param_groups:
                factor = learning_rate_factor(state.step, num_steps, min(20, max(1, num_steps // 10)))
                group["lr"] = group["peak"] * factor
            loss = _take_step(state, batch, model, plain, target, head, recipe)
            state.step += 1
            state.losses = [*state.losses[-99:], loss]
            state.elapsed_s += clock() - started_s
            told = PromptProgress(state.step, num_steps, sum(state.losses) / len(state.losses), state.elapsed_s)
            if state.step % evaluate_every == 0 or state.step == num_steps:
                told.chat, told.raw = (
                    _accuracy(_count_ranks(state, examples, kind, model, plain, target, recipe, 32))
                    for kind in (CHAT, RAW)
                )
                _save(checkpoint, state, key)
            if progress is not None:
                progress(told)
            if state.step >= num_steps:
                break
    chat, raw = (
        _count_ranks(state, examples, kind, model, plain, target, recipe, 1000) for kind in (CHAT, RAW)
    )  # [R + 1] * m each
    scores = {
        "chat": asdict(_accuracy(chat)),
        "raw": asdict(_accuracy(raw)),
        "loss": sum(state.losses) / max(1, len(state.losses)),
        "training_s": round(state.elapsed_s),
        "num_steps": num_steps,
    }
    return TrainedPrompts(state.module.tensors(), state.kept_ids, GuessRanks(chat + raw), scores)


def _take_step(
    state: _State,
    batch: Batch,
    model: Model,
    plain: Model,
    target: TargetTensors,
    head: Tensor,
    recipe: PromptRecipe,
) -> float:
    """Learn from one batch; returns the loss."""
    generator = torch.Generator().manual_seed(recipe.seed + state.step)
    anchors = choose_anchors(batch, recipe.num_anchors, recipe.num_slots, generator)
    if not anchors.is_real.any():
        return state.losses[-1] if state.losses else 0.0
    states = _guess(state.module, batch, anchors, model, plain, target)[anchors.is_real]  # [R, m, E]
    wanted = take_along(batch.hidden, anchors.after(recipe.num_slots, 1))[anchors.is_real]  # [R, m, E]
    weights = _DECAY ** torch.arange(recipe.num_slots).repeat(len(states))  # [R * m]
    rows = states.flatten(0, 1)  # [R * m, E]
    gradient = distill(rows.detach(), wanted.flatten(0, 1), weights, head, sharpness=recipe.sharpness)
    state.optimizer.zero_grad(set_to_none=True)
    rows.backward(gradient.hidden)  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(state.module.parameters(), 1.0)
    state.optimizer.step()
    return gradient.loss


def _guess(
    module: PromptModule, batch: Batch, anchors: Anchors, model: Model, plain: Model, target: TargetTensors
) -> Tensor:
    """Return the states that the head reads, [B, A, m, E]."""
    no_feature: Tensor | None = getattr(model, "no_feature", None)  # of a draft model, which reads states beside tokens
    text = read_texts(model, batch.token_ids, None if no_feature is None else batch.features.to(model.dtype))
    if module.lora:
        assert isinstance(plain, Llama)
        plain.adapt(module.adapters(plain.dtype))
    states = run_prompts(
        plain,
        text,
        anchors,
        module.embeddings,
        module.prefix,
        is_adapted=bool(module.lora),
        no_feature=no_feature,
    )  # [B, A, m, E]
    before = take_along(batch.token_ids, anchors.after(states.shape[2], 1))  # [B, A, m]
    return module.guess(states, target.embedding[before])


@torch.no_grad()
def _count_ranks(
    state: _State,
    examples: Examples,
    kind: int,
    model: Model,
    plain: Model,
    target: TargetTensors,
    recipe: PromptRecipe,
    max_texts: int,
) -> NDArray[np.int64]:
    """Return how often the right tokens of all slots had which ranks, [R + 1] * m."""
    num_slots = recipe.num_slots
    head = target.head[state.kept_ids] if recipe.has_sampler else target.head  # [K, E]
    columns = torch.full((len(target.head),), -1, dtype=torch.int64)  # [V], -1 for ids that were not kept
    kept = torch.from_numpy(state.kept_ids) if recipe.has_sampler else torch.arange(len(target.head))
    columns[kept] = torch.arange(len(kept))
    ranked = []
    generator = torch.Generator().manual_seed(recipe.seed)
    for batch in examples.batches(examples.held_out(kind)[:max_texts], 8):
        anchors = choose_anchors(batch, recipe.num_anchors, num_slots, generator)
        if not anchors.is_real.any():
            continue
        states = _guess(state.module, batch, anchors, model, plain, target)[anchors.is_real]  # [R, m, E]
        right = columns[take_along(batch.token_ids, anchors.after(num_slots, 2))[anchors.is_real]]  # [R, m]
        ranks = []
        for slot in range(num_slots):
            scores = F.linear(states[:, slot].to(head.dtype), head).float()  # [R, K]
            ranks.append(rank_right(scores, right[:, slot]))
        ranked.append(torch.stack(ranks, 1).numpy())  # [R, m]
    return count_ranks(ranked, num_slots)


def _accuracy(counts: NDArray[np.int64]) -> SlotAccuracy:
    ranks = GuessRanks(counts)
    by_slot = [[ranks.accuracy(slot, best) for best in (1, 5, 10)] for slot in range(ranks.num_slots)]
    return SlotAccuracy(by_slot, int(counts.sum()))


def _resume(
    target: TargetTensors,
    examples: Examples,
    recipe: PromptRecipe,
    checkpoint: Path,
    key: Mapping[str, Any],
    always_kept: frozenset[int],
    kept_ids: NDArray[np.int64] | None,
) -> _State:
    """Return the saved state of this very training, or a new one."""
    if kept_ids is None:
        kept_ids = choose_kept_ids(examples.documents, examples.training(), recipe.num_kept, always_kept)
    known = target.embedding[kept_ids].float()  # [K, E]
    scale = float(known.square().mean().sqrt())
    torch.manual_seed(recipe.seed)
    module = PromptModule(recipe, target.config, known.mean(0), scale)
    groups: list[dict[str, Any]] = [{"params": [module.embeddings], "peak": recipe.learning_rate * scale}]
    if module.prefix is not None:
        groups.append({"params": [module.prefix], "peak": recipe.prefix_learning_rate})
    others = [each for name, each in module.named_parameters() if name not in ("embeddings", "prefix")]
    if others:
        groups.append({"params": others, "peak": recipe.sampler_learning_rate})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    saved = load_checkpoint(checkpoint, key)
    if saved is None:
        return _State(module, optimizer, kept_ids)
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    return _State(module, optimizer, kept_ids, saved["step"], saved["elapsed_s"], saved["losses"])


def _save(checkpoint: Path, state: _State, key: Mapping[str, Any]) -> None:
    document = {
        "module": state.module.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "step": state.step,
        "elapsed_s": state.elapsed_s,
        "losses": state.losses,
    }
    save_checkpoint(checkpoint, key, document)
