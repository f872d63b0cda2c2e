"""For people who already hold a transformers model: `model.generate(..., custom_generate=foretell.custom_generate)`.

transformers prepares the request: lengths, logits processors, stopping criteria. foretell's engine decodes it. The
engine is kept for as long as the model object lives, and built anew once the model's weights have changed.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from foretell.drafters.calibration import Calibration
from foretell.drafters.catalog import DRAFTERS, MODEL_DRAFTERS, OWN_PROMPT_DRAFTERS, PROMPT_DRAFTERS, make_drafter
from foretell.drafters.drafter import Drafter
from foretell.engine.engine import Engine
from foretell.engine.measure import quick_profile
from foretell.engine.sequence import Request
from foretell.errors import CapacityError, ConfigError
from foretell.models.live import fingerprint, num_copied_bytes, read_live, refuse_live
from foretell.params import SamplingParams
from foretell.passes.runner import Runner
from foretell.verify.choose import TokenChooser

_LOG: Final = logging.getLogger(__name__)

_MODES: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_STATEFUL: Final = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""Processors that count on being asked once for each token, in order."""
_CACHES: Final = ("cache", "past_key_values", "cache_params")
"""What transformers calls a cache, by version and kind of model."""
_PREPARED: Final = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", "tokenizer", *_CACHES})
"""What `generate` prepares for the model's own passes. Masks, positions and caches are looked at, the rest is not."""
_GENERATE: Final = inspect.unwrap(GenerationMixin.generate).__code__


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    foretell_drafter: str = "all",
    **model_kwargs: Any,
) -> Any:
    """Decode what `model.generate` has prepared: pass it as `custom_generate`, and `foretell_drafter` beside it.

    Processors and criteria are applied token by token, inside the accepted block. Greedy output is that of `generate`
    itself; sampling follows the same distribution, with a seed drawn from torch's default generator.

    Args:
        model: a causal language model in evaluation mode, all of it on one device.
        input_ids: int64 [1, T]; padding on the left is passed over.
        logits_processor: asked for each token's scores; must not keep anything from one call to the next.
        stopping_criteria: asked after each token.
        generation_config: as `generate` completed it.
        streamer: gets each token once it is emitted, and the end.
        foretell_drafter: who proposes, of those that need no draft model; see `foretell.drafters.catalog.DRAFTERS`.
        model_kwargs: what else `generate` prepared; anything that would change the output is refused.

    Returns:
        Prompt and output, int64 [1, T]; a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`, its scores and
        logits filled where asked for, its cache empty.

    Raises:
        ConfigError: the request asks for something else than greedy search or sampling of one sequence.
        ModelError: the model is of a kind that foretell refuses.
        CapacityError: the length that was asked for is beyond the model's context.
        NumericsError: the model's logits hold NaN, or no token is left to choose from.

    Cost: the first call for a model packs its weights, which takes about as much memory again: see `held_bytes`.
    """
    refuse_live(model)
    dropped = _dropped_by_transformers(inspect.currentframe())
    streamer = dropped.get("streamer") if streamer is None else streamer
    _refuse_mode(generation_config, dropped.get("assistant_model"))
    _refuse_inputs(input_ids, logits_processor, model_kwargs)
    num_padding = _num_padding(input_ids, model_kwargs)
    eos_ids = _eos_ids(stopping_criteria)
    drafter = _drafter(foretell_drafter, eos_ids)
    held = _hold(model)
    num_tokens = _max_length(stopping_criteria, held.engine.runner.context_tokens + num_padding)
    rows = _Rows(logits_processor, input_ids[:, :num_padding], generation_config)
    output = _Output(input_ids, num_tokens, stopping_criteria, streamer, rows)
    seed = int(torch.randint(2**63 - 1, ())) if generation_config.do_sample else None
    prompt_ids = input_ids[0, num_padding:].tolist()
    request = Request(
        prompt_ids=prompt_ids,
        chooser=_chooser(rows, len(prompt_ids), seed, held.engine.runner.model.config.vocab_size),
        drafter=drafter,
        max_new_tokens=output.num_tokens_left,
        stop_ids=eos_ids,
        should_stop=output.push,
    )
    with held.lock:
        _decode(held.engine, request)
    if streamer is not None:
        streamer.end()
    return output.result(is_dict=bool(generation_config.return_dict_in_generate))


def held_bytes(model: Any) -> int:
    """Return at most how many bytes foretell keeps for a model beside its own weights; 0 before the first call.

    The slots of a request come on top while it is decoded.
    """
    held = _HELD.get(model)
    return 0 if held is None else held.num_bytes


def release(model: Any) -> None:
    """Forget what is kept for a model; the next call packs its weights again."""
    _HELD.pop(model, None)


# One engine for each model


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Held:
    """What is kept for one model object; nothing in it refers to that object, which would keep both alive."""

    engine: Engine
    fingerprint: tuple[object, ...]
    num_bytes: int
    lock: threading.RLock


_HELD: Final[WeakKeyDictionary[Any, _Held]] = WeakKeyDictionary()
_HOLDING: Final = threading.Lock()


def _hold(model: Any) -> _Held:
    """Return what is kept for a model, built anew where its weights have changed."""
    with _HOLDING:
        current = fingerprint(model)
        held = _HELD.get(model)
        if held is not None and held.fingerprint == current:
            return held
        held = None
        release(model)  # before another is built: two packed copies may not fit
        held = _HELD[model] = _build(model, current)
        return held


def _build(model: Any, current: tuple[object, ...]) -> _Held:
    decoder = read_live(model)
    name, num_bytes = type(model).__name__, num_copied_bytes(decoder)
    _LOG.info("foretell keeps %.0f MB beside the weights of %s", num_bytes / 1e6, name)
    runner = Runner(decoder, decoder.config.max_positions)
    is_exact = decoder.dtype == torch.bfloat16 and decoder.device.type == "cpu"
    profile = quick_profile(runner, {"model": name})
    engine = Engine(runner, profile, Calibration(), "canonical" if is_exact else "copy")
    return _Held(engine=engine, fingerprint=current, num_bytes=num_bytes, lock=threading.RLock())


# One request


class _Rows:
    """All logits processors as one, called as transformers would; keeps the rows that the caller asked to see.

    Args:
        processors: in their order.
        padding: int64 [1, P], the prompt's padding: processors count it.
        config: says which rows to keep.
    """

    def __init__(self, processors: LogitsProcessorList, padding: Tensor, config: GenerationConfig) -> None:
        self._processors: Any = processors
        self._padding = padding
        is_dict = config.return_dict_in_generate
        self._scores: dict[int, Tensor] | None = {} if is_dict and config.output_scores else None
        self._logits: dict[int, Tensor] | None = {} if is_dict and config.output_logits else None

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to process or to keep."""
        return bool(self._processors) or self._scores is not None or self._logits is not None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores [1, V] of the token after `input_ids` [1, T]."""
        device = self._padding.device
        ids = torch.cat((self._padding, input_ids.to(device)), 1)  # [1, P + T]
        scores = scores.to(device)  # [1, V]
        position = ids.shape[1]
        # A position may be asked for again: what was asked last is what was emitted.
        if self._logits is not None:
            self._logits[position] = scores.clone()
        processed: Tensor = self._processors(ids, scores)  # [1, V]
        if self._scores is not None:
            self._scores[position] = processed
        return processed

    def scores(self, positions: range) -> tuple[Tensor, ...] | None:
        """Return the processed rows [1, V] of the tokens at these positions; None where they were not asked for."""
        return None if self._scores is None else tuple(self._scores[position] for position in positions)

    def logits(self, positions: range) -> tuple[Tensor, ...] | None:
        """Return the model's own rows [1, V] of the tokens at these positions; None where they were not asked for."""
        return None if self._logits is None else tuple(self._logits[position] for position in positions)


class _Output:
    """The sequence as transformers sees it, padding included.

    Args:
        input_ids: int64 [1, T].
        max_length: tokens that it may have.
        criteria: asked after each token.
        streamer: gets each token, or None.
        rows: what was kept of each token.
    """

    def __init__(
        self, input_ids: Tensor, max_length: int, criteria: StoppingCriteriaList, streamer: Any, rows: _Rows
    ) -> None:
        self._num_prompt_tokens = self._length = input_ids.shape[1]
        self._ids = input_ids.new_empty((1, max(max_length, self._length + 1)))  # [1, T]
        self._ids[:, : self._length] = input_ids
        self._streamer = streamer
        self.criteria, self.rows = criteria, rows

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be emitted, at least one before the first."""
        return self._ids.shape[1] - self._length

    def push(self, token_id: int) -> bool:
        """Take in an emitted token; returns whether a criterion ends the sequence with it."""
        self._ids[0, self._length] = token_id
        self._length += 1
        ids = self._ids[:, : self._length]  # [1, T]
        is_done = bool(self.criteria(ids, self.rows.scores(self._positions)).all())
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token_id], device="cpu"))
        return is_done

    def result(self, *, is_dict: bool) -> Any:
        """Return what `generate` returns."""
        sequences = self._ids[:, : self._length].clone()  # [1, T]
        if not is_dict:
            return sequences
        rows: Any = {"scores": self.rows.scores(self._positions), "logits": self.rows.logits(self._positions)}
        return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences), **rows)

    @property
    def _positions(self) -> range:
        return range(self._num_prompt_tokens, self._length)


def _chooser(rows: _Rows, num_prompt_tokens: int, seed: int | None, vocab_size: int) -> TokenChooser:
    """Return what chooses from processed rows; without a seed, the best token."""
    sampling = SamplingParams(
        temperature=0.0 if seed is None else 1.0,  # any other is one of the processors
        logits_processors=(rows,) if rows.is_needed else (),
    )
    return TokenChooser(
        sampling,
        num_prompt_tokens=num_prompt_tokens,
        eos_ids=(),
        seed=seed,
        sequence_key=0,
        vocab_size=vocab_size,
    )


def _decode(engine: Engine, request: Request) -> None:
    """Run steps until the request's output ends."""
    sequence = engine.start(request)
    try:
        while not sequence.is_finished:
            engine.step([sequence])
    finally:
        engine.finish(sequence)


# What was asked


def _drafter(name: str, eos_ids: frozenset[int]) -> Drafter:
    """Return a drafter that needs nothing beside the model.

    Raises:
        ConfigError: it needs something, or there is none of that name.
    """
    if name in MODEL_DRAFTERS | PROMPT_DRAFTERS | OWN_PROMPT_DRAFTERS:
        raise ConfigError(
            f"`foretell_drafter`={name!r} needs a draft model or prompt tokens, which `custom_generate` takes none of: "
            f"choose one of {', '.join(DRAFTERS)}, or load the model by `foretell.LLM(model, draft=…, prompts=…)`"
        )
    return make_drafter(name, eos_ids=eos_ids)


def _dropped_by_transformers(frame: FrameType | None) -> Mapping[str, Any]:
    """Return what `generate`, where it runs this callable, was given and does not hand on.

    transformers (5.18 to 5.24) takes a streamer and an assistant model, and passes them to its own methods only.
    Unread, the one would wait for an end that never comes, and the other would be ignored without a word.
    """
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_code is not _GENERATE:
        return {}
    return {name: caller.f_locals.get(name) for name in ("streamer", "assistant_model")}


def _refuse_mode(config: GenerationConfig, assistant_model: Any) -> None:
    mode = config.get_generation_mode(assistant_model)
    if mode not in _MODES:
        raise ConfigError(
            f"`generate` was asked for {mode.value.replace('_', ' ')}, foretell does greedy search and sampling: drop "
            "`num_beams`, `assistant_model`, `prompt_lookup_num_tokens` or whatever asks for it"
        )
    if (config.num_return_sequences or 1) > 1:
        raise ConfigError(
            f"`num_return_sequences` is {config.num_return_sequences}, foretell returns 1: call `generate` again"
        )
    for name in ("output_attentions", "output_hidden_states", "token_healing"):
        if getattr(config, name, None):
            raise ConfigError(f"`{name}` is not supported: drop it")
    if config.cache_implementation not in (None, "dynamic"):
        raise ConfigError(
            f"`cache_implementation` is {config.cache_implementation!r}, foretell has a cache of its own: drop it"
        )


def _refuse_inputs(input_ids: Tensor, processors: LogitsProcessorList, model_kwargs: Mapping[str, Any]) -> None:
    unknown = [
        name
        for name, value in model_kwargs.items()
        if name not in _PREPARED and value is not None and value is not False
    ]
    if unknown:
        raise ConfigError(f"`{unknown[0]}` is not supported, foretell decodes `input_ids` alone: drop it")
    if input_ids.shape[0] != 1:
        raise ConfigError(f"`input_ids` has {input_ids.shape[0]} rows, foretell takes 1: call `generate` for each")
    for name in _CACHES:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise ConfigError(f"`{name}` cannot be continued, foretell has a cache of its own: drop it")
    stateful = next((processor for processor in processors if isinstance(processor, _STATEFUL)), None)
    if stateful is not None:
        raise ConfigError(f"{type(stateful).__name__} keeps state between tokens, which is not supported: drop it")


def _num_padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> int:
    """Return how many of the prompt's first tokens the mask hides."""
    size = input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    num_hidden = 0 if mask is None else int((mask == 0).sum())
    if mask is not None and (
        mask.shape != input_ids.shape or not bool(mask[0, num_hidden:].all()) or num_hidden == size
    ):
        raise ConfigError(
            "`attention_mask` hides more than padding on the left, or is not as long as `input_ids`: drop it"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.flatten()[num_hidden - size :].tolist() != list(range(size - num_hidden)):
        raise ConfigError("`position_ids` are not 0, 1, 2, … from the first token on: drop them")
    return num_hidden


def _max_length(criteria: StoppingCriteriaList, limit: int) -> int:
    """Return how many tokens the sequence may have, padding included.

    Raises:
        CapacityError: more than `limit` were asked for.
    """
    asked = min((each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)), default=limit)
    if asked > limit:
        raise CapacityError(f"`max_length` is {asked}, the model's context holds {limit}: lower `max_new_tokens`")
    return int(asked)


def _eos_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    """Return the ids that end the sequence by themselves; none where the model has no EOS (transformers#27775)."""
    found = [each.eos_token_id for each in criteria if isinstance(each, EosTokenCriteria)]
    return frozenset(token_id for ids in found for token_id in ids.tolist())
