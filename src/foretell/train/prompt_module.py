"""What is trained of prompt tokens, and by which recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import ConfigError
from foretell.hardware.prompt_rows import MAX_SLOTS
from foretell.models.config import ModelConfig
from foretell.models.llama import LayerAdapters, linear_shapes
from foretell.models.sampler import sampler_inputs

Capacity = Literal["embeddings", "prefix", "sampler", "prefix+sampler", "lora", "lora+sampler"]
"""What is trained besides the prompt tokens: keys and values that they alone see, low-rank additions to the target's
layers for their rows, a residual block between their states and the guesses, or several of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecipe:
    """How to train; all that decides what comes out, but the text."""

    capacity: Capacity = "sampler"
    num_slots: int = 3
    """Prompt tokens of a chain."""
    num_chains: int = 1
    """Chains behind a place, of which the states are averaged: the paper's ensembles."""
    num_prefix: int = 16
    """Slots of a prefix, of which keys are not rotated."""
    lora_rank: int = 16
    lora_layers: int = 0
    """Layers with low-rank additions, the last ones; 0 means all."""
    num_kept: int = 5120
    """Most ids that a sampler guesses; its share of the head is read for every guess."""
    num_epochs: float = 1.5
    batch_size: int = 4
    num_anchors: int = 64
    """Places of a text in a step."""
    learning_rate: float = 0.3
    """Of the embeddings, in units of the root mean square of the target's embedding."""
    sampler_learning_rate: float = 1e-3
    prefix_learning_rate: float = 1e-2
    sharpness: float = 0.3
    seed: int = 0

    @property
    def has_prefix(self) -> bool:
        """Whether keys and values are trained that prompt tokens alone see."""
        return "prefix" in self.capacity

    @property
    def has_lora(self) -> bool:
        """Whether low-rank additions to the target's layers are trained, for the rows of prompt tokens."""
        return "lora" in self.capacity

    @property
    def has_sampler(self) -> bool:
        """Whether a block is trained between prompt tokens and guesses."""
        return "sampler" in self.capacity

    def __post_init__(self) -> None:
        if self.capacity not in get_args(Capacity):
            raise ConfigError(f"there is no capacity {self.capacity!r}: choose one of {', '.join(get_args(Capacity))}")
        for name, limit in (("num_slots", MAX_SLOTS), ("num_chains", 16)):
            if not 1 <= getattr(self, name) <= limit:
                raise ConfigError(f"`{name}` must be from 1 to {limit}, got {getattr(self, name)}")
        if not 0 < self.num_epochs <= 1000:
            raise ConfigError(f"`epochs` must be above 0, got {self.num_epochs}; 1,000 at most")

    def check_for_draft(self) -> None:
        """Refuse what the drafter that uses a draft model's own prompt tokens would not read, `staged+prompts`.

        Raises:
            ConfigError: there is no sampler, there are low-rank additions, or more than one slot or chain.
        """
        if not self.has_sampler or self.has_lora:
            raise ConfigError(
                f"`capacity`={self.capacity!r} is of no use with `draft`, whose prompt tokens guess through a sampler "
                "in compiled passes too: take sampler or prefix+sampler"
            )
        for name, number in (("slots", self.num_slots), ("ensemble", self.num_chains)):
            if number > 1:
                raise ConfigError(
                    f"`{name}`={number} is of no use with `draft`, behind whose nodes one prompt token rides: "
                    f"leave `--{name}` out, or give 1"
                )


class PromptModule(nn.Module):
    """What is trained.

    Args:
        recipe: its capacity, slots and chains.
        config: the target's.
        mean: the mean of the embeddings of the kept ids, where all prompt tokens begin, [E].
        scale: root mean square of the target's embedding.
    """

    def __init__(self, recipe: PromptRecipe, config: ModelConfig, mean: Tensor, scale: float) -> None:
        super().__init__()
        width = len(mean)
        noise = torch.randn(recipe.num_chains, recipe.num_slots, width) * (0.1 * scale)  # [C, m, E]
        self.embeddings = nn.Parameter(mean.float() + noise)
        self.mix = self.out = None
        self.prefix = None
        if recipe.has_prefix:
            shape = (config.num_layers, 2 * config.num_kv_heads, recipe.num_prefix, config.head_dim)
            self.prefix = nn.Parameter(0.1 * torch.randn(shape))  # [L, 2 * G, P, D]
        self.lora = nn.ParameterDict()
        if recipe.has_lora:
            first = 0 if recipe.lora_layers == 0 else max(0, config.num_layers - recipe.lora_layers)
            for layer in range(first, config.num_layers):
                for name, (num_out, num_in) in linear_shapes(config).items():
                    self.lora[f"{layer}:{name}:down"] = nn.Parameter(
                        torch.randn(recipe.lora_rank, num_in) * num_in**-0.5
                    )
                    self.lora[f"{layer}:{name}:up"] = nn.Parameter(torch.zeros(num_out, recipe.lora_rank))
        if recipe.has_sampler:
            self.mix, self.out = nn.Linear(2 * width, width), nn.Linear(width, width, bias=False)
            nn.init.zeros_(self.out.weight)

    def guess(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the states that the head reads, [..., E], from those of prompt rows and the tokens before guesses."""
        if self.mix is None or self.out is None:
            return states
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=states.dtype == torch.bfloat16):
            inputs = sampler_inputs(states.float(), before.float())  # [..., 2 * E]
            refined: Tensor = self.out(F.silu(self.mix(inputs)))  # [..., E]
            return states + refined.to(states.dtype)

    def adapters(self, dtype: torch.dtype) -> dict[int, LayerAdapters]:
        """Return the layers' low-rank additions, through which gradients pass."""
        tensors = {f"lora.{name.replace(':', '.')}": each.to(dtype) for name, each in self.lora.items()}
        layers = {int(name.split(":")[0]) for name in self.lora}
        return {layer: LayerAdapters.read(tensors, f"lora.{layer}.") for layer in layers}

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by the names that `Sampler` reads."""
        tensors = {"embeddings": self.embeddings.detach()}
        if self.prefix is not None:
            tensors["prefix"] = self.prefix.detach()
        tensors |= {f"lora.{name.replace(':', '.')}": each.detach() for name, each in self.lora.items()}
        if self.mix is not None and self.out is not None:
            tensors["sampler.mix.weight"], tensors["sampler.mix.bias"] = (
                self.mix.weight.detach(),
                self.mix.bias.detach(),
            )
            tensors["sampler.out.weight"] = self.out.weight.detach()
        return tensors
