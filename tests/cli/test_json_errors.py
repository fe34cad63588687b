"""Errors of ``serve --log-json`` are lines of JSON, however early they are found."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paged_sdk.cli.app import app
from paged_sdk.cli.service_file import ServiceFile

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Take the handler of this process away again, which writes to what a command had as stderr."""
    root, own = logging.getLogger(), logging.getLogger("paged_sdk")
    before, level = list(root.handlers), own.level
    yield
    root.handlers[:] = before
    own.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["-m", "EMPTY"], "ModelLoadError", 1),
        (["--isq", "Q99"], "ConfigError", 2),
        (["-m", "no/such/model.gguf"], "ModelLoadError", 2),
        (["--port", "100000"], "BadParameter", 2),
        (["--no-such-option"], "NoSuchOption", 2),
    ],
)
def test_the_line_has_the_kind_of_the_error(arguments: list[str], kind: str, code: int, tmp_path: Path) -> None:
    given = [str(tmp_path) if each == "EMPTY" else each for each in arguments]
    ended = CliRunner().invoke(app, ["serve", "--port", "0", "--log-json", *given])
    assert ended.exit_code == code
    *_, line = map(json.loads, ended.stderr.splitlines())
    assert (line["level"], line["logger"], line["error"]) == ("error", "paged_sdk.server", kind)
    assert not ended.stdout


def test_a_bug_is_a_line_of_json_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(ServiceFile, "read", fail)
    ended = CliRunner().invoke(app, ["serve", "--log-json", "--config", "service.json"])
    assert ended.exit_code == 1
    (line,) = map(json.loads, ended.stderr.splitlines())
    assert line["error"] == "KeyError"
    assert 'raise KeyError("unforeseen")' in line["exception"]


def test_a_file_asks_for_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    file.write_text(json.dumps({"model": str(tmp_path / "gone"), "server": {"port": 0, "log_json": True}}))
    ended = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert ended.exit_code == 2
    *_, line = map(json.loads, ended.stderr.splitlines())
    assert f"{file}: model: " in line["message"]


def test_without_the_flag_errors_are_for_people() -> None:
    for arguments in (["--port", "100000"], ["--isq", "Q99"]):
        shown = CliRunner().invoke(app, ["serve", *arguments]).stderr
        assert shown.startswith("Usage: ")
        assert "Invalid value for " in shown
