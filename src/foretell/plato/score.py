"""How likely a model finds an answer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from foretell.engine.engine import PREFILL_ROWS
from foretell.passes.rows import Rows
from foretell.plato.host import Host

Score = Callable[[str, str], float]
"""Takes a question and an answer's text, returns the target's mean log-probability per token of the answer."""


def target_score(llm: Host) -> Score:
    """Return the score by a model itself: temperature 1, the answer standing where plain decoding would write it.

    Headings count as the answer's tokens, the end does not. What the context has no room for is left out.

    Raises:
        CapacityError: calling it with a question that does not fit the context.
    """

    def score(question: str, text: str) -> float:
        prompt_ids = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
        llm.engine.check_prompt(prompt_ids)
        answer_ids = llm.tokenizer.encode(text, add_special_tokens=False)
        runner = llm.engine.runner
        token_ids = [*prompt_ids, *answer_ids][: runner.context_tokens]
        region = runner.cache.allocate(len(token_ids))
        try:
            total = 0.0
            for start in range(0, len(token_ids) - 1, PREFILL_ROWS):
                stop = min(start + PREFILL_ROWS, len(token_ids) - 1)
                hidden = runner.prefill(Rows.chain(region, token_ids[start:stop]))  # [N, E]
                first = max(start, len(prompt_ids) - 1)  # the row whose next token is the answer's first
                if first < stop:
                    total += _log_probability(llm, hidden[first - start :], token_ids[first + 1 : stop + 1])
        finally:
            runner.cache.free(region)
        return total / (len(token_ids) - len(prompt_ids))

    return score


@torch.inference_mode()
def _log_probability(llm: Host, hidden: torch.Tensor, next_ids: list[int]) -> float:
    """Return the sum of log-probabilities of the tokens after these rows; `hidden` [N, E]."""
    model = llm.engine.runner.model
    logits = model.logits(hidden)[:, : model.config.vocab_size].float()  # [N, V]
    targets = torch.tensor(next_ids, device=logits.device)  # [N]
    return -float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
