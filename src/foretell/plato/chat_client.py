"""Ask a model behind an OpenAI-compatible chat endpoint, one prompt at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from foretell.errors import RemoteError
from foretell.plato.http import KEY_REMEDY, failure_text, key_headers, retry_after_s, server_url

if TYPE_CHECKING:
    import httpx

_FIELDS: Final = {"temperature": 0.0, "max_tokens": 1024}
"""Left out from when on the server refuses one of them."""
_CONNECT_S: Final = 10.0
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_PROMPT_REFUSED: Final = (400, 413, 422)


@dataclass(frozen=True, slots=True)
class _Busy:
    """A failure that may pass."""

    reason: str
    pause_s: float = 0.0
    """How long the server asks to wait."""


class PromptRefusedError(RemoteError):
    """The server refuses this prompt, too long for one, and may take others."""


class ChatClient:
    """A model that answers single prompts.

    Args:
        base_url: `http://localhost:8000`, which means `http://localhost:8000/v1`, or an address with a path as it is.
        model: the name by which the server knows it.
        api_key: sent as a bearer token; None sends none.
        transport: what carries requests; None is the network.
        patience_s: how long one prompt is tried while the server is busy or fails.
        clock: seconds, monotonic.
        sleep: waits so many seconds.

    Raises:
        ConfigError: httpx is not installed, or address or key cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        patience_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        url, headers = server_url(base_url), key_headers(api_key)
        import httpx

        self._model, self._url = model, f"{url}/chat/completions"
        self._patience_s, self._clock, self._sleep = patience_s, clock, sleep
        self._fields = dict(_FIELDS)
        self._httpx = httpx
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(patience_s, connect=_CONNECT_S),
            transport=transport,
        )

    def ask(self, system: str, user: str) -> str:
        """Return the answer to a prompt.

        Status 429, 5xx and broken connections are tried again, after pauses that double up to 30 s, or longer ones
        that the server asks for, as long as `patience_s` is not over.

        Raises:
            PromptRefusedError: the server refuses this prompt.
            RemoteError: the server cannot be reached, refuses the key, does not know the model, keeps failing, or
                answers something else than a chat completion.
        """
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        give_up_s, pause_s = self._clock() + self._patience_s, _FIRST_PAUSE_S
        while True:
            outcome = self._try(messages)
            if isinstance(outcome, str):
                return outcome
            wait_s = max(pause_s, outcome.pause_s)
            if self._clock() + wait_s > give_up_s:
                raise RemoteError(f"{self._url} keeps failing ({outcome.reason}): try again later")
            self._sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _try(self, messages: Sequence[Mapping[str, str]]) -> str | _Busy:
        httpx = self._httpx
        try:
            response = self._client.post(self._url, json={"model": self._model, "messages": messages, **self._fields})
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise RemoteError(
                f"cannot reach {self._url} ({error}): check the address, and that it is served"
            ) from error
        except httpx.TransportError as error:
            return _Busy(str(error) or type(error).__name__)
        if response.status_code == 200:
            return self._content(response)
        message = failure_text(response)
        if response.status_code == 429 or response.status_code >= 500:
            return _Busy(f"{response.status_code}: {message}", retry_after_s(response) or 0.0)
        refused = [name for name in self._fields if name in message]
        if response.status_code == 400 and refused:
            fields = self._fields
            self._fields = {name: value for name, value in fields.items() if name not in refused}
            try:
                return self._try(messages)
            except PromptRefusedError:  # it was not the field: a prompt that is too long may be told by its name
                self._fields = fields
                raise
        raise self._refusal(response.status_code, message)

    def _content(self, response: httpx.Response) -> str:
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RemoteError(
                f"{self._url} answers something else than a chat completion: check the address"
            ) from error
        return content if isinstance(content, str) else ""

    def _refusal(self, status: int, message: str) -> RemoteError:
        if status in (401, 403):
            return RemoteError(f"{self._url} refuses ({status}: {message}): {KEY_REMEDY}")
        if status == 404:
            return RemoteError(
                f"{self._url} does not know model {self._model!r} (404: {message}): check name and address"
            )
        kind = PromptRefusedError if status in _PROMPT_REFUSED else RemoteError
        return kind(f"{self._url} refuses the request ({status}: {message})")
