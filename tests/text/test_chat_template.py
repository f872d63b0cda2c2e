"""Chat templates against transformers' rendering, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from foretell.errors import InputError
from foretell.text.chat_template import ChatTemplate, Message

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

CHATS: dict[str, list[Message]] = {
    "question": [{"role": "user", "content": "What's <b> 1 & 2?\n"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  hi  "}],
    "turns": [
        {"role": "user", "content": "你好 🤖"},
        {"role": "assistant", "content": 'A "quoted" answer.'},
        {"role": "user", "content": ""},
    ],
    "more keys": [{"role": "user", "content": "x", "name": "Ada"}, {"role": "tool", "content": '{"a": 1}'}],
}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "trimmed blocks": (
        "{{ bos_token }}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'user' %}\n"
        "  [INST] {{ message.content | trim }} [/INST]\n"
        "    {% else %}\n"
        "{{ message.content }}{{ eos_token }}\n"
        "    {% endif %}\n"
        "{%- endfor %}\n"
    ),
    "json": (
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}"
    ),
    "loop controls": (
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{{ message.content }}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(count=0) %}{% for message in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}"
        "{{ ns.count }} {{ ns.missing is defined }}"
    ),
    "generation": (
        "{% for message in messages %}{% generation %}{% set shown = message.content %}{{ shown }}{% endgeneration %}"
        "{{ shown is defined }}{% endfor %}"
    ),
    "undefined": "{{ tools }}|{{ documents }}|{{ pad_token is defined }}|{{ nothing }}|{% if tools %}x{% endif %}",
    "macro": (
        "{%- macro show(message) -%}\n  {{ message.role | upper }}: {{ message.content }}\n{%- endmacro -%}\n"
        "{%- for message in messages %}{{ show(message) }}{% endfor -%}\n"
    ),
    "names": "{% for message in messages %}{{ message.get('name', 'nobody') }}{{ message['name'] }};{% endfor %}",
    "dict": "{% set d = dict(a=1) %}{{ d.items() | list }}{{ dict(messages[0]) | length }}",
}


def transformers_rendering(backend: Backend, template: str, chat: Sequence[Message], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES)
    text = theirs.apply_chat_template(list(chat), chat_template=template, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("is_prompt", [True, False])
@pytest.mark.parametrize("chat", list(CHATS))
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_same_text_as_transformers(name: str, chat: str, is_prompt: bool, backend: Backend) -> None:
    ours = ChatTemplate(TEMPLATES[name], NAMES).render(CHATS[chat], add_generation_prompt=is_prompt)
    assert ours == transformers_rendering(backend, TEMPLATES[name], CHATS[chat], add_generation_prompt=is_prompt)


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, clock=lambda: datetime(2024, 7, 26))
    assert template.render(CHATS["question"]) == "26 Jul 2024"


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must\nalternate') }}", {})
    with pytest.raises(InputError, match="roles must alternate"):
        template.render(CHATS["question"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
    ],
)
def test_what_the_sandbox_forbids_and_what_fails_is_one_line(source: str) -> None:
    with pytest.raises(InputError) as caught:
        ChatTemplate(source, {}).render(CHATS["question"])
    assert "\n" not in str(caught.value)


def test_a_broken_template() -> None:
    with pytest.raises(InputError, match="is broken"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty"),
        ("hi", "must be a list"),
        ({"role": "user", "content": "hi"}, "must be a list"),
        (["hi"], "message 0 must be a mapping"),
        ([{"content": "hi"}], "role None"),
        ([{"role": "bot", "content": "hi"}], "role 'bot'"),
        ([{"role": "user", "content": "hi"}, {"role": "user"}], "message 1 has content of type NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content of type list"),
    ],
)
def test_messages_that_are_none(messages: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ChatTemplate("", {}).render(messages)


def test_the_caller_s_messages_are_not_what_the_template_sees() -> None:
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(InputError):
        ChatTemplate("{{ messages[0].update(role='x') }}", {}).render(chat)
    assert chat == [{"role": "user", "content": "hi"}]
