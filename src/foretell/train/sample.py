"""Let a draft model go on where the target wrote, many continuations at once, kept in shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretell.cache.kv_cache import Region
from foretell.errors import ConfigError, InputError
from foretell.models.draft import DraftModel
from foretell.passes.rows import Rows
from foretell.passes.runner import MAX_ROWS, Runner
from foretell.train.examples import Examples
from foretell.train.text import Documents
from foretell.train.whole_file import whole_file

NUM_GIVEN: Final = 2
"""Tokens of the target's text at the start of each sample, so that its first token is the end of a trigram."""

SHARD_DOCUMENTS: Final = 128
"""Documents that a shard continues."""

_BATCH: Final = 4
"""Documents at once, each with up to `MAX_ROWS` continuations."""

_SLOT_GRAIN: Final = 64

_DRAW_BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """What a draft sampled, and what it would rather have said."""

    documents: Documents
    """Each holds the last two tokens of the target's text, and from `answer_starts` on what the draft made of it."""
    choices: NDArray[np.int32]
    """[M]: at the place of each token the draft's own choice, its most likely id; of given tokens they themselves."""

    def __len__(self) -> int:
        """Return how many tokens were sampled."""
        return int((self.documents.lengths - self.documents.answer_starts).sum())

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Samples:
        """Return all samples of several collections, at least one."""
        documents = Documents.join([part.documents for part in parts])
        return cls(documents, np.concatenate([part.choices for part in parts]))

    def save(self, path: Path) -> None:
        """Write a shard, whole or not at all; choices lie beside it."""
        with whole_file(_choices_path(path)) as file:
            np.save(file, self.choices)
        self.documents.save(path)

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Return what `save` wrote.

        Raises:
            InputError: a file is damaged.
        """
        documents = Documents.load(path)
        try:
            choices: NDArray[np.int32] = np.load(_choices_path(path))  # [M]
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path} lacks its choices ({error}): delete it, and it will be written again") from None
        if choices.shape != documents.token_ids.shape:
            raise InputError(f"{path} has other choices beside it: delete both, and they will be written again")
        return cls(documents, choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """How a draft samples."""

    temperature: float = 1.0
    """0 takes the draft's own choice; the higher, the more contexts are met that it will hardly meet again."""
    top_k: int = 0
    """Sample from so many of the best ids; 0: from all."""
    length: int = 8
    """Tokens of a continuation, about as many as a draft is deep; one that draws EOS ends there."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("temperature", 0), ("top_k", 0), ("length", 1)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} is {getattr(self, name)}, the least is {least}: raise it")


def sample_text(
    draft: DraftModel,
    examples: Examples,
    folder: Path,
    num_tokens: int,
    *,
    settings: SampleSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Samples:
    """Return at least `num_tokens` sampled by a draft; shards that are there already are not sampled again.

    The draft continues answers of the target, from places drawn at random, as it does when it drafts: the text before
    carries the target's hidden states where the draft reads them, what it samples does not.

    Args:
        draft: its own passes are run on the threads that torch has.
        examples: texts by the target; those that are held out are left alone.
        folder: where shards are kept; those of another draft, text or setting do not count.
        num_tokens: stop after the shard that reaches this.
        settings: of the sampling.
        progress: called with the tokens sampled so far and `num_tokens`.

    Raises:
        InputError: a shard is damaged, or no text has an answer.

    Cost: 5,500 tokens/s for one layer of width 576 with 8,192 kept ids, in bfloat16 on one core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sampler = Sampler(draft, examples, settings or SampleSettings())
    name, shards, num_done = sampler.digest[:12], list[Samples](), 0
    while num_done < num_tokens:
        path = folder / f"{name}-{len(shards):04d}.npz"
        if not path.is_file():
            sampler.shard(len(shards)).save(path)
        shards.append(Samples.load(path))
        num_done += len(shards[-1])
        if progress is not None:
            progress(min(num_done, num_tokens), num_tokens)
    return Samples.join(shards)


def draw(logits: Tensor, settings: SampleSettings, uniform: NDArray[np.float32]) -> Tensor:
    """Return the columns that uniform numbers from [0, 1) choose, int64 [M], of logits [M, K]."""
    if settings.temperature == 0:
        return best_columns(logits)
    scores, best = logits / settings.temperature, None  # [M, K]
    if 0 < settings.top_k < scores.shape[-1]:
        scores, best = scores.topk(settings.top_k)  # [M, top_k] each
    if missing := -scores.shape[-1] % _DRAW_BLOCK:
        scores = F.pad(scores, (0, missing), value=-torch.inf)  # [M, K], a multiple of the block
    # First a block of columns, then a column of it: running sums over all would take three times as long.
    blocks = scores.softmax(-1, dtype=torch.float32).view(len(scores), -1, _DRAW_BLOCK)  # [M, K / 64, 64]
    outer = _pick(blocks.sum(-1), torch.from_numpy(uniform).to(scores.device)[:, None])
    rows = torch.arange(len(blocks), device=blocks.device)  # [M]
    inner = _pick(blocks[rows, outer.columns[:, 0]], outer.rest)
    columns = outer.columns * _DRAW_BLOCK + inner.columns  # [M, 1]
    return columns[:, 0] if best is None else best.gather(-1, columns)[:, 0]


def best_columns(logits: Tensor) -> Tensor:
    """Return the column of each row's largest logit, the first of equals, int64 [M] of [M, K]."""
    return logits.max(-1).indices  # [M]; `argmax` takes four times as long in bfloat16


@dataclass(frozen=True, slots=True)
class _Picked:
    columns: Tensor
    """int64 [M, 1]."""
    rest: Tensor
    """How far into its column each uniform number leads, [M, 1]: uniform again."""


def _pick(weights: Tensor, uniform: Tensor) -> _Picked:
    """Return the columns that uniform numbers [M, 1] choose in proportion to weights [M, K]."""
    cumulative = weights.cumsum(-1)  # [M, K]
    total = cumulative[:, -1:]  # [M, 1]
    # Below the total, whatever the rounding; and on the right, so that no column of weight 0 is chosen.
    places = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))  # [M, 1]
    columns = torch.searchsorted(cumulative, places, right=True)  # [M, 1]
    chosen = weights.gather(-1, columns)  # [M, 1]
    rest = (places - (cumulative.gather(-1, columns) - chosen)) / chosen  # [M, 1]
    return _Picked(columns, rest.clamp_(0, 1))


class Sampler:
    """Continues texts with a draft.

    Args:
        draft: the model.
        examples: texts by the target.
        settings: of the sampling.
    """

    def __init__(self, draft: DraftModel, examples: Examples, settings: SampleSettings) -> None:
        self._draft, self._examples, self._settings = draft, examples, settings
        documents, window = examples.documents, draft.config.sliding_window
        assert window is None or window > settings.length, "a window is taken to hold all that was sampled"
        num_slots = int(documents.lengths.max()) + settings.length * MAX_ROWS
        self._runner = Runner(draft, num_slots, slot_grain=_SLOT_GRAIN)
        self._regions = [self._runner.cache.allocate(num_slots) for _ in range(_BATCH)]
        self._first_starts = np.maximum(documents.answer_starts, NUM_GIVEN)  # [D]

    @property
    def digest(self) -> str:
        """What samples depend on: the draft's norms stand for its weights, because training moves them all."""
        draft, documents = self._draft, self._examples.documents
        digest = hashlib.sha256(f"samples with choices, {self._settings}".encode())
        norms = [draft.norm, *(norm for layer in draft.layers for norm in (layer.attention_norm, layer.mlp_norm))]
        for array in (*(norm.float().cpu().numpy() for norm in norms), draft.kept_ids, documents.token_ids):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def shard(self, number: int) -> Samples:
        """Return the continuations of a shard's documents; later shards come back to the first ones.

        Raises:
            InputError: no text has an answer to continue.
        """
        numbers = self._continuable(self._examples.training())
        order = np.random.default_rng(self._settings.seed).permutation(numbers)
        places = range(number * SHARD_DOCUMENTS, (number + 1) * SHARD_DOCUMENTS)
        return self.continue_all(order.take(places, mode="wrap"), number)

    def continue_all(self, numbers: NDArray[np.int64], key: int) -> Samples:
        """Return up to `MAX_ROWS` continuations of each of these documents; with the seed, `key` decides them.

        Raises:
            InputError: none of them has an answer to continue.
        """
        random = np.random.default_rng([self._settings.seed, key])
        numbers = self._continuable(numbers)
        numbers = numbers[np.argsort(self._examples.documents.lengths[numbers], kind="stable")]
        parts = []
        for start in range(0, len(numbers), _BATCH):
            parts.append(self._continue_batch([int(number) for number in numbers[start : start + _BATCH]], random))
        return Samples.join(parts)

    def _continuable(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        continuable = numbers[self._first_starts[numbers] < self._examples.documents.lengths[numbers]]
        if len(continuable) == 0:
            raise InputError(f"none of {len(numbers)} texts of the target has an answer to continue: write more text")
        return continuable

    @torch.inference_mode()
    def _continue_batch(self, numbers: Sequence[int], random: np.random.Generator) -> Samples:
        pairs = zip(self._regions, numbers, strict=False)
        fans = [self._prefill(region, number, random) for region, number in pairs]
        steps = [[self._draw(self._draft.logits(fan.hidden), random) for fan in fans]]
        while len(steps) < self._settings.length:
            rows = [fan.rows(drawn.token_ids) for fan, drawn in zip(fans, steps[-1], strict=True)]
            output = self._runner.decode(rows)
            step = []
            for fan, logits in zip(fans, output.logits, strict=True):  # [N, K], few enough to stay in the cache
                self._runner.cache.commit(fan.region, len(fan.starts))
                step.append(self._draw(logits[: len(fan.starts)], random))
            steps.append(step)
        given = np.concatenate([fan.given for fan in fans])  # [M, 2]
        texts = np.column_stack([given, *(np.concatenate([drawn.token_ids for drawn in step]) for step in steps)])
        choices = np.column_stack([given, *(np.concatenate([drawn.choices for drawn in step]) for step in steps)])
        kinds = np.concatenate([np.full(len(fan.starts), self._examples.documents.kinds[fan.number]) for fan in fans])
        return self._samples(texts, choices, kinds)

    def _prefill(self, region: Region, number: int, random: np.random.Generator) -> _Fan:
        """Read a document and draw the places to continue it from."""
        cache, documents = self._runner.cache, self._examples.documents
        text = documents[number]  # [T]
        places = np.arange(self._first_starts[number], len(text))
        starts = random.choice(places, min(MAX_ROWS, len(places)), replace=False)  # [R]
        num_read = int(starts.max())
        features = self._features(number, num_read)
        cache.truncate(region, 0)
        rows = Rows.chain(region, text[:num_read].tolist(), features)
        hidden = self._runner.prefill(rows)[torch.from_numpy(starts - 1)]  # [R, E]
        own = np.tile(np.eye(len(starts), dtype=np.bool_), self._settings.length)  # [R, length * R]
        mask = np.concatenate((np.arange(num_read) < starts[:, None], own), 1)  # [R, C + length * R]
        unknown = None if features is None else self._no_feature.expand(len(starts), -1)  # [R, E]
        given = np.stack([text[starts - back] for back in range(NUM_GIVEN, 0, -1)], 1)  # [R, 2]
        return _Fan(number, region, starts, num_read, given, hidden, mask, unknown)

    def _features(self, number: int, num_read: int) -> Tensor | None:
        """Return what the draft reads beside the first tokens of a document, [C, E]."""
        if self._draft.kind == "lm":
            return None
        features = self._examples.batch([number]).features[0, :num_read].to(self._no_feature)  # [C, E]
        features[0] = self._no_feature
        return features

    @property
    def _no_feature(self) -> Tensor:
        assert self._draft.no_feature is not None
        return self._draft.no_feature  # [E]

    def _draw(self, logits: Tensor, random: np.random.Generator) -> _Drawn:
        columns = draw(logits, self._settings, random.random(len(logits), dtype=np.float32))  # [M]
        kept_ids = self._draft.kept_ids
        return _Drawn(kept_ids[columns.cpu().numpy()], kept_ids[best_columns(logits).cpu().numpy()])

    def _samples(self, texts: NDArray[np.int64], choices: NDArray[np.int64], kinds: NDArray[np.int8]) -> Samples:
        """Return rows of texts and choices, [M, 2 + length] each, cut after the first EOS that was sampled."""
        is_end = np.isin(texts, self._draft.config.eos_ids)  # [M, 2 + length]
        is_end[:, :NUM_GIVEN] = False
        is_kept: NDArray[np.bool_] = np.cumsum(is_end, 1) - is_end == 0  # [M, 2 + length]
        documents = Documents(
            token_ids=texts[is_kept].astype(np.int32),
            starts=np.concatenate(([0], np.cumsum(is_kept.sum(1)))),
            kinds=kinds,
            answer_starts=np.full(len(texts), NUM_GIVEN, dtype=np.int32),
            temperatures=np.full(len(texts), self._settings.temperature, dtype=np.float32),
        )
        return Samples(documents, choices[is_kept].astype(np.int32))


@dataclass(frozen=True, slots=True)
class _Drawn:
    token_ids: NDArray[np.int64]
    """[R], sampled."""
    choices: NDArray[np.int64]
    """[R]."""


@dataclass(frozen=True, slots=True)
class _Fan:
    """Continuations of one document, side by side: they share its slots, and each sees its own."""

    number: int
    region: Region
    starts: NDArray[np.int64]
    """[R], tokens of the document that each continues."""
    num_read: int
    """Tokens of the document in the first slots, C."""
    given: NDArray[np.int64]
    """[R, 2], the last of them."""
    hidden: Tensor
    """[R, E], the draft's states that the first tokens are drawn from."""
    mask: NDArray[np.bool_]
    """[R, C + length * R], over the document's slots and those of every token drawn."""
    features: Tensor | None
    """[R, E]: that nothing is known of the target before a token that is drawn."""

    def rows(self, token_ids: NDArray[np.int64]) -> Rows:
        """Return the rows of the next pass, which reads the tokens drawn last."""
        length, num_rows = self.region.length, len(self.starts)
        num_drawn = (length - self.num_read) // num_rows  # of each continuation, in slots already
        depths = (self.starts + num_drawn - length).tolist()
        return Rows(self.region, token_ids.tolist(), depths, self.mask[:, : length + num_rows], self.features)


def _choices_path(shard: Path) -> Path:
    return shard.with_suffix(".choices.npy")
