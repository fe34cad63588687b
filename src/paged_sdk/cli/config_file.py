"""Reads files that hold a command line, and makes their JSON schema.

Keys and types come from the signatures of the commands, so that new options need no change here.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

import typer
import yaml
from attrs import frozen
from typer.models import OptionInfo, ParameterInfo

from paged_sdk.cli.bench import bench
from paged_sdk.cli.doctor import doctor
from paged_sdk.cli.groups import spellings
from paged_sdk.cli.options import PAGED_ATTN, SPECULATE
from paged_sdk.cli.quantize import quantize
from paged_sdk.cli.run import run
from paged_sdk.cli.serve import serve
from paged_sdk.cli.top import top
from paged_sdk.cli.tune import tune
from paged_sdk.cli.unique_keys import check_unique, unique

__all__ = ["COMMANDS", "json_schema", "read_arguments"]

COMMANDS: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {"run": run, "serve": serve, "bench": bench, "tune": tune, "quantize": quantize, "doctor": doctor, "top": top}
)
COMMAND: Final = "command"
JSON_TYPES: Final[Mapping[type, str]] = MappingProxyType({bool: "boolean", int: "integer", float: "number"})


@frozen(kw_only=True)
class _Parameter:
    """Describes an option or argument of a command.

    :ivar name: first of its keys
    :ivar flag: the option's spelling; None: an argument
    :ivar kind: type of its value, or of each of its values
    :ivar is_list: whether it accepts several values
    """

    name: str
    flag: str | None
    kind: type
    is_list: bool
    is_required: bool
    description: str

    @property
    def may_be_alone(self) -> bool:
        """Tell whether the option's value is optional, so that the file may have ``true``."""
        return self.flag in (SPECULATE, PAGED_ATTN)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value."""
        one: dict[str, Any] = {"type": JSON_TYPES.get(self.kind, "string")}
        if issubclass(self.kind, Enum):
            one["enum"] = [member.value for member in self.kind]
        kinds = [one]
        if self.kind is str:
            kinds = [{"type": ["string", "number"]}]  # "isq: 4" is a number to YAML
        if self.may_be_alone:
            kinds.append({"type": "boolean"})
        if self.is_list:
            kinds.append({"type": "array", "items": kinds[0]})
        value = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return {**value, "description": self.description}

    def arguments(self, value: object) -> list[str]:
        """Return a value as arguments of a command line.

        :raises ValueError: with the allowed values
        """
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not self.is_list:
            raise ValueError("expected one value, not a list")
        return [each for one in values for each in self._argument(one)]

    def _argument(self, value: object) -> Iterator[str]:
        if self.may_be_alone and isinstance(value, bool):
            # YAML reads on and off as booleans.
            if self.flag == PAGED_ATTN:
                yield f"{PAGED_ATTN}={'on' if value else 'off'}"
            elif value:
                yield SPECULATE
            return
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ValueError("expected true or false")
            if value:
                yield str(self.flag)
            return
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"expected {'a text' if self.kind is str else JSON_TYPES.get(self.kind, 'a text')}")
        if self.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)  # in JSON Schema, 1.0 is an integer
        yield str(value) if self.flag is None else f"{self.flag}={value}"


def _parameters(command: Callable[..., None]) -> dict[str, _Parameter]:
    """Return a command's parameters by key; an option with several spellings has several keys."""
    hints = get_type_hints(command, include_extras=True)
    found: dict[str, _Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        hint, *marks = get_args(hints[name]) or (hints[name],)
        info = next((mark for mark in marks if isinstance(mark, ParameterInfo)), None)
        if info is None or info.is_eager:  # the context, and options such as --version
            continue
        kind = next((each for each in get_args(hint) if each is not NoneType), hint)
        is_list = get_origin(hint) is list or get_origin(kind) is list
        if is_list:
            (kind,) = get_args(hint if get_origin(hint) is list else kind)
        flags = spellings(info) if isinstance(info, OptionInfo) else []
        keys = [flag.removeprefix("--") for flag in flags] or [name]
        made = _Parameter(
            name=keys[0],
            flag=next(iter(flags), None),
            kind=kind,
            is_list=is_list,
            is_required=parameter.default is inspect.Parameter.empty,
            description=info.help or f"Another name for an option of {command.__name__}.",
        )
        found |= dict.fromkeys(keys, made)
    return found


def read_arguments(file: Path) -> list[str]:
    """Return the command line that a file holds, beginning with the command's name.

    :param file: YAML, JSON or TOML, by its suffix
    :raises typer.BadParameter: naming a key that is unknown or has an invalid value
    """
    content = _read(file)
    name = content.pop(COMMAND, None)
    if not isinstance(name, str) or name not in COMMANDS:
        raise _refused(COMMAND, f"expected one of {', '.join(COMMANDS)}, not {name!r}" if name else "it is missing")
    known = _parameters(COMMANDS[name])
    if name == "serve" and file.suffix.lower() == ".json" and not content.keys() <= known.keys():
        from paged_sdk.cli.service_file import is_service_file  # not needed for --help

        if is_service_file(content):
            return [name, f"--config={file}"]
    options: list[str] = []
    places: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for key, value in content.items():
        parameter = known.get(key)
        if parameter is None:
            near = get_close_matches(key.replace("_", "-"), known, n=1)
            raise _refused(key, f"{name} has no such option{f'; did you mean {near[0]}?' if near else ''}")
        if given.setdefault(parameter.name, key) != key:
            raise _refused(key, f"it is the same option as {given[parameter.name]}, which is given too")
        try:
            arguments = parameter.arguments(value)
        except ValueError as error:
            raise _refused(key, str(error)) from None
        if parameter.flag is None:
            places[key] = arguments
        else:
            options += arguments
    missing = next((key for key, each in known.items() if each.is_required and key not in content), None)
    if missing is not None:
        raise _refused(missing, f"{name} needs it")
    in_order = [each for key in known for each in places.get(key, ())]
    return [name, *options, *(["--", *in_order] if in_order else [])]


def json_schema() -> str:
    """Return the JSON schema of such files as text."""
    return json.dumps(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "A command of paged-sdk",
            "anyOf": [*(_schema_of(name, command) for name, command in COMMANDS.items()), _schema_of_services()],
        },
        indent=2,
    )


def _schema_of(name: str, command: Callable[..., None]) -> dict[str, Any]:
    known = _parameters(command)
    required = [key for key, parameter in known.items() if parameter.is_required]
    return {
        "type": "object",
        "title": name,
        "properties": {COMMAND: {"const": name}} | {key: each.schema() for key, each in known.items()},
        "required": [COMMAND, *required],
        "additionalProperties": False,
    }


def _schema_of_services() -> dict[str, Any]:
    """Return the schema of files for ``serve --config``, with "command" required."""
    from paged_sdk.cli.service_file import service_file_schema

    schema = service_file_schema()
    return {"title": "serve --config", **{key: schema[key] for key in schema if key not in ("$schema", "title")}} | {
        "required": [COMMAND]
    }


def _read(file: Path) -> dict[str, Any]:
    """Read a file's keys and values."""
    try:
        text = file.read_text(encoding="utf-8")
        match file.suffix.lower():
            case ".json":
                content = json.loads(text, object_pairs_hook=unique)
            case ".toml":
                content = tomllib.loads(text)
            case ".yaml" | ".yml":
                content = _yaml(text)
            case _:
                raise typer.BadParameter(f"{file}: expected a name that ends in .yaml, .json or .toml")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # JSON's, TOML's and UTF-8's are ValueErrors
        raise typer.BadParameter(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise typer.BadParameter(f"{file}: expected names of options, each with its value")
    return content


def _yaml(text: str) -> object:
    """Parse YAML, refusing duplicate keys, of which ``safe_load`` would take the last."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    nodes = root.value if root is not None and isinstance(root.value, list) else []
    check_unique([str(node[0].value) for node in nodes if isinstance(node, tuple)])
    return yaml.safe_load(text)


def _refused(key: str, why: str) -> typer.BadParameter:
    return typer.BadParameter(why, param_hint=key)
