"""Choose the target's next token at one node, the same whether a draft or plain decoding led there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretell.errors import NumericsError
from foretell.params import SamplingParams
from foretell.result import TokenLogprobs
from foretell.verify.constraint import Constraint
from foretell.verify.filters import keep_top_k
from foretell.verify.noise import gumbel_noise_array, loud_ids
from foretell.verify.processors import Law, Processors
from foretell.verify.scores import Indices, Scores, read_scores

# Nats below the best score that make a token one of the head in `_race_all`: a few ids in the rows of a language model.
_HEAD_NATS = 2.0


class TokenChooser:
    """Draws the tokens of one sequence, one row of logits at a time; keeps no state that decides.

    A token is a function of the row, the tokens before it and (seed, sequence key): no generator is consumed, so rows
    of a draft tree can be visited in any number and order.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        eos_ids: Iterable[int],
        seed: int | None,
        sequence_key: int,
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        """Check `params` against the vocabulary.

        Args:
            params: what the caller asks; its `seed` and `n` are not read.
            num_prompt_tokens: how many of each context's first tokens are the prompt.
            eos_ids: the model's EOS ids.
            seed: key of the noise, at least 0; None only when greedy.
            sequence_key: number of the sample or branch, which has noise of its own.
            vocab_size: number of valid ids; rows may be wider.
            constraint: of this sequence, where `params` ask for one.

        Raises:
            ConfigError: an id in `logit_bias`, `bad_words_ids` or `stop_token_ids` is not below `vocab_size`.
        """
        assert params.is_greedy or seed is not None
        self.vocab_size = vocab_size
        self._processors = Processors(
            params,
            num_prompt_tokens=num_prompt_tokens,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
            constraint=constraint,
        )
        self._is_greedy = params.is_greedy
        self._seed = 0 if seed is None else seed
        self._sequence_key = sequence_key

    @property
    def is_raw_argmax(self) -> bool:
        """Whether `choose` is the plain argmax of the row, so that `argmax_rows` may serve many rows at once."""
        return self._is_greedy and not self._processors.has_edits

    def choose(self, logits: Tensor, context_ids: Sequence[int]) -> int:
        """Return the token that follows `context_ids`: the best one when greedy (the first among equals), else a draw.

        Args:
            logits: the row [V] (or wider) that the model computed for the last of `context_ids`; left as it is.
            context_ids: prompt, output and draft path; their number is the new token's position.

        Raises:
            NumericsError: the row holds NaN or +inf, or no token is left to choose from.
        """
        if self._is_greedy:
            return int(self._processors.edit(logits, context_ids).argmax())
        candidates = self._processors.candidates(logits, context_ids)
        position = len(context_ids)
        if candidates.ids is None:
            return self._race_all(candidates.scores, position)
        return self._race(candidates.ids, candidates.scores, position).token_id

    def argmax_rows(self, logits: Tensor) -> list[int]:
        """Return what `choose` returns for each row of `logits` [N, V] (or wider); only where `is_raw_argmax`.

        Raises:
            NumericsError: a row holds NaN or +inf, or everything in it is -inf.
        """
        assert self.is_raw_argmax
        rows = logits[:, : self.vocab_size].detach().float()  # [N, V]
        if rows.device.type == "cpu":
            token_ids = torch.from_numpy(rows.numpy().argmax(axis=1))  # [N], torch takes 14 times as long
        else:
            token_ids = rows.argmax(dim=1)  # [N]
        if not bool(rows.gather(1, token_ids[:, None]).isfinite().all()):
            raise NumericsError("a row of logits from the model has no finite best token: try float32")
        chosen: list[int] = token_ids.tolist()
        return chosen

    def law(self, logits: Tensor, context_ids: Sequence[int]) -> Law:
        """Return the distribution that `choose` draws from; takes and raises the same."""
        return self._processors.law(logits, context_ids)

    def logprobs(self, logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
        """Return log-probabilities under the model's own distribution, no sampling parameter applied.

        Args:
            logits: the row [V] (or wider).
            token_id: the emitted token.
            top: how many of the most likely tokens to report beside it; among equals the smaller id comes first.

        Raises:
            NumericsError: the row holds NaN or +inf, or everything in it is -inf.
        """
        scores = read_scores(logits, self.vocab_size)  # [V]
        best = float(scores.max())
        log_total = best + float(np.log(np.exp(scores - best).sum(dtype=np.float64)))
        head = keep_top_k(scores, top) if top else np.arange(0)  # [K], ascending; more than `top` where some are equal
        head = head[np.argsort(-scores[head], kind="stable")[:top]]  # [top]
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(scores[token_id]) - log_total,
            top=tuple((int(other), float(scores[other]) - log_total) for other in head),
        )

    def _race(self, ids: Indices, scores: Scores, position: int) -> _Winner:
        """Return the best of `scores` plus noise, [K]: a draw from their softmax."""
        noisy = scores + gumbel_noise_array(self._seed, self._sequence_key, position, ids)  # [K]
        winner = int(noisy.argmax())
        return _Winner(token_id=int(ids[winner]), score=float(noisy[winner]))

    def _race_all(self, scores: Scores, position: int) -> int:
        """Return what `_race` returns for all ids, [V], without computing the noise of each.

        Below the head no score exceeds `ceiling`, so only ids whose noise makes up the difference can still win.

        Cost: 0.15 ms for V = 49,152 (one core), where noise for all takes 0.25 ms, and 1 ms with what it allocates.
        """
        ceiling = float(scores.max()) - _HEAD_NATS
        head = np.flatnonzero(scores >= np.float32(ceiling))  # [K]
        first = self._race(head, scores[head], position)
        rest = loud_ids(self._seed, self._sequence_key, position, len(scores), first.score - ceiling)  # [M]
        if len(rest) == 0:
            return first.token_id
        second = self._race(rest, scores[rest], position)
        return second.token_id if second.score > first.score else first.token_id


@dataclass(frozen=True, slots=True)
class _Winner:
    token_id: int
    score: float
