"""What both clients of servers need of httpx, which is optional, and of a server's failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretell.errors import ConfigError

if TYPE_CHECKING:
    import httpx


def check_httpx() -> None:
    """Raise where the library is not installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise ConfigError("asking a server needs httpx, which is not installed: pip install httpx") from error


def key_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that carry a key; none for None.

    Raises:
        ConfigError: it cannot stand in a header.
    """
    if api_key is None:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key holds a line break or a character beyond ASCII: check where it comes from")
    return {"Authorization": f"Bearer {api_key}"}


def failure_text(response: httpx.Response) -> str:
    """Return what the server says of a failure, in one line."""
    try:
        document: Any = response.json()
        said = document.get("error", document.get("detail", document.get("message", document)))
        said = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        said = response.text or response.reason_phrase
    return one_line(said)


def one_line(said: object) -> str:
    """Return a text without line breaks, at most 200 characters of it."""
    return " ".join(str(said).split())[:200]


def retry_after_s(response: httpx.Response) -> float | None:
    """Return how long the server asks to wait; None where it does not, or names a date."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
