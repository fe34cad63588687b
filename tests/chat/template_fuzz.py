"""Make chat templates at random, of the operations that the metered environment has and some that it has not."""

from __future__ import annotations

import random

__all__ = ["random_template"]

_TEXTS = ("''", "' a '", "'user'", "'Größe'", "'<|im_end|>'", "'a,b,,c'", "bos_token", "m.content", "m['role']", "x")
_TEXTS_AFTER = (
    *("|trim", "|upper", "|lower", "|capitalize", "|string", "|replace('e', '')", "|first|string", "|default('d')"),
    *("|default('', true)", "|tojson", "|list|join", "|e", "|title", "|center(9)", "[1:]", "[:-1]", "[::-1]", "[0]"),
    *(".strip()", ".strip('a ')", ".lstrip('\\n')", ".upper()", ".title()", ".replace('a', 'bc')"),
    *(".split(',')|join('-')", ".split('a')[-1]"),
)
_NUMBERS = ("0", "1", "2", "7", "loop.index0", "loop.index", "messages|length", "ns.n", "n")
_LISTS = (
    *("messages", "messages[1:]", "messages[::-1]", "[1, 2]", "['a', 'b']", "range(3)", "'a b'.split(' ')", "l"),
    *("messages|selectattr('role', 'equalto', 'user')|list", "messages|rejectattr('name', 'defined')|list"),
    *("messages|map(attribute='role')|list", "{'a': 1, 'b': 'c'}.items()|list", "m.content|list", "[x, y]"),
    *("l + [m]", "l + ['c']", "['a', 'b']|reject('equalto', 'a')|list", "m|items"),
)
_TESTS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "odd")


class _Writer:
    """Writes one template.

    :param generator: decides
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def statements(self, depth: int) -> str:
        return "".join(self.statement(depth) for _ in range(self._generator.randint(1, 4)))

    def statement(self, depth: int) -> str:
        pick = self._generator.random()
        if depth <= 0 or pick < 0.35:
            output = self._generator.choice((self.text(2), self.any()))
            return self._generator.choice(("text ", "\n", "<s>", "{{ " + output + " }}", "{{- " + output + " -}}"))
        body = self.statements(depth - 1)
        if pick < 0.5:
            assignments = [("x", self.text(3)), ("y", self.any()), ("n", self.number(2)), ("l", self.items())]
            assignments += [("ns.n", self.number(2)), ("ns.s", self.text(2)), ("ns.s", "ns.s + " + self.text(1))]
            name, value = self._generator.choice(assignments)
            return "{% set " + name + " = " + value + " %}"
        if pick < 0.65:
            return "{% if " + self.condition(2) + " %}" + body + "{% else %}" + self.statement(0) + "{% endif %}"
        if pick < 0.85:
            target = self._generator.choice(("m", "m", "x", "i"))
            condition = self._generator.choice(("", "", " if " + self.condition(1)))
            end = self._generator.choice(("", "", "{% break %}", "{% continue %}"))
            return "{% for " + target + " in " + self.items() + condition + " %}" + body + end + "{% endfor %}"
        if pick < 0.92:
            return "{% set y %}" + body + "{% endset %}"
        name = self._generator.choice("fg")
        return "{% macro " + name + "(x, n=1) %}" + body + "{% endmacro %}{{ " + name + "(" + self.text(1) + ") }}"

    def any(self) -> str:
        if self._generator.random() < 0.1:
            return self.items()
        return self._generator.choice((self.text, self.number, self.condition))(2)

    def text(self, depth: int) -> str:
        pick = self._generator.random()
        if depth <= 0 or pick < 0.3:
            return self._generator.choice(_TEXTS)
        inner = self.text(depth - 1)
        if pick < 0.6:
            return "(" + inner + ")" + self._generator.choice(_TEXTS_AFTER)
        if pick < 0.8:
            return "(" + inner + self._generator.choice((" + ", " ~ ")) + self.text(depth - 1) + ")"
        if pick < 0.9:
            return "(" + inner + " ~ " + self.number(1) + ")"
        return "(" + inner + " if " + self.condition(1) + " else " + self.text(depth - 1) + ")"

    def number(self, depth: int) -> str:
        if depth <= 0 or self._generator.random() < 0.4:
            return self._generator.choice(_NUMBERS)
        pick = self._generator.choice((" + ", " - ", " * ", " % "))
        return "(" + self.number(depth - 1) + pick + self.number(depth - 1) + ")"

    def condition(self, depth: int) -> str:
        pick = self._generator.random()
        if pick < 0.25:
            return self.text(1) + self._generator.choice((" == ", " != ", " in ", " not in ")) + self.text(1)
        if pick < 0.4:
            return self.number(1) + self._generator.choice((" == ", " < ", " >= ")) + self.number(1)
        if pick < 0.6:
            return self.text(1) + " is " + self._generator.choice(("", "not ")) + self._generator.choice(_TESTS)
        if pick < 0.7:
            return self.text(1) + " in " + self.items()
        if pick < 0.8 or depth <= 0:
            simple = ("loop.first", "loop.last", "m.name", "true", "nothing", "x", "m == messages[0]")
            return self._generator.choice(simple)
        joined = self._generator.choice((" and ", " or "))
        return "(" + self.condition(depth - 1) + joined + self.condition(depth - 1) + ")"

    def items(self) -> str:
        return self._generator.choice(_LISTS)


def random_template(seed: int) -> str:
    """Return the template that belongs to a seed."""
    start = "{% set ns = namespace(n=0, s='') %}{% set x = 'x' %}{% set y = 'y' %}{% set l = ['l'] %}{% set n = 3 %}"
    return start + "{% set m = messages[0] %}" + _Writer(random.Random(seed)).statements(4)
