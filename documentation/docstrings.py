"""An extension of griffe: what docstrings say in reST becomes Markdown, and attrs' classes get their constructors."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any, Final

import attrs
import griffe

import paged_sdk
from documentation.pages import api_names
from documentation.rst import ROLE, plain_name

__all__ = ["Docstrings"]

_PUBLIC: Final = frozenset(paged_sdk.__all__)


class Docstrings(griffe.Extension):
    """Turns roles such as ``:class:`Model``` into code, linked where the name is public."""

    def __init__(self) -> None:
        self._classes = {
            f"{found.__module__}.{found.__qualname__}": found
            for _, names in api_names().values()
            for found in map(_named, names)
            if inspect.isclass(found) and attrs.has(found)
        }

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of whatever was read."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(_linked, obj.docstring.value).replace("``", "`")

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add the constructor that attrs makes, which no source shows."""
        if (found := self._classes.get(cls.path)) is None or "__init__" in cls.members:
            return
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        for parameter in inspect.signature(found).parameters.values():
            field = cls.members.get(parameter.name)  # None: of a base, and then its type is the base's text
            inherited = parameter.annotation if isinstance(parameter.annotation, str) else None
            parameters.append(
                griffe.Parameter(
                    parameter.name,
                    annotation=field.annotation if isinstance(field, griffe.Attribute) else inherited,
                    kind=griffe.ParameterKind[parameter.kind.name.lower()],
                    default=None if parameter.default is parameter.empty else _default(parameter.default),
                )
            )
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))


def _default(value: object) -> str:
    return "..." if value is attrs.NOTHING else repr(value)


def _named(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _linked(role: re.Match[str]) -> str:
    shown = plain_name(role)
    owner = role[1].lstrip("~").removeprefix("paged_sdk.").split(".", maxsplit=1)[0]
    return f"[`{shown}`][paged_sdk.{owner}]" if owner in _PUBLIC else f"`{shown}`"
