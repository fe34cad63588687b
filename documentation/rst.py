"""Reads the docstrings of the code: sentences and fields in reST, as Markdown."""

from __future__ import annotations

import inspect
import re
from typing import Final

__all__ = ["ROLE", "described_fields", "first_paragraph", "plain_name"]

ROLE: Final = re.compile(r":(?:class|meth|func|attr|mod|exc|data):`([^`]+)`")
_FIELD: Final = re.compile(r"^:(\w+)(?: (\w+))?: ", flags=re.MULTILINE)


def first_paragraph(documented: object) -> str:
    """Return the first paragraph of a docstring, in one line; empty where there is none."""
    return _in_one_line(_text(documented).partition("\n\n")[0])


def described_fields(documented: object) -> dict[str, str]:
    """Return what a docstring says of parameters and attributes, by their names."""
    text = _text(documented)
    found = list(_FIELD.finditer(text))
    ends = [each.start() for each in found[1:]] + [len(text)]
    return {
        field[2]: _in_one_line(text[field.end() : end])
        for field, end in zip(found, ends, strict=True)
        if field[1] in ("param", "ivar")
    }


def plain_name(role: re.Match[str]) -> str:
    """Return the name that a role such as ``:class:`Model``` shows."""
    target = role[1].partition(" <")[0].removeprefix("paged_sdk.")
    return target.rpartition(".")[2] if target.startswith("~") else target


def _text(documented: object) -> str:
    return (documented if isinstance(documented, str) else inspect.getdoc(documented)) or ""


def _in_one_line(text: str) -> str:
    marked = ROLE.sub(lambda role: f"`{plain_name(role)}`", text).replace("``", "`")
    return " ".join(marked.split())
