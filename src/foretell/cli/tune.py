"""`foretell tune`."""

from __future__ import annotations

from foretell.cli.options import DecodingOptions, spread


@spread
def tune(*, options: DecodingOptions) -> None:
    """Stub."""
