"""The decode path, the only one: propose → buy → pack → forward → verify → commit → emit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from foretell.cache.kv_cache import Region
from foretell.drafters.calibration import Calibration
from foretell.drafters.drafter import Guesses, Outcome
from foretell.engine.drafting import Draft, Drafting
from foretell.engine.judgement import verify
from foretell.engine.prompting import Prompting, use_of
from foretell.engine.sequence import TARGET, DecodingSequence, Emission, Request
from foretell.engine.turns import take_turns
from foretell.errors import CapacityError, InputError, NumericsError
from foretell.hardware.profile import LatencyProfile
from foretell.passes.rows import Rows
from foretell.passes.runner import MAX_ROWS, Runner
from foretell.tree.pack import PackedTree
from foretell.verify.match import Verdict

PREFILL_ROWS = 256
"""Rows of a prefill chunk."""

CommitPolicy = Literal["canonical", "copy"]
"""`canonical`: only rows of the first chain commit, bit for bit as plain decoding; `copy`: all accepted rows do."""


class Engine:
    """Decodes sequences, several tokens a pass where drafts are accepted.

    Args:
        runner: the target and its cache.
        profile: measured T(N), which sizes every draft.
        calibration: acceptance estimates, learned from every step.
        commit: see `CommitPolicy`.
        prompting: prompt tokens that drafters may have guess for them.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        profile: LatencyProfile,
        calibration: Calibration,
        commit: CommitPolicy,
        prompting: Prompting | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner, self.calibration = runner, calibration
        self.commit_policy, self._clock = commit, clock
        self.prompting = prompting
        if prompting is not None:
            prompting.tokens.install(runner)
        self.drafting = Drafting(runner, profile, calibration, prompting, clock)

    @property
    def profile(self) -> LatencyProfile:
        """Measured T(N), which sizes every draft."""
        return self.drafting.profile

    @profile.setter
    def profile(self, profile: LatencyProfile) -> None:
        self.drafting.profile = profile

    def start(self, request: Request, *, reuse: Region | None = None) -> DecodingSequence:
        """Prefill a prompt. Where that fails or is interrupted, all slots are given back, those of `reuse` too.

        Args:
            request: what to decode.
            reuse: a region that already holds keys and values of the prompt's first tokens; the sequence takes it.

        Raises:
            InputError: the prompt is empty.
            CapacityError: the prompt leaves no room for a token; the region stays the caller's.
        """
        prompt_ids = request.prompt_ids
        self.check_prompt(prompt_ids)
        started_s = self._clock()
        cache = self.runner.cache
        region = reuse if reuse is not None else cache.allocate(min(len(prompt_ids) + MAX_ROWS, cache.shape.max_slots))
        sequence = DecodingSequence(request, region, list(prompt_ids), started_s=started_s)
        sequence.stats.num_prompt_tokens = len(prompt_ids)
        try:
            hidden = self._prefill(sequence)
            request.drafter.begin(prompt_ids, hidden)
        except BaseException:
            self.finish(sequence)
            raise
        sequence.stats.prefill_s = self._clock() - started_s
        return sequence

    def fork(self, sequence: DecodingSequence, request: Request) -> DecodingSequence:
        """Return a sequence for another request with the same prompt, before `sequence` has taken a step.

        The request's drafter has begun already, or is a fork of one that has. Where this fails, it is closed.
        """
        assert sequence.num_new_tokens == 0
        assert list(request.prompt_ids) == sequence.token_ids
        try:
            region = self.runner.cache.fork(sequence.region)
        except BaseException:
            request.drafter.close()
            raise
        fork = DecodingSequence(request, region, list(request.prompt_ids), started_s=sequence.started_s)
        fork.stats.num_prompt_tokens = len(request.prompt_ids)
        fork.stats.prefill_s = sequence.stats.prefill_s
        return fork

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise where a prompt cannot be decoded.

        Raises:
            InputError: the prompt is empty, or holds an id that the model does not know.
            CapacityError: the prompt leaves no room for a token.
        """
        if len(prompt_ids) == 0:
            raise InputError("the prompt is empty: give at least one token")
        limit = self.runner.context_tokens
        if len(prompt_ids) >= limit:
            raise CapacityError(f"the prompt has {len(prompt_ids)} tokens, the context holds {limit}: shorten it")
        vocab_size = self.runner.model.config.vocab_size
        unknown = next((token_id for token_id in prompt_ids if not 0 <= token_id < vocab_size), None)
        if unknown is not None:
            raise InputError(f"the prompt holds token id {unknown}, the model has ids below {vocab_size}: check it")

    def step(self, sequences: Sequence[DecodingSequence], *, max_rows: int | None = None) -> list[list[Emission]]:
        """Run one pass for each pool of these sequences; returns what each emitted, in order.

        Args:
            sequences: none has ended.
            max_rows: of all together, shared alike. With fewer rows than sequences they take turns, see `take_turns`.
                A rule that tests draws keeps its own trees: what a seed gives must not depend on who else is there.

        Raises:
            NumericsError: the model's logits hold NaN, or no token is left to choose from.
        """
        assert max_rows is None or max_rows > 0
        chosen = take_turns(sequences, max_rows)
        num_sharing = sum(map(self._may_share, chosen))
        share = None if max_rows is None else max_rows // len(chosen)
        drafts = {
            id(sequence): self.drafting.draft(sequence, num_sharing if self._may_share(sequence) else 1, share)
            for sequence in chosen
        }
        emissions: dict[int, list[Emission]] = {}
        for group in self._groups(chosen):
            self._pass(group, [drafts[id(sequence)] for sequence in group], emissions)
        return [emissions.get(id(sequence), []) for sequence in sequences]

    def finish(self, sequence: DecodingSequence) -> None:
        """Give back the sequence's slots, and what its drafter holds."""
        self.runner.cache.free(sequence.region)
        sequence.request.drafter.close()

    def _prefill(self, sequence: DecodingSequence) -> Tensor | None:
        """Compute keys and values of all tokens but the last, which is the first pass's root.

        Returns the hidden states of what was computed, [C, E], where the drafter needs them.
        """
        region, token_ids = sequence.region, sequence.token_ids
        keeps_hidden, hidden = "hidden" in sequence.request.drafter.needs, []
        self.runner.cache.reserve(region, len(token_ids))
        while region.length < len(token_ids) - 1:
            chunk = token_ids[region.length : min(region.length + PREFILL_ROWS, len(token_ids) - 1)]
            states = self.runner.prefill(Rows.chain(region, chunk))
            if keeps_hidden:
                hidden.append(states)
        return torch.cat(hidden) if hidden else None

    # Forward

    def _may_share(self, sequence: DecodingSequence) -> bool:
        return self.runner.compiled is None or sequence.request.is_eager

    def _groups(self, sequences: Sequence[DecodingSequence]) -> list[list[DecodingSequence]]:
        """Return sequences that share a pass, their regions moved side by side. A compiled pass takes one."""
        cache = self.runner.cache
        for sequence in sequences:
            cache.reserve(sequence.region, sequence.region.length + MAX_ROWS)
        groups = [[sequence] for sequence in sequences if not self._may_share(sequence)]
        sharing = [sequence for sequence in sequences if self._may_share(sequence)]
        by_capacity = [
            list(run) for _, run in groupby(sorted(sharing, key=_capacity), key=_capacity)
        ]  # one for each pool
        if len(by_capacity) > 1 and self._is_faster_together(by_capacity):
            by_capacity = [sharing]
        for group in by_capacity:
            cache.gather([sequence.region for sequence in group])
            groups.append(sorted(group, key=lambda sequence: sequence.region.index))
        return groups

    def _is_faster_together(self, groups: Sequence[Sequence[DecodingSequence]]) -> bool:
        """Return whether one pass that reads as many slots of all as of the longest beats a pass for each group."""
        longest = max(sequence.region.length for group in groups for sequence in group)
        apart_s = sum(
            self.profile.seconds(len(group), max(sequence.region.length for sequence in group)) for group in groups
        )
        return self.profile.seconds(sum(map(len, groups)), longest) < apart_s

    def _pass(
        self,
        group: list[DecodingSequence],
        drafts: list[Draft],
        emissions: dict[int, list[Emission]],
    ) -> None:
        rows = [
            Rows(
                sequence.region,
                draft.tree.token_ids,
                draft.tree.depths,
                draft.tree.mask(),
                is_eager=sequence.request.is_eager,
            )
            for sequence, draft in zip(group, drafts, strict=True)
        ]
        forward_started_s = self._clock()
        output = self.runner.decode(rows)
        forward_s = self._clock() - forward_started_s
        for index, (sequence, draft) in enumerate(zip(group, drafts, strict=True)):
            sequence.stats.forward_s += forward_s
            sequence.stats.target_bytes += self.runner.weight_bytes // len(group)
            sequence.stats.target_bytes += self.runner.visible_bytes(sequence.region.length)
            emissions[id(sequence)] = self._settle(sequence, draft, output.logits[index], output.hidden[index])
            self._record_time(sequence, draft, len(emissions[id(sequence)]))

    # Verify, commit, emit

    def _settle(self, sequence: DecodingSequence, draft: Draft, logits: Tensor, hidden: Tensor) -> list[Emission]:
        """Accept what the target would have chosen, commit its rows, and emit it token by token."""
        try:
            verdict = verify(sequence, draft.tree, logits)
        except NumericsError:
            self.runner.cache.wipe(sequence.region)
            raise
        self._count(sequence, draft, verdict)
        emitted = self._emit(sequence, draft, verdict, logits)
        num_kept = len(emitted)
        rows = [0, *verdict.accepted][:num_kept]
        self.runner.cache.commit_rows(sequence.region, rows)
        assert sequence.region.length == len(sequence.token_ids) - 1
        self._observe(sequence, draft.tree, emitted, [0, *verdict.accepted], logits, hidden)
        return emitted

    def _emit(self, sequence: DecodingSequence, draft: Draft, verdict: Verdict, logits: Tensor) -> list[Emission]:
        """Append the confirmed tokens one by one until something ends the sequence; keep the others as provisional."""
        tree, request = draft.tree, sequence.request
        path = [0, *verdict.accepted]  # row whose logits chose each token
        tokens = [*(tree.token_ids[row] for row in verdict.accepted), verdict.last_token]
        sources = [*(tree.sources[row] for row in verdict.accepted), TARGET]
        num_confirmed = len(tokens)
        if self.commit_policy == "canonical" and request.rule is None:  # other rules leave no plain output to equal
            num_confirmed = sum(1 for index, row in enumerate(path) if row == index)
        emitted: list[Emission] = []
        for row, token_id, source in zip(path[:num_confirmed], tokens, sources, strict=False):
            logprobs = None
            if request.num_logprobs is not None:
                logprobs = request.chooser.logprobs(logits[row], token_id, request.num_logprobs)
            emitted.append(Emission(token_id, source or TARGET, logprobs))
            self._append(sequence, token_id)
            if sequence.is_finished:
                break
        sequence.provisional = tokens[num_confirmed:]
        sequence.provisional_sources = sources[num_confirmed:]
        return emitted

    def _append(self, sequence: DecodingSequence, token_id: int) -> None:
        request = sequence.request
        sequence.token_ids.append(token_id)
        sequence.stats.num_output_tokens += 1
        is_called_off = request.should_stop is not None and request.should_stop(token_id)
        # A stop is told before a limit: an output that ends by itself in its last token was not cut (sglang#31599).
        if is_called_off or token_id in request.stop_ids:
            sequence.finish_reason = "stop"
        elif sequence.num_new_tokens >= request.max_new_tokens:
            sequence.finish_reason = "length"
        elif len(sequence.token_ids) >= self.runner.context_tokens:
            sequence.finish_reason = "context"

    def _count(self, sequence: DecodingSequence, draft: Draft, verdict: Verdict) -> None:
        stats, tree = sequence.stats, draft.tree
        first_drafted = 1 + draft.num_provisional
        stats.num_passes += 1
        stats.num_rows += len(tree)
        stats.num_refed_rows += draft.num_provisional
        stats.num_plain_passes += len(tree) == first_drafted
        stats.drafted.update(tree.sources[first_drafted:])
        stats.accepted.update(tree.sources[row] for row in verdict.accepted if row >= first_drafted)
        if sequence.request.rule is not None:
            sequence.drawn.record(tree, verdict)
            return  # acceptance under another rule says little about match
        walked = [*(tree.token_ids[row] for row in verdict.accepted), verdict.last_token]
        if draft.proposed is not None and tree.token_ids[1:first_drafted] == walked[: draft.num_provisional]:
            is_sampled = sequence.request.draft_sampling is not None
            self.calibration.update(draft.proposed, walked[draft.num_provisional :], is_sampled=is_sampled)

    def _observe(
        self,
        sequence: DecodingSequence,
        tree: PackedTree,
        emitted: list[Emission],
        path: list[int],
        logits: Tensor,
        hidden: Tensor,
    ) -> None:
        """Tell the drafter what was emitted, and compute only what it asked for. `path`: rows that chose tokens."""
        drafter, num_emitted = sequence.request.drafter, len(emitted)
        rows, rows_ahead = path[:num_emitted], path[num_emitted : num_emitted + len(sequence.provisional)]
        needs_hidden = "hidden" in drafter.needs
        guesses = self._guesses(tree, path[-1], logits, hidden) if "guesses" in drafter.needs else None
        sequence.num_guesses = 0 if guesses is None else guesses.hidden.shape[1]
        outcome = Outcome(
            [emission.token_id for emission in emitted],
            hidden=hidden[rows] if needs_hidden else None,
            ahead_hidden=hidden[rows_ahead] if needs_hidden and rows_ahead else None,
            top_ids=_top_ids(logits[rows]) if "top_ids" in drafter.needs else None,
            guesses=guesses,
        )
        drafter.observe(outcome)

    def _guesses(self, tree: PackedTree, row: int, logits: Tensor, hidden: Tensor) -> Guesses | None:
        """Return what the prompt tokens behind the last accepted row computed; None where there are none."""
        if self.prompting is None or row not in tree.prompts:
            return None
        rows, num_chains = tree.prompts[row], self.prompting.ids.num_chains
        places = slice(rows.start, rows.stop)
        return Guesses(
            hidden[places].clone().view(num_chains, -1, hidden.shape[-1]),  # [C, m, E]; the next pass may write there
            logits[places].clone().view(num_chains, -1, logits.shape[-1]),  # [C, m, V]
        )

    def _record_time(self, sequence: DecodingSequence, draft: Draft, num_emitted: int) -> None:
        now_s, stats = self._clock(), sequence.stats
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now_s
            stats.first_token_s = now_s - sequence.started_s
            stats.num_first_tokens = num_emitted
        stats.decode_s = now_s - sequence.first_token_at_s
        stats.tokens_per_pass_counts[num_emitted] += 1
        if draft.proposed is not None or draft.num_provisional > 0:
            # Expected seconds, not this pass's own: other work on the machine must not speak against drafting.
            is_for_next = bool(draft.tree.prompts) and draft.tree.num_nodes == 1 + draft.num_provisional
            sequence.gate.record(num_emitted, draft.expected_s, draft.plain_s, is_for_next=is_for_next)
        if self.prompting is not None:
            self.prompting.record(use_of(sequence), num_emitted, draft.expected_s)


def _capacity(sequence: DecodingSequence) -> int:
    return sequence.region.capacity


@torch.inference_mode()
def _top_ids(logits: Tensor) -> list[list[int]]:
    """Return the 8 most likely ids of each row [A, V], best first."""
    top: list[list[int]] = logits.float().topk(8).indices.tolist()  # [A, 8]
    return top
