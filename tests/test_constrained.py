"""`json_schema` and `regex`, from text to text, on a tiny random model whose tokens are bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import ConfigError, NumericsError
from foretell.hardware.profile import LatencyProfile
from foretell.llm import LLM
from foretell.params import SamplingParams
from foretell.result import Completion
from tiny import EOS, save_model

FLAT = LatencyProfile(key={"model": "flat"}, contexts=(0,), num_rows=(1, 16), pass_s=((1.0, 1.0),))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "dark blue"]},
        "count": {"type": "integer", "minimum": -5, "maximum": 120},
        "names": {"type": "array", "items": {"type": "string", "pattern": "^[A-Zé][a-c]{1,4}$"}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 6},
    },
    "required": ["colour", "count", "names"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ \n]{1,2}"},
}
REGEX = r"(?:[0-9]{1,2}\. (ab|cd|é)[e-g]{1,4};\n){2,3}"
SAMPLINGS = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.5, "top_k": 20, "seed": 2, "n": 2}]
PROMPTS = ["12. abe;\n13. cdf;\n", '{"colour": "red", "count": 3']


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_HOME", str(tmp_path_factory.mktemp("home")))
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """Rows are free, so that drafts are bought; the draft is the model itself, which no grammar holds back."""
    llm = LLM(folder, dtype="float32", threads=1, draft=folder)
    llm.engine.profile, llm.engine.commit_policy = FLAT, "canonical"
    return llm


def follows_schema(text: str) -> bool:
    """Say what a validator of JSON Schema would say."""
    value = json.loads(text)
    names = value["names"]
    return (
        list(value) in (["colour", "count", "names"], ["colour", "count", "names", "note"])
        and value["colour"] in SCHEMA["properties"]["colour"]["enum"]
        and isinstance(value["count"], int)
        and -5 <= value["count"] <= 120
        and len(names) <= 3
        and all(re.fullmatch("[A-Zé][a-c]{1,4}", name) for name in names)
        and (value.get("note") is None or len(value["note"]) <= 6)
    )


def same(left: Completion, right: Completion) -> bool:
    return (left.text, left.token_ids, left.finish_reason) == (right.text, right.token_ids, right.finish_reason)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "two samples"])
@pytest.mark.parametrize("grammar", [{"json_schema": SCHEMA}, {"regex": REGEX}], ids=["schema", "regex"])
def test_every_drafter_says_the_same_and_it_matches(llm: LLM, grammar: Any, sampling: Any) -> None:
    params = SamplingParams(**grammar, **sampling)
    plain = llm.generate(PROMPTS, params, drafter="none")
    for completion in plain:
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] == EOS
        assert follows_schema(completion.text) if params.regex is None else re.fullmatch(REGEX, completion.text)
    for name in ("lookup", "ngram", "recycle", "draft", "all"):
        drafted = llm.generate(PROMPTS, params, drafter=name)
        assert all(same(left, right) for left, right in zip(plain, drafted, strict=True)), name


@pytest.mark.parametrize("rule", ["rejection", "traversal", "typical"])
def test_every_rule_keeps_to_the_grammar(llm: LLM, rule: Any) -> None:
    """Whether a draft pays is a matter of seconds here; the laws are in tests/verify."""
    for seed in range(4):
        params = SamplingParams(regex=REGEX, temperature=0.5, seed=seed, verification=rule, allow_lossy=True)
        (completion,) = llm.generate(PROMPTS[0], params, drafter="draft")
        assert re.fullmatch(REGEX, completion.text)


def test_the_same_grammar_as_text_and_as_a_mapping(llm: LLM) -> None:
    as_text, as_mapping = (
        llm.generate("x", SamplingParams(json_schema=schema))[0] for schema in (json.dumps(SCHEMA), SCHEMA)
    )
    assert same(as_text, as_mapping)


def test_a_stream_and_a_conversation_are_constrained(llm: LLM) -> None:
    params = SamplingParams(regex=REGEX)
    assert re.fullmatch(REGEX, "".join(chunk.text for chunk in llm.stream("x", params)))
    conversation = llm.conversation()
    messages: list[Any] = []
    for question in ("a", "b"):
        messages.append({"role": "user", "content": question})
        answer = "".join(chunk.text for chunk in conversation.stream(messages, params))
        assert re.fullmatch(REGEX, answer)
        messages.append({"role": "assistant", "content": answer})
    conversation.close()


def test_limits_cut_it_as_always(llm: LLM) -> None:
    (completion,) = llm.generate("x", SamplingParams(regex="[a-z]{20}", max_new_tokens=7))
    assert completion.finish_reason == "length"
    assert re.fullmatch("[a-z]{7}", completion.text)
    (whole,) = llm.generate("x", SamplingParams(regex="[a-z]{6}", max_new_tokens=7))
    assert (whole.finish_reason, len(whole.text)) == ("stop", 6)


def test_nothing_is_kept_where_it_cannot_go_on(llm: LLM) -> None:
    before = llm.engine.runner.cache.num_bytes
    with pytest.raises(NumericsError, match="lower `min_new_tokens`"):
        llm.generate("x", SamplingParams(regex="abc", min_new_tokens=4))
    with pytest.raises(ConfigError, match="`regex` '\\(' is refused"):
        llm.generate("x", SamplingParams(regex="("))
    assert llm.engine.runner.cache.num_bytes == before
