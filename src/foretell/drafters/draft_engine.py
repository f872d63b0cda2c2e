"""A loaded draft model with its cache, shared by every sequence that drafts with it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from foretell.drafters.calibration import Calibration
from foretell.drafters.prompt_tokens import PromptTokens
from foretell.models.draft import DraftModel
from foretell.passes.rows import visible_slots
from foretell.passes.runner import CompiledPass, Runner
from foretell.tree.shape import prune
from foretell.tree.token_tree import TokenTree

_SLOT_GRAIN: Final = 128
"""Slots that a pass reads at a time, as compiled passes need: a draft's bits need not equal another pass's."""

_WIDTHS: Final = (1, 2, 4, 8)
"""Nodes that a pass may read; of those that cost the same rows, the most."""

_RETRY_STAGE: Final = 8
"""Steps without a second stage before one is made again."""

_DEEPER: Final = 0.3
"""What a node brings that no pass would have read, in passes: less than 1, or one would have."""

_RETRY_AFTER: Final = 16
"""Steps without the draft model before it is asked again."""


class DraftEngine:
    """Runs a draft model, and learns what its passes cost and bring.

    Args:
        model: the draft.
        context_tokens: positions that a sequence may have; at most the model's.
        calibration: acceptance estimates, the object that the target's engine teaches.
        compiled: passes compiled for a few row counts; larger ones run eagerly.
        prompts: prompt tokens of the draft model.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: DraftModel,
        context_tokens: int,
        calibration: Calibration,
        compiled: CompiledPass | None = None,
        prompts: PromptTokens | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.calibration, self.clock = model, calibration, clock
        self.context_tokens = min(context_tokens, model.config.max_positions)
        self.runner = Runner(model, self.context_tokens, compiled, slot_grain=_SLOT_GRAIN)
        self.kept: frozenset[int] = frozenset(model.kept_ids.tolist())
        self.widths = tuple({self.runner.padded(width): width for width in _WIDTHS}.values())
        self._weight_bytes = model.num_bytes
        self.prompts, self.guess_s = prompts, Mean(5e-4, decay=0.9)
        """Prompt tokens, and the seconds that a guess by them takes."""
        if prompts is not None:
            prompts.install(self.runner)
        self.pass_times = PassTimes()
        self._learned = {is_sampled: Learned() for is_sampled in (False, True)}

    def learned(self, *, is_sampled: bool) -> Learned:
        """Return what greedy drafts have taught, or those for sampled text."""
        return self._learned[is_sampled]

    def pass_s(self, num_rows: int) -> float:
        """Return the seconds that a pass of so many rows is expected to take."""
        return self.pass_times.expect(self.runner.padded(num_rows))

    def record(self, num_rows: int, seconds: float) -> None:
        """Take in what a pass of so many rows took."""
        self.pass_times.record(self.runner.padded(num_rows), seconds)

    def pass_bytes(self, num_slots: int, num_rows: int) -> int:
        """Return the bytes of weights, keys and values that a pass reads whose rows follow `num_slots` slots."""
        last = num_slots + self.runner.padded(num_rows)
        return self._weight_bytes + visible_slots(last, _SLOT_GRAIN) * self.runner.cache.shape.slot_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and of all sequences' keys and values."""
        return self._weight_bytes + self.runner.cache.num_bytes


class Mean:
    """A mean that forgets: it starts at a guess, and each value leaves `decay` of what was before."""

    def __init__(self, start: float, decay: float) -> None:
        self.value, self._decay = start, decay

    def add(self, value: float) -> None:
        self.value += (1.0 - self._decay) * (value - self.value)

    def copy(self) -> Mean:
        return Mean(self.value, self._decay)


class Learned:
    """What drafts have taught of what reading brings."""

    def __init__(self) -> None:
        self.best_child = Mean(0.6, decay=0.99)
        """Acceptance of the best child of a node that was read, given that node's."""
        self.best_guess = Mean(0.4, decay=0.99)
        """The same of the best guess of a prompt token below a node that was not read."""
        self.asking = AskingPayoff()
        self.stages: defaultdict[str, StagePayoff] = defaultdict(StagePayoff)
        """By the drafter's name."""


class PassTimes:
    """Seconds of a draft pass by its rows, host time included: a decayed mean for 1, 2, 3, 4, 8, 12, … rows."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def record(self, num_rows: int, seconds: float) -> None:
        """Take in what a pass took; one that was interrupted counts twice the mean at most."""
        mean = self._means.setdefault(_bucket(num_rows), Mean(seconds, decay=0.9))
        mean.add(min(seconds, 2.0 * mean.value))

    def expect(self, num_rows: int) -> float:
        """Return the least mean of as many rows or more; where none were measured, the largest pass's; 0 for none."""
        bucket = _bucket(num_rows)
        measured = [mean.value for size, mean in self._means.items() if size >= bucket]
        if measured:
            return min(measured)
        return self._means[max(self._means)].value if self._means else 0.0


class StagePayoff:
    """Which nodes of a second stage's tree are worth their rows, and whether making such trees is worth its time.

    A node that the draft's own walk meets saves a pass, as long as passes would be read: steps that met none tell how
    many that are. Nodes beyond only make a tree deeper. How many will be met is what the tree's estimates say, times
    how far earlier ones held. All are decayed means. A step that makes no tree is followed by a trial after
    `_RETRY_STAGE` more.
    """

    def __init__(self) -> None:
        self._num_met, self._num_expected = Mean(0.5, decay=0.98), Mean(0.5, decay=0.98)
        self._num_wanted = Mean(0.5, decay=0.98)
        self._gain_s, self._making_s = Mean(1e-3, decay=0.9), Mean(0.0, decay=0.9)
        self._num_waited = 0

    def is_due(self) -> bool:
        """Return whether this step should make a tree."""
        self._num_waited += 1
        if self._gain_s.value < self._making_s.value and self._num_waited <= _RETRY_STAGE:
            return False
        self._num_waited = 0
        return True

    def choose(self, tree: TokenTree, making_s: float, num_rows: int, pass_s: Callable[[int], float]) -> TokenTree:
        """Return the first nodes of a tree, those that save the most seconds.

        Args:
            tree: by `stage`, likelier nodes first.
            making_s: what it took.
            num_rows: rows of the pass without it.
            pass_s: seconds of a pass by its rows.
        """
        held = self._num_met.value / max(self._num_expected.value, 1e-3)
        plain_s, saved_s = pass_s(num_rows), pass_s(1)
        num_met, best_s, best_size = 0.0, 0.0, 1
        for size, log_accept in enumerate(tree.log_accept[1:], start=1):
            num_met += held * math.exp(log_accept)
            num_saved = min(num_met, self._num_wanted.value) + _DEEPER * max(0.0, num_met - self._num_wanted.value)
            gain_s = num_saved * saved_s - (pass_s(num_rows + size) - plain_s)
            if gain_s >= best_s:  # of equals the larger: where nothing is known of times, all are read
                best_s, best_size = gain_s, size + 1
        self._gain_s.add(best_s)
        self._making_s.add(making_s)
        return prune(tree, best_size)

    def record(self, tree: TokenTree, num_met: int, num_more: int) -> None:
        """Take in a step.

        Args:
            tree: what was staged; the root alone where nothing was.
            num_met: its nodes that the draft's own walk met.
            num_more: passes that were read after it.
        """
        if len(tree) > 1:
            self._num_met.add(num_met)
            self._num_expected.add(sum(map(math.exp, tree.log_accept[1:])))
        if num_met == 0:
            self._num_wanted.add(num_more)


class AskingPayoff:
    """Whether asking the draft model pays where other drafters have proposed: by how many tokens those promise, and by
    what a pass of the target costs, which is less for a sequence that shares it.

    The gain is that of expected tokens per second, drafting time included. Where it did not pay, every
    `_RETRY_AFTER`th step asks nevertheless.
    """

    def __init__(self) -> None:
        self._gains: dict[tuple[int, int], Mean] = {}
        self._num_waited: dict[tuple[int, int], int] = {}

    def is_due(self, num_tokens: float, pass_s: float) -> bool:
        """Return whether this step should ask; as it is it is expected to bring so many tokens at this price."""
        bucket = self._bucket_of(num_tokens, pass_s)
        gain = self._gains.get(bucket)
        self._num_waited[bucket] = self._num_waited.get(bucket, 0) + 1
        if gain is not None and gain.value < 1.0 and self._num_waited[bucket] <= _RETRY_AFTER:
            return False
        self._num_waited[bucket] = 0
        return True

    def record(self, num_tokens: float, pass_s: float, gain: float) -> None:
        """Take in the factor by which asking raised the expected tokens per second of such a step."""
        self._gains.setdefault(self._bucket_of(num_tokens, pass_s), Mean(1.02, decay=0.9)).add(gain)

    def _bucket_of(self, num_tokens: float, pass_s: float) -> tuple[int, int]:
        return min(int(4 * (num_tokens - 1)), 16), round(2 * math.log2(pass_s))


def _bucket(num_rows: int) -> int:
    return num_rows if num_rows <= 4 else -(-num_rows // 4) * 4
