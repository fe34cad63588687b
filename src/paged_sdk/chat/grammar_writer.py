"""Write grammars of answers that call tools, in the tokens that the models were trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from attrs import frozen

from paged_sdk.types.call_grammar import CallGrammar, JsonRule

__all__ = ["MOST_CALLS", "CallForm", "GrammarWriter"]

MOST_CALLS: Final = 16
"""Limits the calls in an answer that has to call tools: small models would repeat themselves without end."""


@frozen(kw_only=True)
class CallForm:
    """Describes the form of the calls in an answer.

    :ivar opening: text before the first call; marks in it are tokens
    :ivar call: the grammar expression of one call
    :ivar separator: text between two calls; None: an answer has at most one call
    :ivar closing: text after the last call
    """

    opening: str = ""
    call: str
    separator: str | None = None
    closing: str = ""


class GrammarWriter:
    """Collects the rules of a grammar in llguidance's Lark syntax. Its methods return expressions to build rules from.

    :param marks: texts that are single tokens, if the vocabulary has them
    :param token_id: returns the token id of a mark, or None
    """

    def __init__(self, marks: Iterable[str], token_id: Callable[[str], int | None]) -> None:
        ids = {mark: token_id(mark) for mark in sorted(marks, key=len, reverse=True)}
        self._ids = {mark: id for mark, id in ids.items() if id is not None}
        self._pattern = re.compile("|".join(map(re.escape, self._ids)) or "(?!)")
        self._lines: list[str] = []
        self._json: dict[str, JsonRule] = {}
        self._named: dict[str, str] = {}
        self._num_names = 0

    def text(self, text: str) -> str:
        """Return the expression of a literal text, with its marks as tokens."""
        parts, position = [], 0
        for found in self._pattern.finditer(text):
            parts += [_literal(text[position : found.start()]), f"<[{self._ids[found.group()]}]>"]
            position = found.end()
        return " ".join(part for part in (*parts, _literal(text[position:])) if part) or '""'

    def is_mark(self, text: str) -> bool:
        """Tell whether a text is a mark that the vocabulary has as a token."""
        return text in self._ids

    def any_of(self, expressions: Iterable[str]) -> str:
        """Return the expression of alternatives."""
        return "(" + " | ".join(dict.fromkeys(expressions)) + ")"

    def rule(self, expression: str) -> str:
        """Define a rule for an expression, and return the rule's name."""
        return self._name("r", f": {expression}")

    def pattern(self, expression: str) -> str:
        """Define a terminal for an expression of regular expressions, and return its name. It matches greedily."""
        return self._name("T", f": {expression}")

    def pattern_before(self, expression: str, ending: str) -> str:
        """Return the expression of texts that match a terminal's expression, up to and including the first ending."""
        return self._name("r", f"[suffix={json.dumps(ending)}]: {expression}")

    def name(self) -> str:
        """Return a new name for a rule to be defined by :meth:`define`."""
        self._num_names += 1
        return f"v{self._num_names}"

    def define(self, name: str, expression: str) -> None:
        """Define a rule, which may refer to itself."""
        self._lines.append(f"{name}: {expression}")

    def json(self, schema: Mapping[str, Any], label: str) -> str:
        """Return the expression of JSON that fits a schema.

        :param label: names the schema's owner in errors, if the schema cannot be enforced
        """
        text = json.dumps(schema, ensure_ascii=False)
        if text not in self._json:
            self._json[text] = JsonRule(f"json{len(self._json)}", label, text)
        return self._json[text].name

    def answer(self, schema: str, *, compact: bool) -> str:
        """Return the expression of an answer that is JSON of a schema.

        :param schema: JSON text of the schema
        :param compact: whether to allow no white space between the JSON's parts
        """
        rule = JsonRule("answer", "the answer", schema, "none" if compact else "free", kind="json_schema")
        self._json[rule.name] = rule  # no text of a schema
        return rule.name

    def text_without(self, words: Iterable[str], *, beginnings: Iterable[str] = ()) -> str:
        """Return the expression of any non-empty text that contains none of these words.

        :param beginnings: words that the text must not begin with, after white space
        """
        return self.pattern(_other_text("/(?s:.+)/", words, beginnings))

    def until(self, mark: str, *, words: Iterable[str] = (), beginnings: Iterable[str] = ()) -> str:
        """Return the expression of any text up to and including a mark; other parameters are as in
        :meth:`text_without`.
        """
        if self.is_mark(mark):
            return f"{self.text_without((mark, *words), beginnings=beginnings)}? {self.text(mark)}"
        return self.pattern_before(_other_text("/(?s:.*)/", words, beginnings), mark)

    def calls(self, form: CallForm, *, most: int, without: str = "") -> str:
        """Return the expression of one call or several.

        :param most: the largest number of calls
        :param without: prefix of the opening to leave out
        """
        parts = [self.text(form.opening.removeprefix(without)), form.call]
        if form.separator is not None and most > 1:
            parts.append(f"({self.text(form.separator)} {form.call}){{0,{most - 1}}}")
        return " ".join((*parts, self.text(form.closing)))

    def _name(self, kind: str, body: str) -> str:
        if body not in self._named:
            self._named[body] = f"{kind}{len(self._named)}"
            self._lines.append(self._named[body] + body)
        return self._named[body]

    def grammar(self, start: str) -> CallGrammar:
        """Return the grammar whose start rule is an expression."""
        return CallGrammar("\n".join((f"start: {start}", *self._lines)), tuple(self._json.values()))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _other_text(pattern: str, words: Iterable[str], beginnings: Iterable[str]) -> str:
    banned, begins = "|".join(map(_escaped, words)), "|".join(map(_escaped, beginnings))
    parts = [pattern]
    if banned:
        parts.append(f"~/(?s:.*)(?:{banned})(?s:.*)/")
    if begins:
        parts.append(rf"~/\s*(?:{begins})(?s:.*)/")
    return " & ".join(parts)


def _escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
