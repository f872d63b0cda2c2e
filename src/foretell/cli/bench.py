"""`foretell bench`."""

from __future__ import annotations

from foretell.cli.options import DecodingOptions, spread


@spread
def bench(*, options: DecodingOptions) -> None:
    """Stub."""
