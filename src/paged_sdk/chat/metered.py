"""Render chat templates in the application's own process, where a runaway rendering could not be killed.

Every allowed operation is on a list (:mod:`paged_sdk.chat.allowlist`), takes time and memory in proportion to its
operands, and is charged to a budget. Any other operation, and one that exceeds the budget or the time limit, raises
:class:`NotCheapError`. A helper process, which can be killed, then renders the template, within wider limits. So a
malicious template gains nothing by looking cheap, and an expensive but legitimate one still works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType
from typing import Any

from jinja2 import Template, nodes
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import safe_range

from paged_sdk.chat.account import MeteredContext, NotCheapError
from paged_sdk.chat.allowlist import is_cheap_method, is_constant, why_not_metered
from paged_sdk.chat.metered_filters import FILTERS, call_method, printed
from paged_sdk.chat.plain_data import ITEM_CHARS
from paged_sdk.chat.sandbox import PublicNamespace, RenderLimits, TemplateEnvironment, raise_refusal, strftime

__all__ = ["MAX_METERED_CHARS", "MeteredTemplate", "NotCheapError"]

MAX_METERED_CHARS = 1 << 20
"""Messages with more text are rendered in a helper process, which costs little compared with tokenizing them."""
_MAX_BITS = 4096
_LOOP_ATTRIBUTES = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_DATE_FORMAT = re.compile(r"(?:[^%]|%[-A-Za-z%]){0,99}")


class MeteredTemplate:
    """Renders a template whose operations are all on the list, with the same result as the sandbox. Thread-safe.

    :param tree: the parsed template; changed in place
    :param limits: a rendering that would exceed them raises NotCheapError
    :raises NotCheapError: the template has an operation that is not on the list
    :raises jinja2.TemplateError: the template cannot be compiled
    """

    def __init__(self, tree: nodes.Template, limits: RenderLimits) -> None:
        if (reason := why_not_metered(tree)) is not None:
            raise NotCheapError(f"it has {reason}")
        environment = _MeteredEnvironment(limits)
        self._template = Template.from_code(environment, environment.compile_metered(tree), environment.globals)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template.

        :raises NotCheapError: it must be rendered in a helper process
        """
        context = self._template.new_context(dict(variables))
        return "".join(self._template.root_render_func(context))


class _MeteredEnvironment(TemplateEnvironment):
    """Charges operations to the budget of the rendering, and refuses unknown ones."""

    context_class = MeteredContext
    intercepted_binops = frozenset({"+", "-", "*", "%"})

    def __init__(self, limits: RenderLimits) -> None:
        # A finalizer that takes the context also keeps Jinja from evaluating constant expressions at compile time.
        super().__init__(limits, optimized=False, finalize=printed)
        self.filters.update(FILTERS)

    def compile_metered(self, tree: nodes.Template) -> Any:
        """Compile a template with checks on every operation whose cost may grow with its operands."""
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
        """Return an attribute as the sandbox does, with a fast path for common ones."""
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
        for name in ("_loop_vars", "_block_vars"):  # Jinja's compiler passes these for functions that take the context
            kwargs.pop(name, None)
        if type(__obj) is BuiltinFunctionType:
            return call_method(__context, __obj, args, kwargs)
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
        elif kinds == (int, int) and left.bit_length() + right.bit_length() <= _MAX_BITS:
            return self.binop_table[operator](left, right)
        raise NotCheapError(f"it has {kinds[0].__name__} {operator} {kinds[1].__name__}")


def _weigh_compared(compared: nodes.Compare) -> None:
    """Charge for the operands of a comparison, unless one is a literal, whose length then bounds the time."""
    match compared.ops:
        case [nodes.Operand(op=op, expr=right)]:
            if is_constant(right) or (is_constant(compared.expr) and op not in ("in", "notin")):
                return
    compared.expr = _filtered(compared.expr, "_compared")
    for operand in compared.ops:
        operand.expr = _filtered(operand.expr, "_compared")


def _weight(body: Iterable[nodes.Node]) -> int:
    """Return how much literal text and how many items of literal lists one iteration of a loop may produce."""
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
