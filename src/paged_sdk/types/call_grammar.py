"""Hold the grammars that constrain answers with tool calls."""

from __future__ import annotations

from attrs import frozen

__all__ = ["CallGrammar", "JsonRule"]


@frozen
class JsonRule:
    """Names a rule of a grammar that is JSON of a schema.

    :ivar name: the rule's name in the grammar
    :ivar label: names the JSON in errors
    :ivar schema: JSON text of its schema
    """

    name: str
    label: str
    schema: str


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
