"""What both clients of servers need of httpx, which is optional, and of a server's failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from foretell.errors import ConfigError

if TYPE_CHECKING:
    import httpx


KEY_REMEDY: Final = "give an API key that it takes, by `api_key`, or --api-key-env on the command line"


def server_url(base_url: str) -> str:
    """Return the address that paths such as `/models` are added to: `/v1` if it has no path, else as it is.

    Raises:
        ConfigError: httpx is not installed, or it cannot be an address.
    """
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("asking a server needs httpx, which is not installed: pip install httpx") from error
    try:
        url = httpx.URL(base_url.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"`base_url` cannot be an address ({error}), got {base_url!r}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"`base_url` must begin with http:// or https:// and a host, got {base_url!r}")
    return str(url) if url.path != "/" else f"{url}/v1"


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
    """Return what the server says of a failure, in one line and without the key, should the server repeat it."""
    try:
        document: Any = response.json()
        said = document.get("error", document.get("detail", document.get("message", document)))
        said = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        said = response.text or response.reason_phrase
    key = response.request.headers.get("Authorization", "").removeprefix("Bearer ")
    return one_line(str(said).replace(key, "…") if key else said)


def one_line(said: object) -> str:
    """Return a text without line breaks, at most 200 characters of it."""
    return " ".join(str(said).split())[:200]


def retry_after_s(response: httpx.Response) -> float | None:
    """Return how long the server asks to wait; None where it does not, or names a date."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
