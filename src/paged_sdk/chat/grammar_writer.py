"""Write grammars of answers that call tools, in the tokens that models were trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from attrs import frozen

from paged_sdk.types.call_grammar import CallGrammar, JsonRule

__all__ = ["MOST_CALLS", "CallForm", "GrammarWriter"]

MOST_CALLS: Final = 16
"""Calls of an answer that has to call tools, at most: small models repeat themselves without end."""


@frozen(kw_only=True)
class CallForm:
    """Says how the calls of an answer are written.

    :ivar opening: text before the first call; marks in it are tokens
    :ivar call: a grammar's expression of one call
    :ivar separator: text between two calls; None: an answer has one at most
    :ivar closing: text after the last call
    """

    opening: str = ""
    call: str
    separator: str | None = None
    closing: str = ""


class GrammarWriter:
    """Collects the rules of a grammar. Its methods return expressions, of which other rules are made.

    :param marks: texts that are one token each, if the vocabulary has it
    :param token_id: returns the token of a mark, if there is one
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
        """Return the expression of a text."""
        parts, place = [], 0
        for found in self._pattern.finditer(text):
            parts += [_literal(text[place : found.start()]), f"<[{self._ids[found.group()]}]>"]
            place = found.end()
        return " ".join(part for part in (*parts, _literal(text[place:])) if part) or '""'

    def is_mark(self, text: str) -> bool:
        """Tell whether a text is one token."""
        return text in self._ids

    def any_of(self, expressions: Iterable[str]) -> str:
        """Return the expression of one of these."""
        return "(" + " | ".join(dict.fromkeys(expressions)) + ")"

    def rule(self, expression: str) -> str:
        """Give an expression a name, which is returned."""
        return self._name("r", f": {expression}")

    def pattern(self, expression: str) -> str:
        """Return the expression of texts that regular expressions match, as many of them as do."""
        return self._name("T", f": {expression}")

    def pattern_before(self, expression: str, ending: str) -> str:
        """Return the expression of texts that expressions match, up to the first ending, which belongs to it."""
        return self._name("r", f"[suffix={json.dumps(ending)}]: {expression}")

    def name(self) -> str:
        """Return the name of a rule that is to be defined."""
        self._num_names += 1
        return f"v{self._num_names}"

    def define(self, name: str, expression: str) -> None:
        """Define a rule, which may refer to itself."""
        self._lines.append(f"{name}: {expression}")

    def json(self, schema: Mapping[str, Any], label: str) -> str:
        """Return the expression of JSON of a schema.

        :param label: says whose JSON it is, where the schema cannot be enforced
        """
        text = json.dumps(schema, ensure_ascii=False)
        if text not in self._json:
            self._json[text] = JsonRule(f"json{len(self._json)}", label, text)
        return self._json[text].name

    def text_without(self, words: Iterable[str], *, beginnings: Iterable[str] = ()) -> str:
        """Return the expression of any text of one character at least in which none of these words stands.

        :param beginnings: it does not begin with one of these, after white space
        """
        return self.pattern(_other_text("/(?s:.+)/", words, beginnings))

    def until(self, mark: str, *, words: Iterable[str] = (), beginnings: Iterable[str] = ()) -> str:
        """Return the expression of any text up to a mark, which belongs to it; other parameters are as in
        :meth:`text_without`.
        """
        if self.is_mark(mark):
            return f"{self.text_without((mark, *words), beginnings=beginnings)}? {self.text(mark)}"
        return self.pattern_before(_other_text("/(?s:.*)/", words, beginnings), mark)

    def calls(self, form: CallForm, *, most: int, without: str = "") -> str:
        """Return the expression of calls.

        :param most: how many of them there may be; at least one
        :param without: what the opening begins with, and is left out
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
        """Return the grammar of texts that an expression describes."""
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
    """Return an expression of a text, as it stands between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
