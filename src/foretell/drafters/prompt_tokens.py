"""Prompt tokens: trained embeddings whose rows, behind any token, guess what follows the next one.

A chain of m prompt tokens rides behind a row of the target's own pass. The state of slot j guesses the token j + 1
places after the row's.

Source: parallel prompt decoding, arXiv:2405.18628 §3.1-3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from torch import Tensor

from foretell.errors import ConfigError
from foretell.hardware.prompt_policy import GuessRanks
from foretell.models.llama import LayerAdapters, Llama
from foretell.models.sampler import Sampler
from foretell.passes.runner import Runner
from foretell.tree.pack import PromptIds


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Trained prompt tokens of a target."""

    embeddings: Tensor
    """[C, m, E] in the target's dtype: chains of an ensemble, and the slots of each."""
    ranks: GuessRanks
    """How good their guesses were on text that was held out."""
    sampler: Sampler | None = None
    prefix: Tensor | None = None
    """[L, 2 * G, P, D]: keys and values that prompt tokens see before all others, in the target's dtype."""

    adapters: Mapping[int, LayerAdapters] = field(default_factory=dict)
    """By layer: low-rank additions for the rows of prompt tokens."""

    def install(self, runner: Runner) -> None:
        """Let a target's passes carry these prompt tokens.

        Raises:
            ConfigError: they have adapters, and the passes are compiled or the target has no place for them.
        """
        runner.prompt_embeddings = self.embeddings.flatten(0, 1)  # [C * m, E]
        runner.prompt_prefix = self.prefix
        runner.adapts_prompts = bool(self.adapters)
        if self.adapters:
            if runner.compiled is not None or not isinstance(runner.model, Llama):
                raise ConfigError(
                    "prompt tokens with low-rank adapters run in eager passes of llama-like models only: drop "
                    "`compile`, give other prompt tokens, or use `prompts`='none'"
                )
            runner.model.adapt(self.adapters)

    @property
    def num_slots(self) -> int:
        """Prompt tokens of a chain, m."""
        return self.embeddings.shape[1]

    @property
    def num_chains(self) -> int:
        """Chains of an ensemble, C."""
        return self.embeddings.shape[0]

    @property
    def num_prefix(self) -> int:
        """Slots of the prefix, P; 0 without one."""
        return 0 if self.prefix is None else self.prefix.shape[2]

    @property
    def digest(self) -> str:
        """Tells these prompt tokens from others."""
        return sha256(self.embeddings.float().cpu().numpy().tobytes()).hexdigest()[:16]

    def ids(self, vocab_size: int) -> PromptIds:
        """Return their ids, behind the vocabulary."""
        return PromptIds(vocab_size, self.num_slots, self.num_chains)

    @property
    def num_bytes(self) -> int:
        """Bytes that they add to the target's."""
        prefix_bytes = 0 if self.prefix is None else self.prefix.nbytes
        adapter_bytes = sum(adapters.num_bytes for adapters in self.adapters.values())
        sampler_bytes = 0 if self.sampler is None else self.sampler.num_bytes
        return self.embeddings.nbytes + prefix_bytes + adapter_bytes + sampler_bytes
