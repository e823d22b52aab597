"""The command line: `fpipe show`, `simulate`, `compare`, `search`, `verify`. Never loads torch."""

from fpipe.cli.command import main

__all__ = ["main"]
