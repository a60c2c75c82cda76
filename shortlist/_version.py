"""The package's version, alone in a file so that build and `--version` read it without imports."""

__version__ = "0.1.0"
