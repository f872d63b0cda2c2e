"""A file of finished rounds, so that an interrupted benchmark goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foretell.bench.measurement import Measurement, Round
from foretell.errors import ConfigError


class Journal:
    """Rounds of one configuration in a JSON Lines file that may hold rounds of others too.

    Args:
        path: the file; created with its first round.
        configuration: everything a measurement depends on, as JSON types. Rounds of another configuration are
            neither used nor touched.

    Raises:
        ConfigError: the file cannot be read, or holds something else than rounds.
    """

    def __init__(self, path: Path, configuration: Mapping[str, Any]) -> None:
        self._path = path
        document = json.dumps(configuration, sort_keys=True, default=str)
        self._digest = hashlib.sha256(document.encode()).hexdigest()[:16]
        self._rounds = {(finished.prompt, finished.repeat): finished for finished in self._read()}

    def find(self, prompt: int, repeat: int) -> Round | None:
        """Return the finished round, or None."""
        return self._rounds.get((prompt, repeat))

    def add(self, finished: Round) -> None:
        """Append a round as one line.

        Raises:
            ConfigError: the file cannot be written.
        """
        record = {
            "configuration": self._digest,
            "prompt": finished.prompt,
            "repeat": finished.repeat,
            "measurements": {key: value.to_json() for key, value in finished.measurements.items()},
        }
        # The leading newline ends a line that an interrupted run left torn.
        line = "\n" + json.dumps(record) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(f"cannot write resume file {self._path}: {error.strerror}") from error
        self._rounds[finished.prompt, finished.repeat] = finished

    def _read(self) -> Iterator[Round]:
        if not self._path.exists():
            return
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise ConfigError(f"cannot read resume file {self._path}: {error.strerror}") from error
        if any(lines) and not any(line.startswith('{"configuration": ') for line in lines):
            raise ConfigError(f"{self._path} holds something else than a benchmark's rounds: name another resume file")
        for line in lines:
            finished = self._parse(line)
            if finished is not None:
                yield finished

    def _parse(self, line: str) -> Round | None:
        """Return the line's round; None for a torn line and for another configuration's."""
        try:
            record = json.loads(line)
            if record["configuration"] != self._digest:
                return None
            measurements = {key: Measurement.from_json(value) for key, value in record["measurements"].items()}
            return Round(prompt=record["prompt"], repeat=record["repeat"], measurements=measurements)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
