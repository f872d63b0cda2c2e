"""Which draft model serves a target: one that was asked for, one trained here, or one that ships."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from foretell.drafters.draft_engine import DraftEngine
from foretell.drafters.next_ids import SHIPPED
from foretell.errors import ConfigError, ModelError
from foretell.models.draft_files import draft_digest, is_draft, read_draft, read_draft_facts
from foretell.models.files import cache_home, resolve

if TYPE_CHECKING:
    import torch

    from foretell.drafters.calibration import Calibration
    from foretell.drafters.catalog import TableFactory
    from foretell.drafters.prompt_tokens import PromptTokens
    from foretell.models.config import ModelConfig
    from foretell.models.draft import DraftModel
    from foretell.text.tokenizer import Tokenizer

NONE: Final = "none"
"""In place of a draft's name: use none, though one may be there."""

_BUCKETS: Final = (4, 12)
"""Row counts of a draft's compiled passes: a few nodes, or the tokens of a step with a second stage below them."""

OWN_PROMPTS: Final = "prompts"
"""Folder of a draft's own prompt tokens, within the draft's."""

_FOLDER: Final = "draft"
"""Of a shipped draft, within the folder of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a draft must fit."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    context_tokens: int
    is_compiled: bool = False
    """Whether passes are to be compiled, the draft's as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft model ready to run, and its own drafter's table."""

    engine: DraftEngine
    ngram_table: TableFactory | None
    source: str
    """Where it came from."""


def draft_home(fingerprint: str) -> Path:
    """Return where drafts trained on this machine are kept for a target."""
    return cache_home() / "drafts" / fingerprint[:16]


def has_draft(fingerprint: str) -> bool:
    """Return whether a draft was trained here or ships for a target."""
    for folder in _homes(fingerprint):
        with suppress(ModelError):
            if _is_for(folder, fingerprint):
                return True
    return False


def load_draft(
    draft: str | Path | None,
    target: Target,
    calibration: Calibration,
    notify: Callable[[str], None] | None = None,
) -> LoadedDraft | None:
    """Return the draft model of a target; None where there is none, or none is wanted.

    Args:
        draft: a folder by `foretell train draft`, any model with the target's tokenizer, "none", or None for what was
            trained here or ships with the package.
        target: what it must fit.
        calibration: acceptance estimates that its drafts are ranked by.
        notify: called with what is wrong with a draft that was not asked for, in one line.

    Raises:
        ModelError: the draft that was asked for is damaged, or of another target.
        ConfigError: its tokenizer is not the target's.
    """
    if draft == NONE:
        return None
    if draft is not None:
        folder = _given_folder(draft)
        return (
            _load(folder, target, calibration, notify)
            if is_draft(folder)
            else _load_foreign(draft, target, calibration)
        )
    for folder in _homes(target.fingerprint):
        try:
            if _is_for(folder, target.fingerprint):
                return _load(folder, target, calibration, notify)
        except ModelError as error:
            if notify is not None:
                notify(str(error))
    return None


def _given_folder(draft: str | Path) -> Path:
    """Return what was asked for as a path.

    Raises:
        ModelError: it is no draft's name, or a folder of prompt tokens.
    """
    from foretell.drafters.prompt_store import is_prompts

    if not str(draft):
        raise ModelError("`draft` (`--draft`) is empty: give a folder by `foretell train draft`, a model, or 'none'")
    folder = Path(draft)
    if is_prompts(folder) and not is_draft(folder):
        raise ModelError(f"{folder} holds prompt tokens, no draft model: give it as `prompts` (`--prompts`)")
    return folder


def _homes(fingerprint: str) -> list[Path]:
    return [draft_home(fingerprint), *sorted(SHIPPED.glob(f"*/{_FOLDER}"))]


def _is_for(folder: Path, fingerprint: str) -> bool:
    return is_draft(folder) and read_draft_facts(folder).get("fingerprint") == fingerprint


def _load(folder: Path, target: Target, calibration: Calibration, notify: Callable[[str], None] | None) -> LoadedDraft:
    model = read_draft(
        folder, target.folder, target.config, target.fingerprint, dtype=target.dtype, device=target.device
    )
    compiled = None
    if target.is_compiled:
        from foretell.passes.compiled import load_compiled

        compiled = load_compiled(
            model,
            folder,
            cache_home() / "compiled",
            context_tokens=target.context_tokens,
            buckets=_BUCKETS,
            notify=notify,
        )
    prompts = _read_own_prompts(folder, target, model, notify)
    engine = DraftEngine(model, target.context_tokens, calibration, compiled, prompts)
    return LoadedDraft(engine=engine, ngram_table=_read_table(folder, target, notify), source=str(folder))


def _read_own_prompts(
    folder: Path, target: Target, model: DraftModel, notify: Callable[[str], None] | None
) -> PromptTokens | None:
    """Return the draft model's own prompt tokens; None where there are none, or none that serve it."""
    from foretell.drafters.prompt_store import eager_only, is_prompts, read_prompts  # which knows of targets from here

    if not is_prompts(folder / OWN_PROMPTS):
        return None
    try:
        own = replace(target, config=model.config, fingerprint=draft_digest(folder))
        tokens = read_prompts(folder / OWN_PROMPTS, own)
    except ModelError as error:
        if notify is not None:
            notify(str(error))
        return None
    if tokens.adapters and target.is_compiled:
        if notify is not None:
            notify(f"{eager_only(folder / OWN_PROMPTS)}, they are left out: train others, with `--capacity sampler`")
        return None
    if tokens.sampler is not None and np.array_equal(tokens.sampler.kept_ids, model.kept_ids):
        tokens.sampler.head = model.head  # the same rows
    return tokens


def _read_table(folder: Path, target: Target, notify: Callable[[str], None] | None) -> TableFactory | None:
    """Return the table of a draft; None where there is none, or it counts what another draft chose."""
    from foretell.drafters.katz import FILE, KatzDrafter, read_facts, read_katz

    path = folder / FILE
    if not path.is_file():
        return None
    if read_facts(path).get("draft") != draft_digest(folder):
        if notify is not None:
            notify(f"{path} was made for another draft, it is left out: run `foretell train ngram` again")
        return None
    table = read_katz(path, target.fingerprint, target.config.vocab_size)
    return lambda eos_ids: KatzDrafter(table, eos_ids=eos_ids)


def _load_foreign(draft: str | Path, target: Target, calibration: Calibration) -> LoadedDraft:
    """Load a model of its own as a draft."""
    from foretell.models.draft import ForeignDraft
    from foretell.models.load import load_model
    from foretell.text.tokenizer import Tokenizer

    files = resolve(draft)
    _compare_vocabularies(str(draft), Tokenizer.load(files.folder), target.tokenizer)
    model = load_model(files.folder, dtype=target.dtype, device=target.device)
    foreign: Any = ForeignDraft(model, min(model.config.vocab_size, target.config.vocab_size))
    engine = DraftEngine(foreign, target.context_tokens, calibration)
    return LoadedDraft(engine=engine, ngram_table=None, source=files.source)


def _compare_vocabularies(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Refuse a draft whose ids do not mean what the target's mean; either may have padding beyond the other's end.

    Raises:
        ConfigError: some ids mean something else.
    """
    num_ids = max(draft.vocab_size, target.vocab_size)
    pairs = ((token_id, draft.token(token_id), target.token(token_id)) for token_id in range(num_ids))
    other = [pair for pair in pairs if pair[1] != pair[2] and None not in pair]
    missing = abs(draft.vocab_size - target.vocab_size)
    if other or missing > num_ids // 100:
        token_id, own, wanted = other[0] if other else (num_ids - 1, None, None)
        raise ConfigError(
            f"draft {name} has another tokenizer: {len(other)} of {num_ids} ids differ, the first is {token_id} "
            f"({own!r}, the target's is {wanted!r}), and its vocabulary has {draft.vocab_size} ids, the target's "
            f"{target.vocab_size}: take a draft of the same family, or train one (`foretell train draft`)"
        )
