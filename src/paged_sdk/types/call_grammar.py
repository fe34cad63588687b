"""Hold the grammars that constrain answers with tool calls."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

__all__ = ["CallGrammar", "JsonRule", "JsonSpacing"]

JsonSpacing: TypeAlias = Literal["line", "free", "none"]
"""The white space between the parts of JSON: single spaces; as in answers that are JSON; none."""


@frozen
class JsonRule:
    """Names a rule of a grammar that is JSON of a schema.

    :ivar name: the rule's name in the grammar
    :ivar label: names the JSON in errors
    :ivar schema: JSON text of its schema
    :ivar spacing: the white space that is allowed
    :ivar kind: the name of the constraint's kind in errors about the schema
    """

    name: str
    label: str
    schema: str
    spacing: JsonSpacing = "line"
    kind: str = "tools"


@frozen
class CallGrammar:
    """Holds a grammar of answers that call tools.

    :ivar lark: in llguidance's variant of Lark's syntax, without the JSON rules
    :ivar rules: the JSON rules that it refers to
    """

    lark: str
    rules: tuple[JsonRule, ...]

    @property
    def kind(self) -> str:
        """Return the name of the constraint's kind in errors."""
        return "tools"
