"""Constrain the output of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

from attrs import field, frozen

from paged_sdk.errors import ConstraintError, shown

__all__ = ["Constraint", "ConstraintKind"]

ConstraintKind: TypeAlias = Literal["regex", "json_schema", "lark", "llguidance"]

_MAX_SOURCE: Final = 4 << 20
"""Most characters of a constraint: parsing JSON of that length takes 50 ms."""


@frozen
class Constraint:
    """Describes a formal language that the output of a request has to be in.

    Make one with :meth:`regex`, :meth:`json_schema`, :meth:`lark` or :meth:`llguidance`. It is compiled when a request
    with it is sent; one that cannot be enforced raises :class:`~paged_sdk.errors.ConstraintError` then.

    :ivar kind: the kind of the source
    :ivar source: the language's description
    :ivar compact: whether JSON of a schema has no white space between its parts
    :raises ConstraintError: at construction, for anything but a text of up to 4,194,304 characters
    """

    kind: ConstraintKind = field()
    source: str = field(repr=shown)
    compact: bool = field(default=False, kw_only=True)

    @kind.validator
    def _check_kind(self, attribute: object, value: object) -> None:
        if not isinstance(value, str) or value not in get_args(ConstraintKind):
            kinds = ", ".join(get_args(ConstraintKind))
            raise ConstraintError(f"kind = {shown(value)} is not allowed: expected one of {kinds}")

    @source.validator
    def _check_source(self, attribute: object, value: object) -> None:
        if not isinstance(value, str) or not value or len(value) > _MAX_SOURCE:
            raise ConstraintError(
                f"source ({self.kind}) = {shown(value)} is not allowed: expected 1 to {_MAX_SOURCE} characters",
                kind=self.kind,
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConstraintError(
                f"source ({self.kind}) = {shown(value)} is not allowed: expected Unicode without lone surrogates",
                kind=self.kind,
            ) from error

    @compact.validator
    def _check_compact(self, attribute: object, value: object) -> None:
        if not isinstance(value, bool) or (value and self.kind != "json_schema"):
            raise ConstraintError(
                f"compact ({self.kind}) = {shown(value)} is not allowed: expected False, or True for a JSON schema",
                kind=self.kind,
            )

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        r"""Allow the texts that an expression matches as a whole.

        :param pattern: in the syntax of Rust's regex crate, without look-around; ``.`` matches no newline, and ``\d``,
            ``\w`` and ``\s`` are Unicode's
        """
        return cls("regex", pattern)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, compact: bool = False) -> Constraint:
        """Allow JSON that fits a schema (draft 2020-12).

        Objects have their properties in the schema's order. Between the parts of the JSON, one space is allowed, or a
        newline and up to 32 spaces or tabs.

        :param schema: the schema, or its text
        :param compact: allow no white space between the parts. The output is then shorter, and whatever the schema
            fixes takes almost no time
        :raises ConstraintError: not JSON
        """
        if isinstance(schema, str):
            return cls("json_schema", schema, compact=compact)
        if not isinstance(schema, Mapping):
            raise ConstraintError(
                f"json_schema = {shown(schema)} is not allowed: expected a dict or a text", kind="json_schema"
            )
        try:
            source = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(f"the schema is no JSON: {error}", kind="json_schema") from error
        return cls("json_schema", source, compact=compact)

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """Allow the texts of a context-free grammar.

        :param grammar: in llguidance's variant of Lark's syntax; the first rule is ``start``
        """
        return cls("lark", grammar)

    @classmethod
    def llguidance(cls, grammar: str) -> Constraint:
        """Allow the texts of a grammar in llguidance's own form.

        :param grammar: JSON, ``{"grammars": [{"lark_grammar": ...}, {"json_schema": ...}]}``
        """
        return cls("llguidance", grammar)
