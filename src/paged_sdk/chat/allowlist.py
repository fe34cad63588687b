"""Tell which chat templates use only operations whose cost is known."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jinja2 import nodes

__all__ = ["MAX_SOURCE_CHARS", "why_not_metered"]

MAX_SOURCE_CHARS = 1 << 15
"""A longer template is not parsed in the application's process. The longest one of a common model family has 20,000."""

_NODES = frozenset(
    {
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Assign, nodes.AssignBlock, nodes.If, nodes.For),
        *(nodes.With, nodes.Scope, nodes.Break, nodes.Continue, nodes.Macro, nodes.Keyword),
        *(nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Filter),
        *(nodes.Test, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.Neg),
        *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod, nodes.Concat, nodes.List, nodes.Dict, nodes.Pair, nodes.Tuple),
    }
)
_FILTERS = frozenset(
    {"capitalize", "count", "d", "default", "first", "items", "join", "last", "length", "list", "lower", "map"}
    | {"reject", "rejectattr", "replace", "select", "selectattr", "string", "tojson", "trim", "upper"}
)
_TESTS = frozenset(
    {"boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sequence"}
    | {"string", "true", "undefined"}
)
_METHODS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "str": frozenset(
            {"endswith", "find", "lower", "lstrip", "replace", "rfind", "rsplit", "rstrip", "split", "splitlines"}
            | {"startswith", "strip", "title", "upper"}
        ),
        "dict": frozenset({"get", "items", "keys", "values"}),
    }
)
_FUNCTIONS = frozenset({"namespace", "raise_exception", "range", "strftime_now"})
_ARGUMENTS_OF_ANY_CALL = frozenset({"caller", "kwargs", "varargs"})


def why_not_metered(template: nodes.Template) -> str | None:
    """Return the first thing in a template that is not on the list of operations with bounded cost, or None.

    A template can rebind names, so this check is only a forecast: when the template runs, the metered environment
    checks the objects themselves.
    """
    macros = {macro.name for macro in template.find_all(nodes.Macro)}
    for node in [template, *template.find_all(nodes.Node)]:
        if (reason := _why_not(node, macros)) is not None:
            return reason
    return None


def is_constant(node: nodes.Node) -> bool:
    """Tell whether an expression consists of literals only."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(is_constant, node.items))
    return isinstance(node, nodes.Const)


def is_cheap_method(kind: type, name: str) -> bool:
    """Tell whether this method of a built-in type takes time at most linear in the text."""
    return name in _METHODS.get(kind.__name__, ())


def _why_not(node: nodes.Node, macros: set[str]) -> str | None:
    match node:
        case _ if type(node) not in _NODES:
            return f"{type(node).__name__} in line {node.lineno}"
        case nodes.For(recursive=True):
            return f"a recursive loop in line {node.lineno}"
        case nodes.Name(name=name, ctx="load") if name in _ARGUMENTS_OF_ANY_CALL and macros:
            return f"{name} in line {node.lineno}"
        case nodes.Tuple(ctx="load") if not is_constant(node):
            return f"a tuple in line {node.lineno}"
        case nodes.Pair(key=key) if not isinstance(key, nodes.Const):
            return f"a computed key in line {node.lineno}"
        case nodes.Filter(name=name) | nodes.Test(name=name) if node.dyn_args or node.dyn_kwargs:
            return f"{name} with * in line {node.lineno}"
        case nodes.Filter(name=name) if name not in _FILTERS:
            return f"the filter {name} in line {node.lineno}"
        case nodes.Test(name=name) if name not in _TESTS:
            return f"the test {name} in line {node.lineno}"
        case nodes.Call():
            return _why_not_call(node, macros)
    return None


def _why_not_call(call: nodes.Call, macros: set[str]) -> str | None:
    if call.dyn_args or call.dyn_kwargs:
        return f"a call with * in line {call.lineno}"
    match call.node:
        case nodes.Name(name=name) if name in _FUNCTIONS or name in macros:
            return None
        case nodes.Getattr(attr=attr) if any(attr in methods for methods in _METHODS.values()):
            return None
    return f"a call in line {call.lineno}"
