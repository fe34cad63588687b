"""Implement the filters and methods of metered templates, each in time linear in its operands.

Each operation charges what it produces to the budget of the rendering, mostly beforehand. It has the parameters of
Jinja's own filter, in the same order and with the same names; unsupported arguments raise NotCheapError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

from jinja2 import Undefined, pass_context
from jinja2.filters import (
    do_default,
    do_first,
    do_items,
    do_last,
    do_map,
    do_reject,
    do_rejectattr,
    do_select,
    do_selectattr,
)

from paged_sdk.chat.account import MeteredContext, NotCheapError
from paged_sdk.chat.allowlist import is_cheap_method
from paged_sdk.chat.plain_data import ITEM_CHARS
from paged_sdk.chat.sandbox import to_json

__all__ = ["FILTERS", "call_method", "printed"]

_MAX_UNTIMED = 64
"""For loops of up to this many iterations, the clock is read only once. Most chats have fewer messages."""
_MAX_NEEDLE = 64
"""Limits the operand that multiplies the time: the characters to strip, or the text to search for from the end."""
_PLAIN = (str, int, float, bool, type(None))


def _text(value: object) -> str:
    if type(value) is not str:
        raise NotCheapError(f"it makes text of a {type(value).__name__}")
    return value


@pass_context
def printed(context: MeteredContext, value: Any) -> Any:
    """Charge for a value that is printed; refuse anything but text, numbers, booleans, None and undefined values."""
    if type(value) is str:
        context.charge(len(value))
    elif not isinstance(value, Undefined) and type(value) not in _PLAIN:
        raise NotCheapError(f"it prints a {type(value).__name__}")
    return value


@pass_context
def _compared(context: MeteredContext, value: Any) -> Any:
    """Charge for a value that is about to be compared or searched, or refuse it."""
    if type(value) is not str:
        if type(value) in (list, tuple, dict):
            context.measure(value)
        elif type(value) not in _PLAIN and not isinstance(value, Undefined):
            raise NotCheapError(f"it compares a {type(value).__name__}")
    elif len(value) > _MAX_NEEDLE:
        context.check_time()
    return value


@pass_context
def _turns(context: MeteredContext, items: Any, weight: int) -> Iterable[Any]:
    """Charge for the iterations of a loop.

    :param weight: the charge for one iteration
    """
    context.check_time()
    if type(items) is list and len(items) <= _MAX_UNTIMED:
        context.charge(weight * len(items))
        return items
    return _timed_turns(context, items, weight)


def _timed_turns(context: MeteredContext, items: Iterable[Any], weight: int) -> Iterator[Any]:
    for item in items:
        context.check_time()
        context.charge(weight)
        yield item


@pass_context
def _sliced(context: MeteredContext, value: Any) -> Any:
    """Charge for a value that is about to be sliced, or refuse it."""
    if type(value) is str:
        context.charge(len(value))
    elif type(value) is list or type(value) is tuple:
        context.charge(ITEM_CHARS * len(value))
    elif not isinstance(value, Undefined):
        raise NotCheapError(f"it slices a {type(value).__name__}")
    return value


@pass_context
def _trim(context: MeteredContext, value: Any, chars: str | None = None) -> str:
    return _stripped(context, _text(value).strip, chars)


@pass_context
def _upper(context: MeteredContext, value: Any) -> str:
    return _charged(context, _text(value).upper())


@pass_context
def _lower(context: MeteredContext, value: Any) -> str:
    return _charged(context, _text(value).lower())


@pass_context
def _replace(context: MeteredContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replaced(context, _text(value), old, new, -1 if count is None else count)


@pass_context
def _string(context: MeteredContext, value: Any) -> str:
    return _text(value)


@pass_context
def _capitalize(context: MeteredContext, value: Any) -> str:
    return _charged(context, _text(value).capitalize())


@pass_context
def _join(context: MeteredContext, value: Any, d: str = "", attribute: Any = None) -> str:
    parts, separator = _list(context, value), d
    if attribute is not None or any(type(part) is not str for part in parts):
        raise NotCheapError("it joins something else than texts")
    context.charge(sum(map(len, parts)) + len(_text(separator)) * len(parts))
    return separator.join(parts)


@pass_context
def _list(context: MeteredContext, value: Iterable[Any]) -> list[Any]:
    context.check_time()
    items = []
    for item in value:
        context.charge(ITEM_CHARS)
        items.append(item)
    return items


@pass_context
def _to_json(
    context: MeteredContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    size = context.measure(value)
    if separators is not None or sort_keys or not (indent is None or type(indent) is int):
        raise NotCheapError("it writes JSON in an unusual way")
    # A character takes up to 12 in JSON: beyond U+FFFF, as two escaped surrogates.
    context.charge(12 * size.chars + size.items * (ITEM_CHARS + abs(indent or 0) * (size.depth + 1)))
    return to_json(value, ensure_ascii, indent)


@pass_context
def _items(context: MeteredContext, value: Any) -> Iterator[Any]:
    # An iterator over a list, so that there are no deep chains of generators, as with Jinja's own filter. So it must
    # raise errors at once, not when the first item is taken.
    if not isinstance(value, Mapping | Undefined):
        raise NotCheapError(f"it takes the items of a {type(value).__name__}")
    return iter(_list(context, do_items(value)))


@pass_context
def _map(context: MeteredContext, value: Any, *filters: Any, **options: Any) -> Iterator[Any]:
    if filters or set(options) != {"attribute"}:
        raise NotCheapError("it maps in an unusual way")
    attribute = _text(options["attribute"])
    return iter(_list(context, do_map(context, _timed_turns(context, value, 1), attribute=attribute)))


@pass_context
def _select(context: MeteredContext, value: Any, *test: Any, **options: Any) -> Iterator[Any]:
    _check_test(test, options)
    return iter(_list(context, do_select(context, _timed_turns(context, value, 1), *test)))


@pass_context
def _reject(context: MeteredContext, value: Any, *test: Any, **options: Any) -> Iterator[Any]:
    _check_test(test, options)
    return iter(_list(context, do_reject(context, _timed_turns(context, value, 1), *test)))


@pass_context
def _select_attr(context: MeteredContext, value: Any, attribute: Any, /, *test: Any, **options: Any) -> Iterator[Any]:
    _check_test(test, options)
    return iter(_list(context, do_selectattr(context, _timed_turns(context, value, 1), _text(attribute), *test)))


@pass_context
def _reject_attr(context: MeteredContext, value: Any, attribute: Any, /, *test: Any, **options: Any) -> Iterator[Any]:
    _check_test(test, options)
    return iter(_list(context, do_rejectattr(context, _timed_turns(context, value, 1), _text(attribute), *test)))


def _check_test(test: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Allow tests that inspect a value, or compare it with a text or number."""
    match test:
        case _ if options:
            pass
        case () | ("defined" | "undefined" | "none" | "string" | "mapping",):
            return
        case ("equalto" | "eq" | "==" | "ne" | "!=", other) if type(other) in _PLAIN:
            return
    raise NotCheapError("it selects in an unusual way")


def call_method(
    context: MeteredContext, method: BuiltinFunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of a built-in type if it takes time at most linear in the text."""
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
    if name in ("rfind", "rsplit") and any(
        type(each) is str and len(each) > _MAX_NEEDLE for each in args + tuple(kwargs.values())
    ):
        raise NotCheapError("it searches for a long text from the end")
    return _made(context, method(*args, **kwargs))


def _charged(context: MeteredContext, text: str) -> str:
    context.charge(len(text))
    return text


def _made(context: MeteredContext, value: Any) -> Any:
    if type(value) is str:
        context.charge(len(value))
    elif type(value) is list:
        context.charge(sum(map(len, value)) + ITEM_CHARS * len(value))
    return value


def _stripped(context: MeteredContext, strip: Any, chars: Any = None) -> str:
    if chars is not None and len(_text(chars)) > _MAX_NEEDLE:
        raise NotCheapError("it strips many characters")
    return _charged(context, strip(chars))


def _replaced(context: MeteredContext, text: str, old: Any, new: Any, count: Any = -1) -> str:
    times = text.count(_text(old))
    context.check_time()
    context.charge(len(text) + times * max(0, len(_text(new)) - len(old)))
    return text.replace(old, new, count)


FILTERS: Mapping[str, Any] = MappingProxyType(
    {
        "_turns": _turns,
        "_printed": printed,
        "_compared": _compared,
        "_sliced": _sliced,
        "capitalize": _capitalize,
        "count": len,
        "d": do_default,
        "default": do_default,
        "first": do_first,
        "items": _items,
        "join": _join,
        "last": do_last,
        "length": len,
        "list": _list,
        "lower": _lower,
        "map": _map,
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
)
