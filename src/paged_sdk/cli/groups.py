"""Expands groups of options in the signatures of commands, and applies them to builders.

A group is an attrs class whose fields are options. A field's annotation defines the option's spellings and help, and by
a mark (:class:`Setting`), which setting of the public API it sets. A command takes groups as parameters of their types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from attrs import NOTHING, evolve, fields, fields_dict, frozen, has
from typer.models import OptionInfo, ParameterInfo

__all__ = [
    "BuilderSetting",
    "Setting",
    "apply_settings",
    "given_options",
    "grouped",
    "replaced",
    "spellings",
    "spellings_of_settings",
]

_BuilderT = TypeVar("_BuilderT")
_GroupT = TypeVar("_GroupT")


@frozen
class Setting:
    """Marks an option with the name of its setting in the public API, which errors use, if it differs."""

    name: str


@frozen
class BuilderSetting(Setting):
    """Marks an option whose value is passed unchanged to a builder's method ``with_NAME``; a flag passes no value."""

    @property
    def method(self) -> str:
        """Return the method's name."""
        return f"with_{self.name}"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters are the options of its groups instead of the groups.

    :param command: a command that takes groups as parameters of their types
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(hints[name], type) and has(hints[name]):
            groups[name] = hints[name]
            parameters += _parameters(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))

    names = [each.name for each in parameters]
    assert len(set(names)) == len(names), f"an option of {command.__name__} is in two groups: {names}"

    @wraps(command)
    def with_groups(**given: Any) -> None:
        made: dict[str, Any] = {name: _make(group, given) for name, group in groups.items()}
        others = hints.keys() - groups.keys()
        command(**{name: value for name, value in given.items() if name in others}, **made)

    # typer and config_file read the options from the signature.
    with_groups.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_groups


def _parameters(group: type) -> Iterator[Parameter]:
    """Return the options of a group as parameters."""
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        kind, *marks = get_args(hints[each.name])
        default = Parameter.empty if each.default is NOTHING else each.default
        if get_origin(kind) is tuple:  # typer's type of repeatable options
            kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
        yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, *marks])


def _make(group: type[_GroupT], given: Mapping[str, Any]) -> _GroupT:
    hints = get_type_hints(group)
    several = {name for name, hint in hints.items() if get_origin(hint) is tuple}
    values = {name: given[name] for name in fields_dict(group)}  # type: ignore[arg-type]  # it is an attrs class
    return group(**{name: tuple(value or ()) if name in several else value for name, value in values.items()})


def replaced(group: _GroupT, values: Mapping[str, object]) -> _GroupT:
    """Return a group with some of its options replaced.

    :param values: values by names of options; names that are not in the group are ignored
    """
    names = fields_dict(type(group))  # type: ignore[arg-type]  # it is an attrs class
    return evolve(group, **{name: values[name] for name in names if name in values})  # type: ignore[misc]


def given_options(group: object) -> dict[str, Any]:
    """Return those of a group's options that differ from their defaults, by name."""
    values = ((each, getattr(group, each.name)) for each in fields(type(group)))  # type: ignore[arg-type]  # it is attrs
    return {each.name: value for each, value in values if value != each.default}


def apply_settings(builder: _BuilderT, group: object) -> _BuilderT:
    """Apply a group's options that are marked with :class:`BuilderSetting`, if given, to a builder.

    :raises ConfigError: invalid value
    """
    for name, hint in get_type_hints(type(group), include_extras=True).items():
        value = getattr(group, name)
        if value is None or value is False:
            continue
        for mark in get_args(hint)[1:]:
            if isinstance(mark, BuilderSetting):
                builder = getattr(builder, mark.method)(*() if value is True else (value,))
    return builder


def spellings_of_settings(command: Callable[..., None]) -> dict[str, str]:
    """Map the names by which errors may refer to a setting to the spelling of its option or argument: its name in
    Python, the setting's name, the builder's method, and the option itself.
    """
    found: dict[str, str] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        marks = get_args(hint)[1:]
        info = next((mark for mark in marks if isinstance(mark, ParameterInfo)), None)
        if info is None:  # the command's context
            continue
        spelling = spellings(info)[0] if isinstance(info, OptionInfo) else name.upper()
        names = {name, spelling}
        for mark in marks:
            if isinstance(mark, Setting):
                names.add(mark.name)
            if isinstance(mark, BuilderSetting):
                names.add(mark.method)
        found |= dict.fromkeys(names, spelling)
    return found


def spellings(option: OptionInfo) -> list[str]:
    """Return the long spellings of an option; the first one is shown."""
    # Within Annotated, the first argument of Option() is a spelling, but typer stores it as ``default``.
    said = [option.default, *(option.param_decls or ())]
    return [each for each in said if isinstance(each, str) and each.startswith("--")]
