"""One sequence as a draft model reads it: its slots, what it has read, and what stands beside the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from foretell.cache.kv_cache import Region
from foretell.drafters.draft_engine import DraftEngine
from foretell.passes.rows import Rows
from foretell.passes.runner import MAX_ROWS
from foretell.result import DraftWork
from foretell.tree.pack import ancestor_bits, unpack_bits
from foretell.tree.token_tree import TokenTree, depths

_CHUNK_ROWS: Final = 256
"""Rows of a prefill chunk."""

_MAX_CATCH_UP: Final = 16
"""Tokens that a pass may read beside the tip and what is below it; more are read by passes of their own."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a pass of the draft model found."""

    logits: Tensor
    """After each node that was read, [N, K]."""
    prompted: Tensor | None
    """Final states of the prompt tokens behind the first of them, [P, E]; None for none."""


class DraftReader:
    """Runs the draft model over a text, which is kept, and over nodes below the text, which are given back.

    Between proposals the region holds keys and values of the text's first tokens; nothing but the text is kept.

    Args:
        engine: the draft model.
    """

    def __init__(self, engine: DraftEngine) -> None:
        self.engine, self.work = engine, DraftWork()
        self.text: list[int] = []
        self._region: Region | None = None
        self._features: list[Tensor] = []  # of the last tokens of the text, [*, E] each; none where none are read
        self._ahead_features: Tensor | None = None  # [K, E]
        self._num_below = 0  # slots of nodes below the tip

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Read a prompt but for its last token; `hidden` are the states of the last tokens before that one."""
        self.close()
        self.text, self._ahead_features = list(prompt_ids), None
        if not self.is_exhausted:
            self._region = self.engine.runner.cache.allocate(len(prompt_ids) + MAX_ROWS)
            self._remember(len(prompt_ids), hidden)
            self._read_text(self._region, len(prompt_ids) - 1)
        self.work = DraftWork()

    def extend(self, token_ids: Sequence[int], hidden: Tensor | None, ahead_hidden: Tensor | None) -> None:
        """Take in what was emitted; it is read before the next draft."""
        self.text.extend(token_ids)
        if self.is_exhausted:
            self.close()
        elif token_ids:
            self._remember(len(token_ids), hidden)
            self._ahead_features = ahead_hidden

    @property
    def is_exhausted(self) -> bool:
        """Whether the text is longer than the draft's context."""
        return len(self.text) > self.engine.context_tokens

    def depth_left(self, num_ahead: int) -> int:
        """Return how many levels of nodes, the tip's own included, may be read below the text and tokens ahead."""
        return 0 if self._region is None else max(0, self.engine.context_tokens - len(self.text) - num_ahead + 1)

    def num_unread(self, num_ahead: int) -> int:
        """Return the rows that reading the tip takes."""
        return max(1, len(self.text) - self.region.length) + num_ahead

    @property
    def region(self) -> Region:
        """The sequence's slots; only where the text is not exhausted."""
        assert self._region is not None
        return self._region

    def read_tip(self, ahead: Sequence[int], tree: TokenTree, num_prompted: int = 0) -> Read:
        """Read what is unread of the text, tokens ahead of it, and a tree below the last of them, in one pass.

        The tip and each node of the tree are read; a prompt token rides behind the first `num_prompted` of them.
        """
        cache, region = self.engine.runner.cache, self.region
        cache.truncate(region, min(region.length, len(self.text) - 1))  # an earlier proposal may have read the root
        cache.reserve(region, len(self.text) + len(ahead) + MAX_ROWS)
        if len(self.text) - region.length > _MAX_CATCH_UP:
            self._read_text(region, len(self.text) - 1)
        rows = self._tip_rows(region, ahead, tree, num_prompted)
        self._num_below = len(tree) - 1
        self._features = [features[-1:] for features in self._features]  # the root's, should it be read again
        return self._run(rows, len(tree), num_prompted)

    def read_nodes(
        self, token_ids: Sequence[int], depths: Sequence[int], seen: Sequence[int], num_prompted: int = 0
    ) -> Read:
        """Read nodes below the tip, each in the next slot.

        Args:
            token_ids: the nodes'.
            depths: their distances from the tip.
            seen: for each a bit for every slot below the tip that it sees, its own included.
            num_prompted: the first of them, behind which a prompt token rides.
        """
        before = 1 + self._num_below  # slots from the tip to these rows
        self._num_below += len(token_ids)
        num_columns = self._num_below + num_prompted
        bits = [*seen, *(seen[node] | 1 << self._num_below + node for node in range(num_prompted))]
        rows = Rows(
            self.region,
            [*token_ids, *[self._prompt_id] * num_prompted],
            [depth - before for depth in (*depths, *(depth + 1 for depth in depths[:num_prompted]))],
            unpack_bits(bits, num_columns),
            self._beside_tokens(len(token_ids) + num_prompted),
        )
        return self._run(rows, len(token_ids), num_prompted)

    def rewind(self) -> None:
        """Give back the slots of all that is not text."""
        self.engine.runner.cache.truncate(self.region, len(self.text))

    def fork(self) -> DraftReader:
        """Return an independent copy, between proposals; its `work` starts at 0."""
        twin = DraftReader(self.engine)
        if self._region is not None:
            twin._region = self.engine.runner.cache.fork(self._region)
        twin.text, twin._features = self.text.copy(), self._features.copy()
        twin._ahead_features = self._ahead_features
        return twin

    def close(self) -> None:
        """Give all slots back, zeroed: a NaN in one would reach whoever gets them next."""
        if self._region is not None:
            cache = self.engine.runner.cache
            cache.wipe(self._region)
            cache.free(self._region)
        self._region, self._features = None, []

    # Passes

    @property
    def _prompt_id(self) -> int:
        return self.engine.model.config.vocab_size

    def _run(self, rows: Rows, num_nodes: int, num_prompted: int) -> Read:
        """Run a pass, and keep its rows for the time being, those of prompt tokens at its end excepted."""
        num_rows = len(rows.token_ids)
        output = self.engine.runner.decode([rows])
        self._count(rows.region.length, num_rows)
        num_kept = num_rows - num_prompted
        self.engine.runner.cache.commit(rows.region, num_kept)
        logits = output.logits[0][num_kept - num_nodes : num_kept]  # [N, K]
        return Read(logits, output.hidden[0][num_kept:num_rows] if num_prompted else None)  # [P, E]

    def _read_text(self, region: Region, end: int) -> None:
        """Read the text before position `end`."""
        while region.length < end:
            start, stop = region.length, min(region.length + _CHUNK_ROWS, end)
            features = self._features_from(start)
            known = None if features is None else features[: stop - start]  # [N, E]
            rows = Rows.chain(region, self.text[start:stop], known)
            self._count(start, stop - start)
            self.engine.runner.prefill(rows)

    def _tip_rows(self, region: Region, ahead: Sequence[int], tree: TokenTree, num_prompted: int) -> Rows:
        start = region.length
        chain = [*self.text[start:], *ahead]
        token_ids, tip = chain + tree.token_ids[1:] + [self._prompt_id] * num_prompted, len(chain) - 1
        parents = [*range(-1, tip), *(tip + parent for parent in tree.parents[1:])]
        parents += range(tip, tip + num_prompted)
        features = self._features_from(start)
        if features is not None:
            known = features[:0] if self._ahead_features is None else self._ahead_features[: len(ahead)].to(features)
            unknown = self._beside_tokens(len(token_ids) - len(features) - len(known))
            assert unknown is not None
            features = torch.cat((features, known, unknown))  # [N, E]
        mask = unpack_bits(ancestor_bits(parents), len(parents))
        return Rows(region, token_ids, depths(parents), mask, features)

    def _count(self, num_slots: int, num_rows: int) -> None:
        self.work.num_passes += 1
        self.work.num_rows += num_rows
        self.work.num_bytes += self.engine.pass_bytes(num_slots, num_rows)

    # Features

    def _remember(self, num_tokens: int, hidden: Tensor | None) -> None:
        features = self._beside_tokens(num_tokens, hidden)
        if features is not None:
            self._features.append(features)

    def _features_from(self, start: int) -> Tensor | None:
        """Return what stands beside the text from position `start` on, [*, E]."""
        if not self._features:
            return None
        self._features = [torch.cat(self._features)]  # [*, E]
        return self._features[0][start - len(self.text) :]  # [*, E]

    def _beside_tokens(self, num_tokens: int, hidden: Tensor | None = None) -> Tensor | None:
        """Return what stands beside tokens of which the last len(hidden) have a known state before them, [*, E]."""
        no_feature = self.engine.model.no_feature
        if no_feature is None:
            return None
        if hidden is None:
            return no_feature.expand(num_tokens, -1)  # [*, E]
        return torch.cat((no_feature.expand(num_tokens - len(hidden), -1), hidden.to(no_feature)))  # [*, E]
