"""Makes the page of all settings from the code that reads them."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Final

import attrs
import typer
from typer.core import TyperArgument

import paged_sdk
from documentation.rst import described_fields, first_paragraph
from paged_sdk.cli.app import app
from paged_sdk.config import env
from paged_sdk.server import ServerSettings

__all__ = ["builder_calls", "command_options", "configuration_page", "environment_variables", "fields_of"]

VALUES: Final = {
    "The KV pool": paged_sdk.PagedAttentionMeta,
    "Speculative decoding": paged_sdk.SpeculativeConfig,
    "Layers": paged_sdk.LayerTopology,
    "Images": paged_sdk.ImageLimits,
    "Hung replicas": paged_sdk.HangLimits,
    "Sampling": paged_sdk.SamplingParams,
    "DRY": paged_sdk.DryParams,
}

INTRODUCTION: Final = """\
# Configuration

All settings, generated from the code that reads them.

Precedence: the request, then the builder call or command-line option, the environment, the checkpoint's own files, and
the default. An invalid value is a `ConfigError` that names the setting and says what is allowed.
"""


def environment_variables() -> dict[str, str]:
    """Return what each variable that models are tuned by says."""
    body = ast.parse(Path(env.__file__).read_text(encoding="utf-8")).body
    found: dict[str, str] = {}
    for statement, after in itertools.pairwise(body):
        match statement, after:
            case ast.Assign(value=ast.Constant(value=str(name))), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = first_paragraph(text)
    return found


def builder_calls(builder: type) -> dict[str, str]:
    """Return each call of a builder, as a program writes it, and what it does."""
    names = [name for name in dir(builder) if name.startswith(("with_", "without_"))]
    return {_call(name, getattr(builder, name)): first_paragraph(getattr(builder, name)) for name in names}


def fields_of(value: type[attrs.AttrsInstance]) -> dict[str, tuple[str, str]]:
    """Return each field's default and what it means."""
    described = described_fields(value)
    public = [field for field in attrs.fields(value) if not field.name.startswith("_")]
    return {field.name: (_default(field.default), described.get(field.name, "")) for field in public}


def command_options() -> dict[str, dict[str, str]]:
    """Return the options and arguments of each command, as they are spelled, with their help."""
    return {
        command: {_spelled(each): " ".join((each.help or "").split()) for each in parameters}
        for command, parameters in _parameters().items()
    }


def configuration_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, "## Environment variables\n", "Models read them when they are built.\n"]
    parts.append(_table(("variable", "meaning"), _rows_of_environment()))
    first = builder_calls(paged_sdk.TextModelBuilder)
    calls = {"a builder": first}
    for builder in (paged_sdk.GgufModelBuilder, paged_sdk.VisionModelBuilder):
        own = {name: text for name, text in builder_calls(builder).items() if name not in first}
        calls[f"`{builder.__name__}`, in addition"] = own
    calls["a request"] = builder_calls(paged_sdk.RequestBuilder)
    for owner, rows in calls.items():
        parts += [f"## Methods of {owner}\n", _table(("method", "meaning"), _code_first(rows))]
    for title, value in {**VALUES, "The server": ServerSettings}.items():
        fields = [(f"`{name}`", default, text) for name, (default, text) in fields_of(value).items()]
        parts += [f"## {title}\n", f"Fields of `{value.__name__}`.\n", _table(("field", "default", "meaning"), fields)]
    parts.append("## Commands\n")
    for command, options in command_options().items():
        parts += [f"### `{command}`\n", _table(("option", "meaning"), _code_first(options))]
    return "\n".join(parts)


def _parameters() -> dict[str, list[Any]]:
    """Return what each command takes, in typer's form."""
    group: Any = typer.main.get_command(app)
    return {
        f"paged-sdk {command.name}": [each for each in command.params if not getattr(each, "hidden", False)]
        for command in group.commands.values()
    }


def _rows_of_environment() -> list[tuple[str, str]]:
    of_options: dict[str, str] = {}
    for command, parameters in _parameters().items():
        for each in parameters:
            if each.envvar:
                before = of_options.get(each.envvar)
                option = f"`{each.opts[0]}` of `{command}`"
                of_options[each.envvar] = f"{before[:-1]}, {option}." if before else f"Default of {option}."
    return [(f"`{name}`", text) for name, text in {**environment_variables(), **of_options}.items()]


def _call(name: str, function: Any) -> str:
    shown: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{stars}{parameter.name}{default}")
    return f"{name}({', '.join(shown)})"


def _default(default: object) -> str:
    if default is attrs.NOTHING:
        return ""
    if isinstance(default, Enum):
        return f"`{type(default).__name__}.{default.name}`"
    return "none" if type(default) is type(attrs.Factory(dict)) else f"`{default!r}`"


def _spelled(parameter: Any) -> str:
    if isinstance(parameter, TyperArgument):
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join((*parameter.opts, *parameter.secondary_opts))


def _code_first(rows: dict[str, str]) -> list[tuple[str, ...]]:
    return [(f"`{name}`", text) for name, text in rows.items()]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
