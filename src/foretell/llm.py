"""Text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from foretell.cache.kv_cache import Region
from foretell.conversation import Conversation
from foretell.drafters.calibration import Calibration
from foretell.drafters.catalog import check_drafter_name, make_drafter
from foretell.drafters.corpus import read_corpus
from foretell.drafters.draft_store import NONE, Target, load_draft
from foretell.drafters.drafter import Drafter, DraftSampling
from foretell.drafters.next_ids import NextIdsStore
from foretell.drafters.prompt_store import load_prompts
from foretell.engine.engine import CommitPolicy, Engine
from foretell.engine.kept import Kept
from foretell.engine.measure import quick_profile
from foretell.engine.prefixes import PrefixCache
from foretell.engine.prompting import Prompting, known_ranks
from foretell.engine.sequence import TARGET, Request
from foretell.errors import ConfigError
from foretell.hardware.pages import use_huge_pages
from foretell.hardware.profile import LatencyProfile
from foretell.hardware.store import ProfileStore, profile_key
from foretell.job import Job, noise_seed, step
from foretell.models.config import ModelConfig, read_generation_config
from foretell.models.files import cache_home, resolve
from foretell.models.fingerprint import model_fingerprint
from foretell.models.load import choose_context, choose_device, choose_dtype, load_model, set_threads
from foretell.output import OutputText
from foretell.params import SamplingParams, generation_defaults
from foretell.passes.runner import Runner, describe_compiled
from foretell.plato.embedded import answer
from foretell.plato.events import Answer, Event, last_answer
from foretell.plato.options import PlatoOptions
from foretell.prompt import Prompt, encode_prompt, prompt_list
from foretell.result import Chunk, Completion
from foretell.text.tokenizer import Message, Tokenizer
from foretell.verify.choose import TokenChooser
from foretell.verify.constraint import Grammars
from foretell.verify.rule import Rule, make_rule

MAX_BATCH = 32
"""Sequences that are decoded at once."""


class LLM:
    """A model that answers several tokens at a time, and says what it would have said one by one.

    Args:
        model: Hugging Face id, folder, `.gguf` file, or None for the default model.
        dtype: "auto" is bfloat16 where the machine computes in it, else float32.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of a pass; None leaves torch's choice.
        compile: run passes that were compiled once for a few row counts; needs a C++ compiler the first time.
        drafter: who proposes, unless a request says otherwise; see `foretell.drafters.catalog`.
        draft: a draft model: a folder by `foretell train draft`, any model with the same tokenizer, "none", or None for
            what was trained here or ships for this model.
        prompts: a folder of prompt tokens by `foretell train prompts`, "none", or None, likewise.
        context_tokens: longest sequence; None is the model's own limit.
        corpus: UTF-8 text that the suffix drafter may quote.
        notify: called with one line before something that takes long: a download, a conversion, a compilation.

    Raises:
        ModelError: the model cannot be found, read, or is of a kind that is refused.
        ConfigError: an argument is wrong.
        CompileError: `compile` cannot work here.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        compile: bool = False,
        drafter: str = "all",
        draft: str | Path | None = None,
        prompts: str | Path | None = None,
        context_tokens: int | None = None,
        corpus: Path | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        set_threads(threads)
        torch_device = choose_device(device)
        torch_dtype = choose_dtype(dtype, torch_device)
        check_drafter_name(drafter)
        files = resolve(model, notify=notify)
        self.tokenizer = Tokenizer.load(files.folder)
        model_ = load_model(files.folder, dtype=torch_dtype, device=torch_device)
        self.config: ModelConfig = model_.config
        self._grammars = Grammars(self.tokenizer, self.config.eos_ids)
        self.generation_defaults = generation_defaults(read_generation_config(files.folder))
        self.drafter = drafter
        self._corpus = read_corpus(corpus, self.tokenizer)
        self._source, self.folder = files.source, files.folder
        self.fingerprint = fingerprint = model_fingerprint(files.folder, self.tokenizer, self.config.vocab_size)
        self.next_ids_store = NextIdsStore(cache_home() / "next_ids", fingerprint, self.config.vocab_size)
        self.next_ids = self.next_ids_store.find(notify)
        max_tokens = choose_context(context_tokens, self.config.max_positions)
        target = Target(
            folder=files.folder,
            config=self.config,
            tokenizer=self.tokenizer,
            fingerprint=fingerprint,
            dtype=torch_dtype,
            device=torch_device,
            context_tokens=max_tokens,
            is_compiled=compile,
        )
        self.prompts = load_prompts(prompts, target, notify)
        compiled = None
        if compile:
            from foretell.passes.compiled import load_compiled

            compiled = load_compiled(
                model_, files.folder, cache_home() / "compiled", context_tokens=max_tokens, notify=notify
            )
        runner = Runner(model_, max_tokens, compiled)
        self.profile_store = ProfileStore(cache_home() / "profiles")
        self.profile_key = profile_key(files, model_, is_compiled=compile)
        known = self.profile_store.load(self.profile_key)
        calibration = Calibration() if known is None else Calibration.from_json(known.calibration)
        self.draft = load_draft(draft, target, calibration, notify)
        self._off = [name for name, choice in (("draft", draft), ("prompts", prompts)) if choice == NONE]
        is_cpu = torch_device.type == "cpu"
        if is_cpu:
            use_huge_pages()
        profile = known or quick_profile(runner, self.profile_key)
        commit: CommitPolicy = "canonical" if is_cpu and torch_dtype == torch.bfloat16 else "copy"
        prompting = None
        if self.prompts is not None:
            tokens = self.prompts.tokens
            ranks = None if known is None else known_ranks(known.guess_ranks, tokens)
            prompting = Prompting(tokens, self.config.vocab_size, ranks)
        self.engine = Engine(runner, profile, calibration, commit, prompting)

    @property
    def profile(self) -> LatencyProfile:
        """The measured T(N) that sizes drafts."""
        return self.engine.profile

    @property
    def settings(self) -> Mapping[str, Any]:
        """The effective settings."""
        runner = self.engine.runner
        return {
            "model": self._source,
            "dtype": str(runner.model.dtype).removeprefix("torch."),
            "device": str(runner.model.device),
            "threads": torch.get_num_threads(),
            "compile": "no" if runner.compiled is None else describe_compiled(runner.compiled),
            "drafter": self.drafter,
            "context_tokens": runner.context_tokens,
            "commit": self.engine.commit_policy,
            "draft": "none" if self.draft is None else self.draft.source,
            "prompts": "none" if self.prompts is None else self.prompts.source,
            "next_ids": "none" if self.next_ids is None else self.next_ids.origin,
            "profile": "tuned" if self.profile.is_bit_exact is not None else "quick measurement",
        }

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None, *, drafter: str | None = None
    ) -> list[Completion]:
        """Continue prompts as they are, several at once; the `n` samples of a prompt follow each other.

        Args:
            prompts: a text or its token ids, or several of them.
            sampling: how to choose tokens; greedy where None.
            drafter: who proposes, in place of the LLM's own.

        Raises:
            InputError: a prompt is empty.
            CapacityError: a prompt does not fit the context.
            ConfigError: a parameter names an id beyond the vocabulary, the drafter is unknown or does not draw what the
                verification tests, or `json_schema` or `regex` cannot be followed.
        """
        sampling = sampling or SamplingParams()
        waiting = [encode_prompt(prompt, self.tokenizer) for prompt in prompt_list(prompts)]
        for prompt_ids in waiting:
            self.engine.check_prompt(prompt_ids)
        finished: dict[tuple[int, int], Completion] = {}
        active: dict[Job, tuple[int, int]] = {}
        next_prompt = 0
        try:
            while active or next_prompt < len(waiting):
                while next_prompt < len(waiting) and (not active or len(active) + sampling.n <= MAX_BATCH):
                    for sample, job in enumerate(self._start_samples(waiting[next_prompt], sampling, drafter)):
                        active[job] = (next_prompt, sample)
                    next_prompt += 1
                for job in self.step(list(active)):
                    finished[active.pop(job)] = job.completion()
                    self.finish(job)
        finally:
            for job in active:
                self.finish(job)
        return [finished[key] for key in sorted(finished)]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, drafter: str | None = None
    ) -> Iterator[Chunk]:
        """Continue a prompt as it is, yielding every token as soon as it is certain; the last chunk has the result.

        Raises:
            ConfigError: `sampling.n` is above 1; and what `generate` raises.
        """
        return self._stream(encode_prompt(prompt, self.tokenizer), sampling or SamplingParams(), drafter, None)

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, *, drafter: str | None = None
    ) -> Completion:
        """Answer a conversation through the model's chat template; of several samples the first is returned.

        Raises:
            InputError: the model has no chat template, or a message is malformed.
        """
        return self.generate(self.tokenizer.encode_chat(messages), sampling, drafter=drafter)[0]

    def stream_chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, *, drafter: str | None = None
    ) -> Iterator[Chunk]:
        """Answer a conversation, yielding every token as soon as it is certain; raises as `chat` and `stream` do."""
        return self.stream(self.tokenizer.encode_chat(messages), sampling, drafter=drafter)

    def conversation(self) -> Conversation:
        """Return a conversation that keeps its keys and values between turns."""
        return Conversation(self.tokenizer, Kept(self.engine), self._stream)

    def plan_and_generate(self, question: str, options: PlatoOptions | None = None) -> Answer:
        """Plan an answer and write its independent parts at once (Plato, arXiv:2402.12280).

        Unlike all else here this changes the answer; each part by itself is decoded losslessly.

        Raises:
            InputError: the question is empty, or the model has no chat template.
            ConfigError: the library that holds plans to their grammar is not installed.
            CapacityError: the question does not fit the context.
        """
        return last_answer(self.stream_plan(question, options))

    def stream_plan(self, question: str, options: PlatoOptions | None = None) -> Iterator[Event]:
        """Do what `plan_and_generate` does, yielding what happens as it happens; closing the iterator cancels."""
        return answer(self, question, options)

    @cached_property
    def prefixes(self) -> PrefixCache:
        """Keys and values of prompt beginnings that planned answers share."""
        return PrefixCache(self.engine.runner.cache)

    # Sequences that join and leave between passes, for callers that schedule them

    def start(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        drafter: str | None = None,
        sample: int = 0,
        reuse: Region | None = None,
        is_eager: bool = False,
        priority: int = 0,
    ) -> Job:
        """Prefill a prompt and return the job that goes on with it; give it back by `finish`.

        Args:
            prompt_ids: the prompt.
            sampling: how to choose tokens.
            drafter: who proposes, in place of the LLM's own.
            sample: number of the sample or branch, which has noise of its own.
            reuse: slots that hold the prompt's first tokens already; the job takes them, or they are given back.
            is_eager: share passes with other jobs even where there are compiled ones, see `Request`.
            priority: who goes first where a step has too few rows for all, see `Request`.

        Raises:
            what `generate` raises.
        """
        try:
            self.engine.check_prompt(prompt_ids)
            output, seed = OutputText(self.tokenizer, sampling.stop), noise_seed(sampling)
            request = self._request(list(prompt_ids), sampling, drafter, output, seed, sample)
        except BaseException:
            if reuse is not None:
                self.engine.runner.cache.free(reuse)
            raise
        return Job(self.engine.start(replace(request, is_eager=is_eager, priority=priority), reuse=reuse), output, seed)

    def step(self, jobs: Sequence[Job], *, max_rows: int | None = None) -> list[Job]:
        """Run one step of all these jobs; returns those that ended in it. `max_rows`: see `Engine.step`."""
        return step(self.engine, jobs, max_rows)

    def finish(self, job: Job) -> None:
        """Give back a job's slots, whether it has ended or not."""
        self.engine.finish(job.sequence)

    # One request

    def _stream(
        self, prompt_ids: list[int], sampling: SamplingParams, drafter: str | None, kept: Kept | None
    ) -> Iterator[Chunk]:
        if sampling.n > 1:
            raise ConfigError(f"`n`={sampling.n} cannot be streamed: use `generate`")
        self.engine.check_prompt(prompt_ids)
        output, seed = OutputText(self.tokenizer, sampling.stop), noise_seed(sampling)
        request = self._request(prompt_ids, sampling, drafter, output, seed, 0)
        # The result rides on the last chunk. Where a stop string may drop all that a step brings, one waits for it.
        return self._stream_job(request, output, seed, 1 if sampling.stop else 0, kept)

    def _stream_job(
        self, request: Request, output: OutputText, seed: int | None, num_waiting: int, kept: Kept | None
    ) -> Iterator[Chunk]:
        reuse = kept.take(request.prompt_ids) if kept is not None else None
        job = Job(self.engine.start(request, reuse=reuse), output, seed)
        try:
            num_shown = 0
            while not job.sequence.is_finished:
                self.step([job])
                last = max(num_shown, len(job.chunks) - (1 if job.sequence.is_finished else num_waiting))
                yield from job.chunks[num_shown:last]
                num_shown = last
            completion = job.completion()
            final = job.chunks[-1] if job.chunks else Chunk(job.sequence.token_ids[-1], "", TARGET)
            final.completion = completion
            yield final
        finally:
            if kept is not None:
                kept.keep(job.sequence)
                request.drafter.close()
            else:
                self.finish(job)

    def _start_samples(self, prompt_ids: list[int], sampling: SamplingParams, drafter: str | None) -> list[Job]:
        seed = noise_seed(sampling)
        jobs: list[Job] = []
        try:
            for sample in range(sampling.n):
                output = OutputText(self.tokenizer, sampling.stop)
                request = self._request(prompt_ids, sampling, drafter, output, seed, sample)
                if jobs:
                    request = replace(request, drafter=jobs[0].sequence.request.drafter.fork())
                    sequence = self.engine.fork(jobs[0].sequence, request)
                else:
                    sequence = self.engine.start(request)
                jobs.append(Job(sequence, output, seed))
        except BaseException:
            for job in jobs:
                self.finish(job)
            raise
        return jobs

    def _request(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        drafter: str | None,
        output: OutputText,
        seed: int | None,
        sample: int,
    ) -> Request:
        eos_ids = frozenset(self.config.eos_ids)
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        chooser = TokenChooser(
            sampling,
            num_prompt_tokens=len(prompt_ids),
            eos_ids=eos_ids,
            seed=seed,
            sequence_key=sample,
            vocab_size=self.config.vocab_size,
            constraint=self._grammars.constraint(sampling),
        )
        rule = make_rule(sampling, chooser, seed, sample)
        return Request(
            prompt_ids=prompt_ids,
            chooser=chooser,
            drafter=self._drafter(drafter or self.drafter, stop_ids, rule),
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=stop_ids,
            should_stop=output.push,
            num_logprobs=sampling.logprobs,
            draft_sampling=None if seed is None else DraftSampling.of(sampling, seed, sample),
            rule=rule,
        )

    def _drafter(self, name: str, stop_ids: frozenset[int], rule: Rule | None) -> Drafter:
        return make_drafter(
            name,
            eos_ids=stop_ids,
            corpus=self._corpus,
            next_ids=None if self.next_ids is None else self.next_ids.table,
            draft=None if self.draft is None else self.draft.engine,
            ngram_table=None if self.draft is None else self.draft.ngram_table,
            prompts=None
            if self.prompts is None
            else partial(self.prompts.drafter, pass_s=self.engine.drafting.curve(0)),
            off=self._off,
            drawing_rule=rule.name if rule is not None and rule.needs_draws else None,
        )
