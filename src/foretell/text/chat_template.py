"""Chat templates: messages to the text that a model was trained to read, rendered as transformers renders it.

Importing transformers for this takes 2.5 s, which is most of the time to the first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from foretell.errors import InputError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant" | …, "content": text}`."""

ROLES = ("system", "user", "assistant", "tool", "developer")


class ChatTemplate:
    """One compiled Jinja template.

    Args:
        source: the template's text, which comes with the model and is not trusted: it runs in Jinja's sandbox.
        special_tokens: the variables `bos_token`, `eos_token` and so on.
        clock: what `strftime_now` reads.

    Raises:
        InputError: the template cannot be compiled.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], clock: Callable[[], datetime] = datetime.now
    ) -> None:
        import jinja2

        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(clock).from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"the model's chat template is broken ({error}): use `--raw`") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as text.

        Args:
            messages: oldest first.
            add_generation_prompt: end with what introduces the assistant's next answer.

        Raises:
            InputError: a message has no known role or no text, or the template refuses the conversation.
        """
        check_messages(messages)
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return self._template.render(**self._special_tokens, **variables)
        except Exception as error:  # a template is a program: it may fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"the model's chat template refuses these messages ({reason}): change them") from None


def check_messages(messages: Sequence[Message]) -> None:
    """Check a conversation's shape.

    Raises:
        InputError: it is empty, or a message is not a mapping with a known `role` and a text as `content`.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of role and content, got a {type(messages).__name__}")
    if not messages:
        raise InputError("the conversation is empty: give at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {number} must be a mapping, got a {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InputError(f"message {number} has role {role!r}: use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise InputError(f"message {number} has content of type {type(content).__name__}: use text")


def _environment(clock: Callable[[], datetime]) -> jinja2.Environment:
    """Return Jinja as transformers sets it up. Source: transformers, `utils/chat_template_utils.py`."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return clock().strftime(pattern)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = _namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _namespace(*args: Any, **attributes: Any) -> Any:
    """Return Jinja's namespace, without names that lead out of the sandbox."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Guarded(Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a template may not set {name!r} in a namespace")
            super().__setitem__(name, value)

    guarded = Guarded()
    for name, value in dict(*args, **attributes).items():
        guarded[name] = value
    return guarded


def _generation_tag() -> type[jinja2.ext.Extension]:
    """Return the extension for `{% generation %}`, which marks the assistant's text for training and adds nothing."""
    import jinja2
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Callable[[], str]) -> str:
            return caller()

    return GenerationTag
