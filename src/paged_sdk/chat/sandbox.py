"""Run chat templates, which are untrusted programs, in a restricted Jinja environment.

Templates see only plain data, cannot change it, and cannot reach Python's internals. Limits of time and size are
checked between operations; a single operation may still take all the memory there is. So this environment is for a
process that can be killed (:mod:`paged_sdk.chat.render_process`); in the application's own process, templates run in
:mod:`paged_sdk.chat.metered`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sized
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from attrs import frozen
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = [
    "PublicNamespace",
    "RenderLimits",
    "TemplateEnvironment",
    "TemplateRefusalError",
    "raise_refusal",
    "strftime",
    "to_json",
]

_LARGEST_POWER_BITS = 4096


@frozen(kw_only=True)
class RenderLimits:
    """Limits the resources of one rendering.

    :ivar max_chars: characters of the result, and of every string that operators build on the way
    :ivar max_seconds: time after which the rendering process is killed
    :ivar max_bytes: address space of the rendering process, where the platform has such a limit (not on macOS and
        Windows)
    """

    max_chars: int = 1 << 24
    max_seconds: float = 5.0
    max_bytes: int = 512 << 20


class TemplateRefusalError(TemplateError):
    """Says that the template called ``raise_exception``, with its message about the conversation."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Runs a template within limits. Make a new environment for each rendering: its time starts when it is made."""

    intercepted_binops: frozenset[str] = frozenset({"+", "*", "**"})

    def __init__(self, limits: RenderLimits, **options: Any) -> None:
        extensions = [_GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, **options)
        self.limits = limits
        self._deadline = time.monotonic() + limits.max_seconds
        self.filters.update(tojson=to_json, _turns=self._turns, _bounded=self._bounded)
        self.globals.update(raise_exception=raise_refusal, strftime_now=strftime, namespace=PublicNamespace)

    def compile_with_limits(self, source: str) -> CodeType:
        """Compile a template to code in which loops and ``~`` check the limits.

        :raises jinja2.TemplateSyntaxError: the source is not a valid template
        """
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_turns")
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filtered(nodes.Concat(concat.nodes, lineno=concat.lineno), "_bounded")]
        tree.set_environment(self)
        return self.compile(tree)

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise SecurityError(f"rendering takes longer than {self.limits.max_seconds:g} seconds")

    def check_size(self, size: int) -> None:
        if size > self.limits.max_chars:
            raise SecurityError(f"the text grows beyond {self.limits.max_chars} characters")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``+``, ``*`` and ``**``, unless the result would be too large."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _LARGEST_POWER_BITS:
                raise SecurityError(f"{left} ** {right} is too large")
        elif operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, Sized) and isinstance(times, int):
                    self.check_size(len(repeated) * times)
        elif isinstance(left, Sized) and isinstance(right, Sized):
            self.check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once; Jinja would refuse only when the value is used."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def _bounded(self, text: str) -> str:
        self.check_size(len(text))
        return text


class _GenerationTag(Extension):
    """Accepts ``{% generation %}``, which marks the model's turns for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PublicNamespace(Namespace):
    """Implements ``namespace()`` without private names, with which an object could deceive the sandbox's checks."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def raise_refusal(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def strftime(format: str) -> str:
    return datetime.now().strftime(format)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON, unlike Jinja's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
