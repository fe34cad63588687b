"""Names the error of an invalid command line."""

from __future__ import annotations

from typing import Any, Final

import typer

__all__ = ["UsageError"]

UsageError: Final[Any] = typer.BadParameter.__mro__[1]
"""Any error of a command line, such as an unknown option: click's, or that of the copy within later versions of typer,
which export it under no name.
"""
