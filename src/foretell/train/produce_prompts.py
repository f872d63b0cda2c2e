"""From a target to its prompt tokens: text, training, files, and what they say of themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foretell.drafters.prompt_store import WEIGHTS, is_prompts, write_prompts
from foretell.errors import ConfigError
from foretell.llm import LLM
from foretell.models.draft_files import draft_digest, read_draft
from foretell.models.gpt2 import GPT2
from foretell.models.llama import Llama
from foretell.passes.compiled import plain_copy
from foretell.train.draft import TargetTensors
from foretell.train.finished import is_finished, settings_digest
from foretell.train.produce import ALWAYS_KEPT, check_place, own_examples, training_facts
from foretell.train.prompt_card import prompt_card
from foretell.train.prompt_module import PromptRecipe
from foretell.train.prompts import PromptProgress, SlotAccuracy, TrainedPrompts, train_prompts


def produce_prompts(
    llm: LLM,
    out: Path,
    recipe: PromptRecipe,
    num_tokens: int,
    *,
    prompts: Path | None = None,
    text: Path | None = None,
    draft: Path | None = None,
    written: Callable[[int, int], None] | None = None,
    trained: Callable[[PromptProgress], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> TrainedPrompts | None:
    """Let a target write text, train prompt tokens on it, and write them with their card; see `produce_draft`.

    With `draft`, a folder by `foretell train draft`, they are that draft model's, and still guess what the target says.

    Raises:
        ModelError: the draft is missing, damaged, or of another target.
        InputError: there is too little text, or a shard of it is damaged.
        ConfigError: `out` holds something else or cannot be written, gradients cannot pass through this target, or the
            recipe is of no use for a draft.
    """
    if draft is not None:
        recipe.check_for_draft()
    out = check_place(out, is_prompts, "prompt tokens")
    model, kept_ids = llm.engine.runner.model, None
    target = TargetTensors.read(llm.config, llm.folder, llm.fingerprint)
    if draft is not None:
        model = read_draft(draft, llm.folder, llm.config, llm.fingerprint, dtype=model.dtype, device=model.device)
        target, kept_ids = replace(target, config=model.config, fingerprint=draft_digest(draft)), model.kept_ids
    if not isinstance(model, Llama | GPT2):
        raise ConfigError(
            f"prompt tokens need a decoder of foretell's own, {model.config.model_type} has none: use another drafter"
        )
    if recipe.has_lora and not isinstance(model, Llama):
        raise ConfigError(
            f"`capacity`={recipe.capacity!r} needs a llama-like model, this one is {model.config.model_type}: take "
            "embeddings or sampler"
        )
    started_s = time.perf_counter()
    examples = own_examples(llm, num_tokens, recipe.seed, prompts, written, text=text)
    text_s = time.perf_counter() - started_s
    settings = settings_digest(recipe, examples, target.fingerprint)
    if is_finished(out, WEIGHTS, settings, note):
        return None
    checkpoint = out.with_name(f"{out.name}.training.pt")
    result = train_prompts(
        model,
        plain_copy(model, model.config.max_positions),
        target,
        examples,
        recipe,
        checkpoint,
        always_kept=frozenset(range(ALWAYS_KEPT)) | frozenset(llm.config.eos_ids),
        kept_ids=kept_ids,
        progress=trained,
    )
    facts = training_facts(llm, recipe, examples, result.kept_ids, result.scores, text_s) | {"settings": settings}
    write_prompts(
        out,
        result.tensors,
        result.kept_ids,
        result.ranks,
        fingerprint=target.fingerprint,
        card=prompt_card(facts),
        provenance=facts,
    )
    checkpoint.unlink(missing_ok=True)
    return result


def accuracy_line(name: str, accuracy: SlotAccuracy) -> str:
    """Return one line that tells how good guesses are."""
    slots = ", ".join("/".join(f"{share:.2f}" for share in shares) for shares in accuracy.by_slot)
    return f"{name}: top-1/5/10 {slots}"
