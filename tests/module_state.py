"""Find what a module keeps between calls: several models live in one process, so modules must keep no state of
theirs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, TypeAlias

__all__ = ["mutable_state"]

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_CACHES: Final = frozenset({"cache", "lru_cache"})
_DISPLAYS: Final = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_CONTAINERS: Final = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"})
# What is made to be changed, or to be waited for: no constant, however it is spelled.
_CELLS: Final = frozenset(
    {"count", "local", "ContextVar", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
    | {"Lock", "RLock", "Semaphore", "BoundedSemaphore", "Event", "Condition", "Barrier"}
    | {"Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "ThreadPoolExecutor", "ProcessPoolExecutor", "Random"}
)
_CHANGING_METHODS: Final = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft"}
    | {"remove", "reverse", "rotate", "setdefault", "sort", "update", "move_to_end", "put", "put_nowait", "subtract"}
    | {"difference_update", "intersection_update", "symmetric_difference_update", "__setitem__", "__delitem__"}
)
# Functions that change their first argument.
_CHANGING_FUNCTIONS: Final = frozenset(
    {"setattr", "delattr", "next", "heappush", "heappop", "heapify", "heapreplace", "heappushpop", "setitem", "delitem"}
    | {"insort", "insort_left", "insort_right", "shuffle", "ior", "iadd"}
)


def mutable_state(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Return the names in which a module keeps state, with the line.

    These are containers whose name is not a constant's, constants and other names of the module that something changes,
    objects that are made to be changed or waited for, and caches of functions.
    """
    for name, value, line in _bindings(tree):
        if _called(value) in _CELLS or (_is_container(value) and not _is_constant(name)):
            yield name, line
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            _last_part(decorator) in _CACHES for decorator in node.decorator_list
        ):
            yield node.name, node.lineno
    yield from _changes(tree)


def _names_of_module(tree: ast.Module) -> frozenset[str]:
    """Return every name that a module's own lines bind, which a function that changes it finds outside of itself."""
    bound = {name for name, _, _ in _bindings(tree)}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound.update(alias.asname or alias.name.partition(".")[0] for alias in names)
    return frozenset(bound)


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield module-level assignments: name, value and line."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((target.id, value, node.lineno) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                yield name, value, node.lineno


def _changes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield where a module changes the values of its own names; attributes are part of a definition outside of
    functions.
    """
    for node, names, in_function in _with_names(tree, _names_of_module(tree)):
        match node:
            case ast.Global(names=changed):
                yield from ((name, node.lineno) for name in changed)
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
                if _called(value) == "globals":
                    yield "globals()", node.lineno
                elif (root := _root(value)) in names:
                    yield str(root), node.lineno
            case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()):
                if in_function and (root := _root(value)) in names:
                    yield str(root), node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if (
                name in names and method in _CHANGING_METHODS
            ):
                yield name, node.lineno
            case ast.Call(func=function, args=[ast.Name(id=name), *_]) if (
                in_function and name in names and _last_part(function) in _CHANGING_FUNCTIONS
            ):
                yield name, node.lineno


def _with_names(
    node: ast.AST, names: frozenset[str], *, in_function: bool = False
) -> Iterator[tuple[ast.AST, frozenset[str], bool]]:
    """Yield every node, with the module's names that no function around it hides, and whether there is a function
    around it.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        names, in_function = names - _own_names(node), True
    yield node, names, in_function
    for child in ast.iter_child_nodes(node):
        yield from _with_names(child, names, in_function=in_function)


def _own_names(function: _Function | ast.Lambda) -> frozenset[str]:
    """Return the names that a function binds itself: parameters and whatever is assigned in it."""
    own, declared = set(), set()
    for node in ast.walk(function):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                own.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                own.add(name)
            case ast.Global(names=names):
                declared.update(names)
    return frozenset(own - declared)


def _root(value: ast.expr) -> str | None:
    """Return the name that an attribute or an element is reached from: ``a`` of ``a.b[0].c``."""
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else None


def _last_part(expression: ast.expr) -> str | None:
    """Return the last part of a name: ``lru_cache`` of ``functools.lru_cache(maxsize=8)``."""
    if isinstance(expression, ast.Call):
        expression = expression.func
    match expression:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return None


def _called(value: ast.expr) -> str | None:
    return _last_part(value) if isinstance(value, ast.Call) else None


def _is_container(value: ast.expr) -> bool:
    return isinstance(value, _DISPLAYS) or _called(value) in _CONTAINERS


def _is_constant(name: str) -> bool:
    return name == "__all__" or name.isupper()
