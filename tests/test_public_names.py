"""What the names that applications use promise to readers and type checkers: a docstring, and a type, each."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_origin

import paged_sdk
import paged_sdk.kernels
import paged_sdk.mistralrs
import paged_sdk.server
import paged_sdk.testing

PUBLIC = (paged_sdk, paged_sdk.mistralrs, paged_sdk.kernels, paged_sdk.server, paged_sdk.testing)
SOURCE = Path(paged_sdk.__file__).parent


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("paged_sdk")


def public_things() -> Iterator[tuple[str, Any]]:
    """Return every public class, and every public function, method and property that this package defines."""
    for module in PUBLIC:
        for name in module.__all__:
            thing = getattr(module, name)
            thing = get_origin(thing) or thing  # of ChatStream, the class
            if inspect.isclass(thing) and is_ours(thing):
                yield f"{module.__name__}.{name}", thing
                for base in thing.__mro__:
                    if is_ours(base):
                        yield from members(f"{module.__name__}.{name}", base)
            elif inspect.isfunction(thing) and is_ours(thing):
                yield f"{module.__name__}.{name}", thing


def members(name: str, owner: type) -> Iterator[tuple[str, Any]]:
    for key, value in vars(owner).items():
        member = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if key.startswith("_") or not isinstance(member, property | types.FunctionType | type):
            continue
        if isinstance(member, property) or is_ours(member):
            yield f"{name}.{key}", member


THINGS = dict(public_things())


def inherited_docstring(name: str) -> str | None:
    """Return the docstring of what a method overrides, which documents it too."""
    owner, _, key = name.rpartition(".")
    bases = THINGS[owner].__mro__ if owner in THINGS else ()
    docs = (inspect.getdoc(vars(base).get(key)) for base in bases if is_ours(base) and key in vars(base))
    return next(filter(None, docs), None)


def test_there_is_something_to_look_at() -> None:
    assert len(THINGS) > 200


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        name
        for name, thing in THINGS.items()
        if not (thing.__doc__ or inherited_docstring(name)) and not (inspect.isclass(thing) and issubclass(thing, Enum))
    ]
    assert not missing, missing


def test_every_public_function_says_what_it_takes_and_returns() -> None:
    for name, thing in THINGS.items():
        function = thing.fget if isinstance(thing, property) else thing
        if inspect.isclass(function):
            continue
        assert function is not None
        signature = inspect.signature(function)
        for parameter in list(signature.parameters.values()):
            assert parameter.name in ("self", "cls") or parameter.annotation is not parameter.empty, name
        assert signature.return_annotation is not signature.empty, name


def own_targets(node: ast.Assign) -> Iterator[tuple[str, bool]]:
    """Return the attributes of ``self`` that an assignment sets, and whether it sets them to a plain name."""
    for target in node.targets:
        is_plain = isinstance(node.value, ast.Name) and isinstance(target, ast.Attribute)
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(each, ast.Attribute) and getattr(each.value, "id", "") == "self":
                yield each.attr, is_plain


def unclear_attributes(owner: ast.ClassDef) -> Iterator[str]:
    """Return the public attributes whose type a checker has to infer: that have no annotation anywhere, and are more
    than a parameter which is kept, or are a class's tuple, list or the like.
    """
    clear = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}  # properties
    shared = [node for node in owner.body if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant)]
    unclear = {target.id for node in shared for target in node.targets if isinstance(target, ast.Name)}
    kept: set[str] = set()
    has_slots = "__slots__" in unclear
    for node in ast.walk(owner):
        if isinstance(node, ast.AnnAssign):
            clear.add(node.target.attr if isinstance(node.target, ast.Attribute) else getattr(node.target, "id", ""))
        elif isinstance(node, ast.Assign):
            for name, is_plain in own_targets(node):
                if not is_plain or name in kept or has_slots:
                    unclear.add(name)
                kept.add(name)
    return (f"{owner.name}.{name}" for name in sorted(unclear - clear) if not name.startswith("_"))


def public_classes(module: ast.Module) -> Iterator[ast.ClassDef]:
    """Return the classes that have public names, and those of which a module's names are objects."""
    values = [node.value for node in module.body if isinstance(node, ast.Assign)]
    of_objects = {getattr(value.func, "id", "") for value in values if isinstance(value, ast.Call)}
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (not node.name.startswith("_") or node.name in of_objects):
            yield node


def is_enum(owner: ast.ClassDef) -> bool:
    return any(getattr(base, "id", "").endswith("Enum") for base in owner.bases)


def test_every_attribute_states_its_type() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    owners = [(path, node) for path, tree in trees.items() for node in public_classes(tree) if not is_enum(node)]
    assert len(owners) > 100
    unclear = [f"{path.relative_to(SOURCE)}: {name}" for path, owner in owners for name in unclear_attributes(owner)]
    assert not unclear, "annotate these: pyright's --verifytypes calls an inferred type ambiguous"
