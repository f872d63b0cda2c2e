"""From a target to the artefacts that draft for it: text, training, files, and what they say of themselves."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from foretell.drafters.prompt_store import is_prompts
from foretell.errors import ConfigError, ModelError
from foretell.llm import LLM
from foretell.models.draft_files import WEIGHTS, is_draft, read_draft, read_draft_facts, write_draft
from foretell.models.files import DEFAULT_MODEL, DEFAULT_TITLE, cache_home
from foretell.provenance import provenance
from foretell.train.card import NGRAM_HEADING, draft_card, ngram_section
from foretell.train.distill import Agreement
from foretell.train.draft import Progress, Recipe, TargetTensors, TrainedDraft, train_draft
from foretell.train.examples import Examples, add_hidden
from foretell.train.finished import is_finished, settings_digest
from foretell.train.text import hidden_path, read_prompts, shard_paths, take_text, write_text
from foretell.train.whole_file import whole_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ALWAYS_KEPT: Final = 256
"""Tokens that every draft keeps, the vocabulary's first: special tokens, and bytes in most vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Who is told how far it is."""

    text: Callable[[int, int], None] | None = None
    training: Callable[[Progress], None] | None = None
    sampling: Callable[[int, int], None] | None = None
    note: Callable[[str], None] | None = None
    """Told in one line what is going to be replaced."""


def text_home(fingerprint: str, seed: int) -> Path:
    """Return where a target's own text is kept, for every training that wants it."""
    return cache_home() / "training" / fingerprint[:16] / f"text-{seed}"


def produce_draft(
    llm: LLM,
    out: Path,
    recipe: Recipe,
    num_tokens: int,
    *,
    prompts: Path | None = None,
    text: Path | None = None,
    reports: Reports | None = None,
) -> TrainedDraft | None:
    """Let a target write text, distil a draft from it, and write the draft with its card; None where that is done.

    Everything that was done is kept until the end, so that an interrupted run goes on: text in `text_home`, the state
    of the training beside `out`.

    Args:
        llm: the target, in the dtype that it will run in.
        out: the draft's folder.
        recipe: how to train.
        num_tokens: of text.
        prompts: a JSON Lines file of user turns to answer, in place of made-up ones.
        text: a folder of shards that this target has written before, to begin with.
        reports: who is told how far it is.

    Raises:
        InputError: there is too little text, or a shard of it is damaged or by another target.
        ConfigError: `out` holds something else, or cannot be written; or `prompts` and `text` were both given.
        ModelError: this kind of target cannot be trained for.
    """
    reports = reports or Reports()
    out = check_place(out, is_draft, "draft")
    target = TargetTensors.read(llm.config, llm.folder, llm.fingerprint)
    started_s = time.perf_counter()
    examples = own_examples(llm, num_tokens, recipe.seed, prompts, reports.text, text=text)
    text_s = time.perf_counter() - started_s
    settings = settings_digest(recipe, examples, target.fingerprint)
    if is_finished(out, WEIGHTS, settings, reports.note):
        return None
    checkpoint = out.with_name(f"{out.name}.training.pt")
    trained = train_draft(
        target,
        examples,
        recipe,
        checkpoint,
        always_kept=frozenset(range(ALWAYS_KEPT)) | frozenset(llm.config.eos_ids),
        progress=reports.training,
    )
    facts = training_facts(llm, recipe, examples, trained.kept_ids, trained.scores, text_s) | {"settings": settings}
    write_draft(
        out,
        trained.config,
        trained.tensors,
        trained.kept_ids,
        fingerprint=llm.fingerprint,
        card=draft_card(facts),
        provenance=facts,
    )
    checkpoint.unlink(missing_ok=True)
    return trained


def produce_ngram(
    llm: LLM,
    folder: Path,
    *,
    num_tokens: int,
    max_bytes: int,
    seed: int,
    text_tokens: int,
    reports: Reports | None = None,
) -> Mapping[str, Any]:
    """Let a draft sample, make its trigram table, and write it beside the draft.

    Args:
        llm: the target.
        folder: the draft's.
        num_tokens: to sample.
        max_bytes: of the table.
        seed: of the text and the sampling.
        text_tokens: of the target's text, where the draft sets out from; written where it is not there yet.
        reports: who is told how far it is.

    Raises:
        ModelError: the draft is missing, damaged, or of another target.
        InputError: a shard of text or samples is damaged.
        ConfigError: the table cannot be written.
    """
    from foretell.drafters.katz import FILE
    from foretell.train.katz import train_ngram

    reports = reports or Reports()
    check_draft(folder)
    runner = llm.engine.runner
    draft = read_draft(
        folder, llm.folder, llm.config, llm.fingerprint, dtype=runner.model.dtype, device=runner.model.device
    )
    examples = own_examples(llm, text_tokens, seed, None, reports.text)
    source = provenance()
    facts = {
        "fingerprint": llm.fingerprint,
        "draft": _digest(folder / WEIGHTS),
        "command": shlex.join(source["argv"]) if isinstance(source["argv"], list) else "",
        "foretell": str(source["foretell"]),
        "torch": str(source["torch"]),
    }
    samples = text_home(llm.fingerprint, seed).with_name(f"samples-{facts['draft'][:16]}")
    report = train_ngram(
        draft,
        examples,
        folder / FILE,
        samples,
        facts,
        num_tokens=num_tokens,
        max_bytes=max_bytes,
        progress=reports.sampling,
    )
    scores = asdict(report)
    document = json.dumps({**facts, **scores}, indent=2, default=str)
    with whole_file(folder / "ngram.json") as file:
        file.write(f"{document}\n".encode())
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8").partition(NGRAM_HEADING)[0] if card.is_file() else ""
    with whole_file(card) as file:
        file.write((before + ngram_section(json.loads(document))).encode())
    return scores


def own_examples(
    llm: LLM,
    num_tokens: int,
    seed: int,
    prompts: Path | None,
    progress: Callable[[int, int], None] | None,
    *,
    text: Path | None = None,
) -> Examples:
    """Return a target's own text with its hidden states; what is neither there nor in the folder `text` is written.

    Raises:
        InputError: a shard is damaged or by another target, or `prompts` has no usable line.
        ConfigError: `prompts` and `text` were both given.
    """
    if prompts is not None and text is not None:
        raise ConfigError("`prompts` and `text` were both given, text that is there answers no prompts: drop one")
    folder = text_home(llm.fingerprint, seed)
    if text is not None:
        take_text(text, folder, llm.fingerprint, llm.config.vocab_size)
    if prompts is not None:
        read_prompts(prompts, llm.tokenizer)
        folder = folder.with_name(f"text-{seed}-{_digest(prompts)[:16]}")
    write_text(llm, folder, num_tokens, seed=seed, prompts=prompts, progress=progress)
    shards = shard_paths(folder, num_tokens)
    for shard in shards:
        if not hidden_path(shard).is_file():
            add_hidden(llm, shard)
    return Examples(shards)


def check_place(out: Path, is_own: Callable[[Path], bool], kind: str) -> Path:
    """Return the full path of a folder to write to, having tried that it can be written.

    Args:
        out: it need not exist.
        is_own: whether a folder holds what may be replaced.
        kind: what that is called.

    Raises:
        ConfigError: it holds something else, or cannot be written.
    """
    out = out.expanduser().resolve()
    try:
        if out.exists() and not (out.is_dir() and (is_own(out) or not any(out.iterdir()))):
            raise ConfigError(f"{out} holds something that is no {kind}: choose another place")
        out.parent.mkdir(parents=True, exist_ok=True)
        for folder in (out.parent, out) if out.exists() else (out.parent,):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another place") from None
    return out


def check_draft(folder: Path) -> None:
    """Raise where a folder holds no draft that its files tell of."""
    if not folder.is_dir():
        raise ModelError(f"{folder} does not exist: make a draft first, with `foretell train draft`")
    if is_prompts(folder) and not is_draft(folder):
        raise ModelError(f"{folder} holds prompt tokens, no draft model: name that by `foretell train draft`")
    if not is_draft(folder):
        raise ModelError(f"{folder} holds no draft: make one first, with `foretell train draft`")
    read_draft_facts(folder)


def training_facts(
    llm: LLM,
    recipe: DataclassInstance,
    examples: Examples,
    kept_ids: NDArray[np.int64],
    scores: Mapping[str, Any],
    text_s: float,
) -> dict[str, Any]:
    """Return the provenance of what was trained: target, recipe, text, scores, command, machine and versions."""
    documents = examples.documents
    kinds = np.bincount(documents.kinds, minlength=2)
    name = llm.settings["model"]
    return {
        "target": DEFAULT_TITLE if name == DEFAULT_MODEL else name,
        "fingerprint": llm.fingerprint,
        "recipe": asdict(recipe),
        "text": {
            "num_tokens": int(documents.starts[-1]),
            "num_chat_documents": int(kinds[0]),
            "num_raw_documents": int(kinds[1]),
            "writing_s": round(text_s),
        },
        "num_kept": len(kept_ids),
        "scores": dict(scores),
        **provenance(),
    }


def agreement_line(name: str, agreement: Agreement) -> str:
    """Return one line that tells how well a draft does."""
    shares = " ".join(f"{share:.2f}" for share in agreement.by_depth[0])
    return f"{name}: top-1/2/4/8 {shares}, {agreement.chain_tokens_per_pass:.2f} tokens a pass as a chain"


def _digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()
