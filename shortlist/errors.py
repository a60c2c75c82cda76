"""The errors a user meets: each is a sentence that says what is wrong, where, and what to do.

The command line prints the message and exits with `exit_code` (docs/architecture.md, exit codes).
"""


class ShortlistError(Exception):
    """Base of every error raised on purpose by this package."""

    exit_code = 1


class ConfigError(ShortlistError, ValueError):
    """A setting or an argument is wrong: unknown key, bad value, options that exclude each other."""

    exit_code = 2


class OutputExistsError(ConfigError, FileExistsError):
    """The output is there already and neither overwriting nor resuming was asked for."""


class MissingExtraError(ShortlistError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""

    exit_code = 3


class MissingInputError(ShortlistError, FileNotFoundError):
    """A file, directory, split or named resource that was asked for does not exist."""

    exit_code = 4

    def __str__(self) -> str:
        # FileNotFoundError would print an errno tuple for some argument shapes.
        return str(self.args[0]) if self.args else ""


class DataError(ShortlistError, ValueError):
    """The content of a file or argument is invalid; the message names file, line and id where known."""

    exit_code = 5


class IndexMismatchError(DataError):
    """An index and a query side do not belong together (other model, other dimension, other metric)."""


class NonFiniteError(DataError):
    """A NaN or infinity appeared in vectors, scores or a loss."""
