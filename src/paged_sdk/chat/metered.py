"""Render chat templates in the application's own process, where nothing could stop them from outside.

Every operation is on a list (:mod:`paged_sdk.chat.allowlist`), takes time and memory in proportion to its operands,
and is charged to an account; what the list does not have, what would cost more, and what exhausts the account or the
time raises :class:`NotCheapError`. Then a process that can be killed renders the template, within wider limits. So a
template can gain nothing by posing as a cheap one, and what is dear but legitimate still works.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType
from typing import Any

from jinja2 import Template, Undefined, nodes, pass_context
from jinja2.filters import do_default, do_first, do_items, do_last, do_reject, do_rejectattr, do_select, do_selectattr
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import safe_range

from paged_sdk.chat.allowlist import is_cheap_method, is_constant, why_not_metered
from paged_sdk.chat.plain_data import ITEM_CHARS, DataSize, TooLargeError, measure
from paged_sdk.chat.sandbox import PublicNamespace, RenderLimits, TemplateEnvironment, raise_refusal, strftime, to_json

__all__ = ["MAX_METERED_CHARS", "MeteredTemplate", "NotCheapError"]

MAX_METERED_CHARS = 1 << 20
"""Messages with more text are rendered elsewhere, which costs little beside tokenizing them."""
_MAX_SECONDS = 0.25
_MAX_WEIGHED = 1 << 21
"""Data is not walked through in a single operation beyond this weight, 130,000 items: that takes 50 ms."""
_MAX_UNTIMED = 64
"""The clock is read once for a loop of no more turns, not in each. Most chats have fewer messages."""
_MAX_NEEDLE = 64
"""Stripping a set of characters takes time in proportion to the set, too."""
_MAX_BITS = 4096
_LOOP_ATTRIBUTES = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_DATE_FORMAT = re.compile(r"(?:[^%]|%[-A-Za-z%]){0,99}")
_PLAIN = (str, int, float, bool, type(None))


class NotCheapError(Exception):
    """Says that a template is to be rendered where it can be killed."""


class MeteredTemplate:
    """Renders a template of operations whose cost is known, as the sandbox would, from any thread.

    :param tree: the template, which is changed
    :param limits: a rendering that would not keep them is not cheap
    :raises NotCheapError: it has another operation
    :raises jinja2.TemplateError: it cannot be compiled
    """

    def __init__(self, tree: nodes.Template, limits: RenderLimits) -> None:
        if (reason := why_not_metered(tree)) is not None:
            raise NotCheapError(f"it has {reason}")
        environment = _MeteredEnvironment(limits)
        self._template = Template.from_code(environment, environment.compile_metered(tree), environment.globals)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render it.

        :raises NotCheapError: it has to be rendered where it can be killed
        """
        context = self._template.new_context(dict(variables))
        return "".join(self._template.root_render_func(context))


class _MeteredContext(Context):
    """Holds the variables of one rendering, and its account."""

    def __init__(self, environment: _MeteredEnvironment, *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, *args, **kwargs)
        limits = environment.limits
        self._left = limits.max_chars
        self._deadline = time.monotonic() + min(_MAX_SECONDS, limits.max_seconds)

    def charge(self, chars: int) -> None:
        self._left -= chars
        if self._left < 0:
            raise NotCheapError("it makes too much text")

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise NotCheapError("it takes too long")

    def measure(self, value: object) -> DataSize:
        """Return the size of plain data that is about to be walked through, and charge its weight."""
        try:
            size = measure(value, limit=_MAX_WEIGHED)
        except TooLargeError as exc:
            raise NotCheapError(str(exc)) from None
        self.charge(size.weight)
        return size


class _MeteredEnvironment(TemplateEnvironment):
    """Charges operations to the account of the rendering, and lets none pass that it does not know."""

    context_class = _MeteredContext
    intercepted_binops = frozenset({"+", "-", "*", "%"})

    def __init__(self, limits: RenderLimits) -> None:
        # A finalizer that is passed the context also keeps Jinja from computing constant parts while it compiles.
        super().__init__(limits, optimized=False, finalize=_printed)
        self.filters.update(_FILTERS)

    def compile_metered(self, tree: nodes.Template) -> Any:
        """Compile a template so that whatever may grow with a text is looked at."""
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_turns", nodes.Const(_weight(loop.body)))
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [
                part if isinstance(part, nodes.Const) else _filtered(part, "_printed") for part in concat.nodes
            ]
        for compared in list(tree.find_all(nodes.Compare)):
            _weigh_compared(compared)
        for item in list(tree.find_all(nodes.Getitem)):
            if isinstance(item.arg, nodes.Slice):
                item.node = _filtered(item.node, "_sliced")
        tree.set_environment(self)
        return self.compile(tree)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute as the sandbox does, the usual ones without its detours."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _DICT_ATTRIBUTES:
                return obj[attribute]
        elif kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is str and is_cheap_method(str, attribute):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __context.check_time()
        if type(__obj) is Macro:
            text = __context.call(__obj, *args, **kwargs)
            __context.charge(len(text))
            return text
        for name in ("_loop_vars", "_block_vars"):  # Jinja's compiler passes them for functions that ask for a context
            kwargs.pop(name, None)
        if type(__obj) is BuiltinFunctionType:
            return _call_method(__context, __obj, args, kwargs)
        if __obj is strftime and not (len(args) == 1 and type(args[0]) is str and _DATE_FORMAT.fullmatch(args[0])):
            raise NotCheapError("it has an unusual date")
        if not any(__obj is known for known in (safe_range, PublicNamespace, raise_refusal, strftime)):
            raise NotCheapError(f"it calls a {type(__obj).__name__}")
        return __obj(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        kinds = (type(left), type(right))
        if kinds == (str, str) or kinds == (list, list):
            if operator == "+":
                size = len(left) + len(right)
                context.charge(size if kinds[0] is str else ITEM_CHARS * size)
                return left + right
        elif kinds == (int, int) and (operator != "*" or left.bit_length() + right.bit_length() <= _MAX_BITS):
            return self.binop_table[operator](left, right)
        raise NotCheapError(f"it has {kinds[0].__name__} {operator} {kinds[1].__name__}")


def _weigh_compared(compared: nodes.Compare) -> None:
    """Have operands looked at, unless one is a literal: comparing with that takes no longer than the literal is."""
    match compared.ops:
        case [nodes.Operand(op=op, expr=right)]:
            if is_constant(right) or (is_constant(compared.expr) and op not in ("in", "notin")):
                return
    compared.expr = _filtered(compared.expr, "_compared")
    for operand in compared.ops:
        operand.expr = _filtered(operand.expr, "_compared")


def _weight(body: Iterable[nodes.Node]) -> int:
    """Return what one turn of a loop adds to texts and lists out of the template itself."""
    weight = 1
    for node in body:
        if isinstance(node, nodes.Const | nodes.TemplateData):
            text = node.data if isinstance(node, nodes.TemplateData) else node.value
            weight += len(text) if isinstance(text, str) else 1
        elif isinstance(node, nodes.List | nodes.Dict):
            weight += ITEM_CHARS * len(node.items)
        weight += _weight(node.iter_child_nodes())
    return weight


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _text(value: object) -> str:
    if type(value) is not str:
        raise NotCheapError(f"it makes text of a {type(value).__name__}")
    return value


@pass_context
def _printed(context: _MeteredContext, value: Any) -> Any:
    """Let text and numbers pass into the text, which is charged for them."""
    if type(value) is str:
        context.charge(len(value))
    elif not isinstance(value, Undefined) and type(value) not in _PLAIN:
        raise NotCheapError(f"it prints a {type(value).__name__}")
    return value


@pass_context
def _compared(context: _MeteredContext, value: Any) -> Any:
    """Let a value pass that is about to be compared or searched."""
    if type(value) is not str:
        if type(value) in (list, tuple, dict):
            context.measure(value)
        elif type(value) not in _PLAIN and not isinstance(value, Undefined):
            raise NotCheapError(f"it compares a {type(value).__name__}")
    elif len(value) > _MAX_NEEDLE:
        context.check_time()
    return value


@pass_context
def _turns(context: _MeteredContext, items: Any, weight: int) -> Iterable[Any]:
    """Let a loop run over items."""
    context.check_time()
    if type(items) is list and len(items) <= _MAX_UNTIMED:
        context.charge(weight * len(items))
        return items
    return _timed_turns(context, items, weight)


def _timed_turns(context: _MeteredContext, items: Iterable[Any], weight: int) -> Iterator[Any]:
    for item in items:
        context.check_time()
        context.charge(weight)
        yield item


@pass_context
def _sliced(context: _MeteredContext, value: Any) -> Any:
    """Let a value pass of which a part is about to be copied."""
    if type(value) is str:
        context.charge(len(value))
    elif type(value) is list or type(value) is tuple:
        context.charge(ITEM_CHARS * len(value))
    elif not isinstance(value, Undefined):
        raise NotCheapError(f"it slices a {type(value).__name__}")
    return value


@pass_context
def _trim(context: _MeteredContext, value: Any, chars: str | None = None) -> str:
    return _stripped(context, _text(value).strip, chars)


@pass_context
def _upper(context: _MeteredContext, value: Any) -> str:
    return _charged(context, _text(value).upper())


@pass_context
def _lower(context: _MeteredContext, value: Any) -> str:
    return _charged(context, _text(value).lower())


@pass_context
def _replace(context: _MeteredContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replaced(context, _text(value), old, new, -1 if count is None else count)


@pass_context
def _string(context: _MeteredContext, value: Any) -> str:
    return _text(value)


@pass_context
def _capitalize(context: _MeteredContext, value: Any) -> str:
    return _charged(context, _text(value).capitalize())


@pass_context
def _join(context: _MeteredContext, value: Any, separator: str = "") -> str:
    parts = _list(context, value)
    if any(type(part) is not str for part in parts):
        raise NotCheapError("it joins something else than texts")
    context.charge(sum(map(len, parts)) + len(_text(separator)) * len(parts))
    return separator.join(parts)


@pass_context
def _list(context: _MeteredContext, value: Iterable[Any]) -> list[Any]:
    context.check_time()
    items = []
    for item in value:
        context.charge(ITEM_CHARS)
        items.append(item)
    return items


@pass_context
def _to_json(context: _MeteredContext, value: Any, indent: int | None = None, **options: Any) -> str:
    size = context.measure(value)
    if options.keys() - {"ensure_ascii"} or not (indent is None or type(indent) is int):
        raise NotCheapError("it writes JSON in an unusual way")
    # A character takes up to 12: those beyond the first plane, as two escaped surrogates.
    context.charge(12 * size.chars + size.items * (ITEM_CHARS + abs(indent or 0) * (size.depth + 1)))
    return to_json(value, indent=indent, **options)


@pass_context
def _select(context: _MeteredContext, value: Any, *test: Any) -> Iterator[Any]:
    _check_test(test)
    yield from do_select(context, _timed_turns(context, value, 1), *test)


@pass_context
def _reject(context: _MeteredContext, value: Any, *test: Any) -> Iterator[Any]:
    _check_test(test)
    yield from do_reject(context, _timed_turns(context, value, 1), *test)


@pass_context
def _select_attr(context: _MeteredContext, value: Any, attribute: Any, *test: Any) -> Iterator[Any]:
    _check_test(test)
    yield from do_selectattr(context, _timed_turns(context, value, 1), _text(attribute), *test)


@pass_context
def _reject_attr(context: _MeteredContext, value: Any, attribute: Any, *test: Any) -> Iterator[Any]:
    _check_test(test)
    yield from do_rejectattr(context, _timed_turns(context, value, 1), _text(attribute), *test)


def _check_test(test: tuple[Any, ...]) -> None:
    """Let tests pass that look at a value or compare it with a text or a number."""
    match test:
        case () | ("defined" | "undefined" | "none" | "string" | "mapping",):
            return
        case ("equalto" | "eq" | "==" | "ne" | "!=", other) if type(other) in _PLAIN:
            return
    raise NotCheapError("it selects in an unusual way")


def _call_method(
    context: _MeteredContext, method: BuiltinFunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of a built-in type if it costs no more than a walk over the text."""
    owner = method.__self__
    name = method.__name__
    if not is_cheap_method(type(owner), name):
        raise NotCheapError(f"it calls {name}")
    if type(owner) is not str:
        return method(*args, **kwargs)
    if name == "replace":
        if kwargs or len(args) not in (2, 3):
            raise NotCheapError("it calls replace in an unusual way")
        return _replaced(context, owner, *args)
    if name in ("strip", "lstrip", "rstrip"):
        return _stripped(context, method, *args, **kwargs)
    return _made(context, method(*args, **kwargs))


def _charged(context: _MeteredContext, text: str) -> str:
    context.charge(len(text))
    return text


def _made(context: _MeteredContext, value: Any) -> Any:
    if type(value) is str:
        context.charge(len(value))
    elif type(value) is list:
        context.charge(sum(map(len, value)) + ITEM_CHARS * len(value))
    return value


def _stripped(context: _MeteredContext, strip: Any, chars: Any = None) -> str:
    if chars is not None and len(_text(chars)) > _MAX_NEEDLE:
        raise NotCheapError("it strips many characters")
    return _charged(context, strip(chars))


def _replaced(context: _MeteredContext, text: str, old: Any, new: Any, count: Any = -1) -> str:
    times = text.count(_text(old))
    context.check_time()
    context.charge(len(text) + times * max(0, len(_text(new)) - len(old)))
    return text.replace(old, new, count)


_FILTERS: Mapping[str, Any] = {
    "_turns": _turns,
    "_printed": _printed,
    "_compared": _compared,
    "_sliced": _sliced,
    "capitalize": _capitalize,
    "count": len,
    "d": do_default,
    "default": do_default,
    "first": do_first,
    "items": do_items,
    "join": _join,
    "last": do_last,
    "length": len,
    "list": _list,
    "lower": _lower,
    "reject": _reject,
    "rejectattr": _reject_attr,
    "replace": _replace,
    "select": _select,
    "selectattr": _select_attr,
    "string": _string,
    "tojson": _to_json,
    "trim": _trim,
    "upper": _upper,
}
