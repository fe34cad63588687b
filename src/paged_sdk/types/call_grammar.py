"""Describe the answers in which a model calls tools as it has to."""

from __future__ import annotations

from attrs import frozen

__all__ = ["CallGrammar", "JsonRule"]


@frozen
class JsonRule:
    """Names a part of an answer that is JSON.

    :ivar name: the rule that the grammar refers to
    :ivar label: says to people whose JSON it is
    :ivar schema: JSON text of its schema
    """

    name: str
    label: str
    schema: str


@frozen
class CallGrammar:
    """Holds a grammar of answers that call tools.

    :ivar lark: in llguidance's variant of Lark's syntax, without the rules of JSON
    :ivar rules: these
    """

    lark: str
    rules: tuple[JsonRule, ...]

    @property
    def kind(self) -> str:
        """Return what errors call it."""
        return "tools"
