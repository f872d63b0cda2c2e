"""Trained prompt tokens on disk, and which of them serve a target."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.drafters.draft_store import Target
from foretell.drafters.drafter import Drafter
from foretell.drafters.fixed_prompts import RULES, FixedPromptsDrafter
from foretell.drafters.next_ids import SHIPPED
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.drafters.prompts import PromptsDrafter
from foretell.errors import ConfigError, ModelError
from foretell.hardware.prompt_policy import MAX_COUNT, GuessRanks
from foretell.hardware.prompt_rows import MAX_SLOTS
from foretell.models.artefacts import CONFIG, read_tensors, write_artefact
from foretell.models.draft_files import is_draft, shared_names
from foretell.models.files import cache_home
from foretell.models.llama import LayerAdapters, linear_shapes
from foretell.models.sampler import Sampler
from foretell.models.weights import WeightReader

FORMAT: Final = 1
WEIGHTS: Final = "prompts.safetensors"
REMEDY: Final = "train them again with `foretell train prompts`"
NONE: Final = "none"
"""In place of a folder: use none, though some may be there."""

MAX_PREFIX: Final = 32
"""Slots of a prefix: it lies where rows beyond the bought ones would."""

_FOLDER: Final = "prompts"
"""Of shipped prompt tokens, within the folder of their model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPrompts:
    """Prompt tokens ready to use."""

    tokens: PromptTokens
    source: str
    """Where they came from."""
    vocab_size: int
    """The target's."""

    def drafter(self, name: str, eos_ids: frozenset[int], pass_s: Sequence[float]) -> Drafter:
        """Return a drafter.

        Args:
            name: "prompts", or one whose trees are settled beforehand, of `foretell.drafters.fixed_prompts`.
            eos_ids: tokens below which nothing is drafted.
            pass_s: T(1), T(2), …, by which trees are settled.
        """
        if name not in RULES:
            return PromptsDrafter(self.tokens, self.vocab_size, eos_ids=eos_ids)
        trees = RULES[name](self.tokens, pass_s)
        return FixedPromptsDrafter(self.tokens, trees, self.vocab_size, name, eos_ids=eos_ids)


def prompts_home(fingerprint: str) -> Path:
    """Return where prompt tokens trained on this machine are kept for a target."""
    return cache_home() / "prompts" / fingerprint[:16]


def write_prompts(
    folder: Path,
    tensors: Mapping[str, Tensor],
    kept_ids: NDArray[np.int64],
    ranks: GuessRanks,
    *,
    fingerprint: str,
    card: str,
    provenance: Mapping[str, Any],
) -> None:
    """Write prompt tokens, each file whole or not at all.

    Args:
        folder: gets `config.json`, `prompts.safetensors`, `README.md` and `provenance.json`.
        tensors: `embeddings` [C, m, E], and what a sampler, a prefix or adapters weigh; stored as bfloat16.
        kept_ids: int64 [K], the ids that the sampler guesses; left out where there is none.
        ranks: how good the guesses were on text that was held out.
        fingerprint: the target's, see `foretell.models.fingerprint`.
        card: Markdown.
        provenance: command, recipe, text, versions, scores.

    Raises:
        ConfigError: the folder cannot be written.
    """
    stored = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    stored["ranks"] = torch.from_numpy(ranks.counts.astype(np.int32))
    if "sampler.out.weight" in tensors:
        stored["kept_ids"] = torch.from_numpy(kept_ids.astype(np.int32))
    document = {"format_version": FORMAT, "fingerprint": fingerprint}
    write_artefact(folder, WEIGHTS, stored, document, card=card, provenance=provenance)


def is_prompts(folder: Path) -> bool:
    """Return whether a folder holds trained prompt tokens."""
    return (folder / WEIGHTS).is_file()


def read_prompts(folder: Path, target: Target) -> PromptTokens:
    """Load prompt tokens beside their target, of whose head a sampler takes rows.

    Raises:
        ModelError: they are missing, damaged, or of another target.
    """
    known = _read_fingerprint(folder)
    if known != target.fingerprint:
        raise ModelError(
            f"prompt tokens {folder} were trained for target {known[:16]}, this one is {target.fingerprint[:16]}, "
            f"another model or fine-tuned since: {REMEDY}"
        )
    stored = read_tensors(folder / WEIGHTS, REMEDY)
    try:
        _check_numbers(stored)
        ranks = _read_ranks(stored["ranks"])
        embeddings = stored["embeddings"].to(target.device, target.dtype)  # [C, m, E]
        shape = (max(1, len(embeddings)), ranks.num_slots, target.config.hidden_size)
        if embeddings.shape != shape:
            raise ValueError(f"embeddings {tuple(embeddings.shape)} instead of {shape}")
        has_sampler = any(name.startswith("sampler.") for name in stored)
        return PromptTokens(
            embeddings,
            ranks,
            _read_sampler(stored, target) if has_sampler else None,
            _read_prefix(stored["prefix"], target) if "prefix" in stored else None,
            _read_adapters(stored, target),
        )
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / WEIGHTS} does not hold what prompt tokens need ({error}): {REMEDY}") from None


def load_prompts(
    prompts: str | Path | None, target: Target, notify: Callable[[str], None] | None = None
) -> LoadedPrompts | None:
    """Return the prompt tokens of a target; None where there are none, or none are wanted.

    Args:
        prompts: a folder by `foretell train prompts`, "none", or None for what was trained here or ships.
        target: what they must fit.
        notify: called with what is wrong with prompt tokens that were not asked for, in one line.

    Raises:
        ModelError: those that were asked for are missing, damaged, or of another target.
        ConfigError: passes are to be compiled, and these run in eager ones only.
    """

    def read(folder: Path) -> LoadedPrompts:
        tokens = read_prompts(folder, target)
        if tokens.adapters and target.is_compiled:
            raise ConfigError(f"{eager_only(folder)}: leave `compile` out, or use `prompts`='none' (`--prompts none`)")
        return LoadedPrompts(tokens=tokens, source=str(folder), vocab_size=target.config.vocab_size)

    if prompts == NONE:
        return None
    if prompts is not None:
        return read(_given_folder(prompts))
    for folder in _homes(target.fingerprint):
        try:
            if is_prompts(folder) and _read_fingerprint(folder) == target.fingerprint:
                return read(folder)
        except ModelError as error:
            if notify is not None:
                notify(str(error))
    return None


def has_prompts(fingerprint: str) -> bool:
    """Return whether prompt tokens were trained here or ship for a target."""
    for folder in _homes(fingerprint):
        with suppress(ModelError):
            if is_prompts(folder) and _read_fingerprint(folder) == fingerprint:
                return True
    return False


def _given_folder(prompts: str | Path) -> Path:
    """Return the folder that was asked for.

    Raises:
        ModelError: it is no folder, or a draft's.
    """
    if not str(prompts):
        raise ModelError("`prompts` (`--prompts`) is empty: give a folder by `foretell train prompts`, or 'none'")
    folder = Path(prompts)
    if folder.is_file():
        raise ModelError(f"{folder} is a file, `prompts` (`--prompts`) takes a folder: name that it lies in")
    if is_draft(folder) and not is_prompts(folder):
        raise ModelError(f"{folder} holds a draft model, no prompt tokens: give it as `draft` (`--draft`)")
    return folder


def eager_only(folder: Path) -> str:
    """Return what is said of prompt tokens that compiled passes cannot run, without the remedy."""
    return f"prompt tokens {folder} have low-rank additions, which run in eager passes only, not with `compile`"


def _homes(fingerprint: str) -> list[Path]:
    return [prompts_home(fingerprint), *sorted(SHIPPED.glob(f"*/{_FOLDER}"))]


def _check_numbers(stored: Mapping[str, Tensor]) -> None:
    """Raise where ids or counts are no whole numbers, or weights are not finite ones.

    Raises:
        ValueError: they are not.
    """
    for name, tensor in stored.items():
        is_whole = name in ("ranks", "kept_ids")
        if tensor.dtype not in ((torch.int32, torch.int64) if is_whole else (torch.bfloat16, torch.float32)):
            raise ValueError(f"{name} as {str(tensor.dtype).removeprefix('torch.')}")
        if not is_whole and not tensor.isfinite().all():
            raise ValueError(f"{name} that is not finite")


def _read_ranks(stored: Tensor) -> GuessRanks:
    counts = stored.numpy().astype(np.int64)  # [R + 1] * m
    if len(set(counts.shape)) != 1 or len(counts) < 2:
        raise ValueError(f"ranks {counts.shape}")
    if counts.ndim > MAX_SLOTS:
        raise ValueError(f"{counts.ndim} slots, {MAX_SLOTS} at most")
    if counts.min() < 0 or counts.max() > MAX_COUNT:
        raise ValueError(f"ranks from {counts.min()} to {counts.max()}")
    return GuessRanks(counts)


def _read_sampler(stored: Mapping[str, Tensor], target: Target) -> Sampler:
    width, inner = target.config.hidden_size, stored["sampler.mix.bias"].numel()
    shapes = {"mix.weight": (inner, 2 * width), "mix.bias": (inner,), "out.weight": (width, inner)}
    for name, shape in shapes.items():
        _check_shape(stored, f"sampler.{name}", shape)
    kept_ids = stored["kept_ids"].long()  # [K]
    _check_shape(stored, "kept_ids", (kept_ids.numel(),))
    if not (kept_ids.diff() > 0).all() or int(kept_ids[0]) < 0 or int(kept_ids[-1]) >= target.config.vocab_size:
        raise ValueError("kept ids")
    with WeightReader(target.folder) as reader:
        embedding_name, head_name = shared_names(reader, target.config)
        embedding = reader.get_mapped(embedding_name).to(target.device)  # [V, E]
        head = reader.get(head_name)[kept_ids]  # [K, E]
    return Sampler(stored, embedding, head, kept_ids.numpy(), target.dtype, target.device)


def _read_prefix(stored: Tensor, target: Target) -> Tensor:
    """Return keys and values in the target's dtype, [L, 2 * G, P, D]."""
    config = target.config
    shape = (config.num_layers, 2 * config.num_kv_heads, stored.shape[2], config.head_dim)
    if stored.shape != shape or not 1 <= stored.shape[2] <= MAX_PREFIX:
        raise ValueError(f"prefix {tuple(stored.shape)}")
    return stored.to(target.device, target.dtype)  # [L, 2 * G, P, D]


def _read_adapters(stored: Mapping[str, Tensor], target: Target) -> dict[int, LayerAdapters]:
    """Return low-rank additions by layer; some layers may have none, and none has but a few."""
    config = target.config
    weights = {name: tensor.to(target.device, target.dtype) for name, tensor in stored.items() if "lora." in name}
    layers = {int(name.split(".")[1]) for name in weights}
    if not layers <= set(range(config.num_layers)):
        raise ValueError(f"layer {max(layers)}, the last is {config.num_layers - 1}")
    for layer in layers:
        for name, (num_out, num_in) in linear_shapes(config).items():
            rank = max(1, len(weights[f"lora.{layer}.{name}.down"]))
            _check_shape(weights, f"lora.{layer}.{name}.down", (rank, num_in))
            _check_shape(weights, f"lora.{layer}.{name}.up", (num_out, rank))
    return {layer: LayerAdapters.read(weights, f"lora.{layer}.") for layer in layers}


def _check_shape(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Raise where a tensor has another shape.

    Raises:
        ValueError: it has.
    """
    if tensors[name].shape != shape:
        raise ValueError(f"{name} {tuple(tensors[name].shape)} instead of {shape}")


def _read_fingerprint(folder: Path) -> str:
    path = folder / CONFIG
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}: give one by `foretell train prompts`")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version, fingerprint = document["format_version"], str(document["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{path} is missing or damaged: {REMEDY}") from None
    if version != FORMAT:
        raise ModelError(f"{path} has format {version}, this version reads {FORMAT}: {REMEDY}")
    return fingerprint
