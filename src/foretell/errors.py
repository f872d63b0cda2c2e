"""Errors a user can cause. Each message says what, got what, the limit, and the remedy.

ForetellError
├── ConfigError      a parameter or flag is wrong, or two contradict each other
├── InputError       a prompt or a file that holds one cannot be used
├── ModelError       a model cannot be found, read, or is of a kind that foretell refuses
├── CapacityError    the context or the key/value cache is full
├── NumericsError    the model returned NaN, or no token is left to choose from
├── RemoteError      a server cannot be reached, refuses, or breaks off
└── CompileError     `compile=True` cannot work here (no C++ compiler, for one)
"""


class ForetellError(Exception):
    """Base of every error that foretell raises on purpose."""


class ConfigError(ForetellError):
    """A parameter is out of range or contradicts another."""


class InputError(ForetellError):
    """A prompt is empty, not text, or cannot be read."""


class ModelError(ForetellError):
    """A model cannot be found, read, or is of a kind that foretell refuses."""


class CapacityError(ForetellError):
    """A sequence does not fit the model's context or the cache."""


class NumericsError(ForetellError):
    """The model's logits leave nothing to choose from (NaN, or all -inf)."""


class RemoteError(ForetellError):
    """A server cannot be reached, refuses, or breaks off."""


class CompileError(ForetellError):
    """Compilation was asked for and cannot work on this machine."""
