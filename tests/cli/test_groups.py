"""Groups of options: each is written once, and commands, files and errors follow it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

import pytest
import typer
from attrs import fields, frozen
from typer.testing import CliRunner, Result

from paged_sdk import TextModelBuilder
from paged_sdk.cli import options
from paged_sdk.cli.config_file import COMMANDS
from paged_sdk.cli.flags import reporting
from paged_sdk.cli.groups import BuilderSetting, Setting, apply_settings, grouped, replaced, spellings_of_settings
from paged_sdk.cli.server_options import ServerOptions

SEEN: Final[list[Any]] = []


@frozen(kw_only=True)
class Speed:
    """Stands for a group that somebody adds."""

    threads: Annotated[int | None, typer.Option("--threads", "-n"), BuilderSetting("num_threads")] = None
    file: Annotated[tuple[Path, ...], typer.Option("--file")] = ()
    lean: Annotated[bool, typer.Option("--lean"), BuilderSetting("lean_memory")] = False


@grouped
def go(
    *, where: Annotated[str, typer.Argument(), Setting("place")], speed: Speed, output: options.OutputOptions
) -> None:
    """Go somewhere."""
    with reporting(go, output):
        SEEN.append((where, speed, apply_settings(TextModelBuilder("some/model"), speed)))


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(go)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_a_group_is_filled_and_applied() -> None:
    result = run("there", "--threads", "2", "--file", "a", "--file", "b", "--lean")
    assert result.exit_code == 0, result.output
    expected = TextModelBuilder("some/model").with_num_threads(2).with_lean_memory()
    assert SEEN.pop() == ("there", Speed(threads=2, file=(Path("a"), Path("b")), lean=True), expected)
    assert run("there").exit_code == 0
    assert SEEN.pop() == ("there", Speed(), TextModelBuilder("some/model"))


def test_errors_name_the_option() -> None:
    result = run("there", "-n", "0")
    assert result.exit_code == 2
    assert "Invalid value for --threads: " in result.output
    found = spellings_of_settings(go)
    assert (found["num_threads"], found["with_num_threads"], found["place"]) == ("--threads", "--threads", "WHERE")


def test_values_from_elsewhere_replace_those_of_a_group() -> None:
    assert replaced(Speed(lean=True), {"threads": 3, "other": 1}) == Speed(threads=3, lean=True)


def test_an_option_is_in_one_group() -> None:
    def twice(*, one: options.OutputOptions, quiet: Annotated[bool, typer.Option("--quiet")] = False) -> None: ...

    with pytest.raises(AssertionError, match="in two groups"):
        grouped(twice)


def test_marks_name_methods_of_builders() -> None:
    groups = [each for each in vars(options).values() if inspect.isclass(each) and hasattr(each, "__attrs_attrs__")]
    groups = [each for each in groups if each.__name__.endswith("Options")]
    assert len(groups) > 3
    marked = 0
    for group in (*groups, ServerOptions):
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            for mark in get_args(hints[field.name])[1:]:
                if isinstance(mark, BuilderSetting):
                    assert callable(getattr(TextModelBuilder, mark.method))
                    marked += 1
    assert marked > 10


@pytest.mark.parametrize("name", COMMANDS)
def test_no_setting_has_two_spellings(name: str) -> None:
    names: list[str] = []
    for parameter, hint in get_type_hints(COMMANDS[name], include_extras=True).items():
        names += {parameter, *(mark.name for mark in get_args(hint)[1:] if isinstance(mark, Setting))}
    assert len(names) == len(set(names))
