"""Let a target write text, many documents at once, kept in shards so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.drafters.drafter import NoDrafter, Outcome
from foretell.engine.engine import Engine
from foretell.engine.sequence import DecodingSequence, Request
from foretell.errors import InputError
from foretell.llm import LLM
from foretell.passes.runner import Runner
from foretell.text.tokenizer import Tokenizer
from foretell.train.scripts import (
    OPENINGS,
    ChatShape,
    ScriptedChooser,
    answer_script,
    chat_script,
    raw_script,
    read_turns,
)
from foretell.train.whole_file import whole_file

CHAT, RAW = 0, 1
"""Kinds of documents."""

SHARD_DOCUMENTS: Final = 384
"""Documents of a shard; every third shard is raw text where the target has a chat template."""

DOCUMENT_TOKENS: Final = 320
"""Most tokens of a document, whatever introduces it included."""

_BATCH: Final = 96
"""Documents at once: a pass of 96 rows takes about 9 times as long as one of 1 row."""

_SLOT_GRAIN: Final = 64


@dataclass(frozen=True, slots=True)
class Documents:
    """Texts by one target, one after the other."""

    token_ids: NDArray[np.int32]
    """[M], everything that the target read or wrote."""
    starts: NDArray[np.int64]
    """[D + 1]; document d is `token_ids[starts[d]:starts[d + 1]]`."""
    kinds: NDArray[np.int8]
    """[D], `CHAT` or `RAW`."""
    answer_starts: NDArray[np.int32]
    """[D], where within a document the target's answer, or the free part of raw text, begins."""
    temperatures: NDArray[np.float32]
    """[D], of that part."""

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, number: int) -> NDArray[np.int32]:
        return self.token_ids[self.starts[number] : self.starts[number + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, [D]."""
        return np.diff(self.starts)

    @property
    def digest(self) -> str:
        """SHA-256 of everything."""
        digest = hashlib.sha256()
        for each in fields(self):
            digest.update(np.ascontiguousarray(getattr(self, each.name)).tobytes())
        return digest.hexdigest()

    @classmethod
    def of(
        cls,
        texts: Sequence[Sequence[int]],
        kinds: Sequence[int],
        answer_starts: Sequence[int],
        temperatures: Sequence[float],
    ) -> Documents:
        """Return these texts as documents."""
        starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)  # [D + 1]
        flat = np.fromiter((token_id for text in texts for token_id in text), np.int32, int(starts[-1]))  # [M]
        return cls(
            flat,
            starts,
            np.array(kinds, dtype=np.int8),
            np.array(answer_starts, dtype=np.int32),
            np.array(temperatures, dtype=np.float32),
        )

    @classmethod
    def join(cls, parts: Sequence[Documents]) -> Documents:
        """Return all documents of several collections, at least one."""
        starts = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths for part in parts]))])  # [D + 1]
        names = ("token_ids", "kinds", "answer_starts", "temperatures")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(starts=starts, **joined)

    def save(self, path: Path, fingerprint: str = "") -> None:
        """Write a file whole or not at all; `fingerprint` tells whose text it is, "" where that is not known."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        with whole_file(path) as file:
            np.savez_compressed(file, **arrays, fingerprint=np.array(fingerprint))

    @classmethod
    def load(cls, path: Path) -> Documents:
        """Return what `save` wrote.

        Raises:
            InputError: the file is damaged.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(**{field.name: arrays[field.name] for field in fields(cls)})
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is damaged ({error}): delete it, and it will be written again") from None


def write_text(
    llm: LLM,
    folder: Path,
    num_tokens: int,
    *,
    seed: int = 0,
    prompts: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Documents:
    """Return at least `num_tokens` of text by the target itself; shards that are there already are not written again.

    Two thirds are made-up user turns with answers, through the chat template; one third is raw text from BOS and from
    short openings, code included. Without a chat template all of it is raw. Beside each shard lie the target's hidden
    states, which decoding computes anyway, see `hidden_path`.

    Args:
        llm: the target.
        folder: where shards are kept.
        num_tokens: stop after the shard that reaches this.
        seed: of all sampling.
        prompts: a JSON Lines file of user turns to answer in place of made-up ones; nothing raw is written then. Each
            is answered several times where tokens are still missing, at other temperatures.
        progress: called with the tokens written so far and `num_tokens`.

    Raises:
        InputError: a shard is damaged, or `prompts` has no usable line.

    Cost: 460 tokens/s for a 135M model on two cores, and 1.1 KB a token for hidden states.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(llm, seed, prompts)
    shards: list[Documents] = []
    num_done = 0
    while num_done < num_tokens:
        path = folder / f"shard-{len(shards):04d}.npz"
        if not path.is_file():
            shard = writer.write(len(shards), _shifted(progress, num_done, num_tokens))
            with whole_file(hidden_path(path)) as file:
                np.save(file, shard.hidden.view(torch.uint16).numpy())
            shard.documents.save(path, llm.fingerprint)
        shards.append(Documents.load(path))
        num_done += len(shards[-1].token_ids)
        if progress is not None:
            progress(min(num_done, num_tokens), num_tokens)
    return Documents.join(shards)


def _shifted(progress: Callable[[int, int], None] | None, before: int, total: int) -> Callable[[int], None]:
    """Return a callback that counts from the start of a shard."""

    def shifted(done: int) -> None:
        if progress is not None:
            progress(min(before + done, total), total)  # a shard may hold more than is wanted

    return shifted


def take_text(source: Path, folder: Path, fingerprint: str, vocab_size: int) -> int:
    """Copy the shards of one folder to another, but for those that are there; returns how many `source` has.

    All are read before the first is copied. A shard that does not say whose text it is, is taken for the target's.

    Args:
        source: where they are.
        folder: where they go.
        fingerprint: the target's.
        vocab_size: the target's.

    Raises:
        InputError: `source` has none, or one is damaged or by another target.
    """
    paths = sorted(source.glob("shard-*.npz"))
    if not paths:
        raise InputError(f"{source} holds no shards of text: give a folder by `foretell train draft`")
    for path in paths:
        _refuse_other_target(path, fingerprint, vocab_size)
    for path in paths:
        if not (folder / path.name).is_file():
            Documents.load(path).save(folder / path.name, _fingerprint_of(path))
    return len(paths)


def _fingerprint_of(shard: Path) -> str:
    """Return whose text an undamaged shard is, "" where it does not say."""
    with np.load(shard, allow_pickle=False) as arrays:
        return str(arrays["fingerprint"]) if "fingerprint" in arrays else ""


def _refuse_other_target(path: Path, fingerprint: str, vocab_size: int) -> None:
    documents, found = Documents.load(path), _fingerprint_of(path)
    if found not in ("", fingerprint):
        raise InputError(
            f"{path} is text by model {found[:16]}, this one is {fingerprint[:16]}: give text by this very target"
        )
    low, high = int(documents.token_ids.min(initial=0)), int(documents.token_ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"{path} has token {low if low < 0 else high}, this model's go to {vocab_size - 1}: "
            "give text by this very target"
        )


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the user turns of a file that leave room for an answer, see `read_turns`."""
    return read_turns(path, tokenizer, DOCUMENT_TOKENS // 2)


def shard_paths(folder: Path, num_tokens: int) -> list[Path]:
    """Return the shards that `write_text` wrote for so many tokens, in order."""
    paths: list[Path] = []
    num_found = 0
    for path in sorted(folder.glob("shard-*.npz")):
        if num_found >= num_tokens:
            break
        paths.append(path)
        num_found += len(Documents.load(path).token_ids)
    return paths


def hidden_path(shard: Path) -> Path:
    """Return where a shard's hidden states are: bfloat16 as uint16 [M, E], that of a document's last token is 0."""
    return shard.with_suffix(".hidden.npy")


@dataclass(frozen=True, slots=True)
class _Shard:
    documents: Documents
    hidden: Tensor
    """bfloat16 [M, E]."""


class _Writer:
    """Writes shards with a target.

    Documents of a shard begin together, so that most passes read few slots of keys and values.
    """

    def __init__(self, llm: LLM, seed: int, prompts: Path | None = None) -> None:
        self._llm, self._seed = llm, seed
        runner = Runner(llm.engine.runner.model, DOCUMENT_TOKENS, slot_grain=_SLOT_GRAIN)
        self._engine = Engine(runner, llm.profile, llm.engine.calibration, "copy")
        self._shape = ChatShape.of(llm.tokenizer)
        self._openings = [llm.tokenizer.encode(text, add_special_tokens=False) for text in OPENINGS]
        self._turns = None if prompts is None else read_prompts(prompts, llm.tokenizer)

    def write(self, shard: int, progress: Callable[[int], object]) -> _Shard:
        """Return one shard's documents and hidden states."""
        kind = RAW if self._shape is None or shard % 3 == 2 else CHAT
        numbers = range(shard * SHARD_DOCUMENTS, (shard + 1) * SHARD_DOCUMENTS)
        keys: Any = {"seed": self._seed, "vocab_size": self._llm.config.vocab_size}
        keys["end_ids"] = frozenset(self._llm.config.eos_ids)
        if self._turns is not None:
            kind = CHAT
            prompt_ids = self._shape.before if self._shape is not None else [self._first_id()]
            after = self._shape.after if self._shape is not None else []
            scripts = [answer_script(self._turns, after, number, **keys) for number in numbers]
        elif self._shape is not None and kind == CHAT:
            prompt_ids = self._shape.before
            scripts = [chat_script(self._shape, number, **keys) for number in numbers]
        else:
            prompt_ids = [self._first_id()]
            scripts = [raw_script(self._openings, number, **keys) for number in numbers]
        written = self._decode(prompt_ids, scripts, progress)
        documents = Documents.of(
            [text.token_ids for text in written],
            [kind] * len(written),
            [script.answer_start for script in scripts],
            [script.temperature for script in scripts],
        )
        return _Shard(documents, torch.cat([text.hidden for text in written]))

    def _first_id(self) -> int:
        tokenizer = self._llm.tokenizer
        first_id = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if first_id is None:
            raise InputError("the tokenizer has neither a BOS nor an EOS token to begin a text with: use `--prompts`")
        return first_id

    def _decode(
        self, prompt_ids: Sequence[int], scripts: Sequence[ScriptedChooser], progress: Callable[[int], object]
    ) -> list[_Text]:
        """Return the texts that the scripts draw, in order. All begin with the same prompt, computed once."""
        engine = self._engine
        begun = _Recorder()
        # The template never steps: others are forked from it.
        template = engine.start(self._request(prompt_ids, ScriptedChooser([]), begun))
        active: dict[DecodingSequence, int] = {}
        texts: dict[int, _Text] = {}
        num_done = 0
        try:
            for start in range(0, len(scripts), _BATCH):
                for number in range(start, min(start + _BATCH, len(scripts))):
                    request = self._request(prompt_ids, scripts[number], begun.fork())
                    active[engine.fork(template, request)] = number
                while active:
                    engine.step(list(active))
                    for sequence in [sequence for sequence in active if sequence.is_finished]:
                        recorder = sequence.request.drafter
                        assert isinstance(recorder, _Recorder)
                        hidden = torch.cat([*recorder.hidden, torch.zeros_like(recorder.hidden[-1])])  # [T, E]
                        texts[active.pop(sequence)] = _Text(sequence.token_ids, hidden)
                        num_done += len(sequence.token_ids)
                        engine.finish(sequence)
                    progress(num_done + sum(len(sequence.token_ids) for sequence in active))
        finally:
            for sequence in (template, *active):
                engine.finish(sequence)
        return [texts[number] for number in range(len(scripts))]

    def _request(self, prompt_ids: Sequence[int], script: ScriptedChooser, recorder: _Recorder) -> Request:
        return Request(
            prompt_ids=prompt_ids,
            chooser=script,
            drafter=recorder,
            max_new_tokens=DOCUMENT_TOKENS - len(prompt_ids),
            stop_ids=frozenset(),
            should_stop=script.is_over,
        )


@dataclass(frozen=True, slots=True)
class _Text:
    token_ids: list[int]
    hidden: Tensor
    """bfloat16 [T, E]."""


class _Recorder(NoDrafter):
    """Proposes nothing, and keeps the hidden states of the prompt and those that each token was chosen from."""

    def __init__(self, hidden: Sequence[Tensor] = ()) -> None:
        super().__init__(needs=frozenset({"hidden"}))
        self.hidden = list(hidden)

    def begin(self, prompt_ids: Sequence[int], hidden: Tensor | None = None) -> None:
        self.hidden = [] if hidden is None else [hidden.bfloat16()]  # [P - 1, E]

    def fork(self) -> _Recorder:
        return _Recorder(self.hidden)

    def observe(self, outcome: Outcome) -> None:
        assert outcome.hidden is not None
        self.hidden.append(outcome.hidden.bfloat16())  # [1, E]
