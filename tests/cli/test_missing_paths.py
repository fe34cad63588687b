"""A path that does not exist is an invalid value of the option that names it, or of the key in a file: exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from paged_sdk.cli.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.make_checkpoint("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.make_gguf(tmp_path_factory.mktemp("gguf")).parent)


def said(*arguments: str, code: int = 2) -> str:
    """Run a command line, and return what it says in one line."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run Hi -m GONE", "--model-id"),
        ("run Hi -m MODEL --chat-template GONE", "--chat-template"),
        ("run Hi -m MODEL --topology GONE", "--topology"),
        ("run Hi -m MODEL --isq Q8_0 --imatrix GONE", "--imatrix"),
        ("run Hi -m MODEL --isq Q8_0 --calibration-file GONE", "--calibration-file"),
        ("run Hi -m MODEL --adapter GONE", "--adapter"),
        ("run Hi -m MODEL --adapter style=GONE", "--adapter"),
        ("run Hi -m MODEL --tok-model-id GONE", "--tok-model-id"),
        ("run Hi -m MODEL --draft-model GONE", "--draft-model"),
        ("run Hi -m MODEL --image GONE", "--image"),
        ("run Hi -m MODEL --json-schema GONE", "--json-schema"),
        ("run Hi --mmproj GONE", "--mmproj"),
        ("serve -m GONE --port 0", "--model-id"),
        ("serve -m MODEL --port 0 --adapter a=GONE", "--adapter"),
        ("serve --config GONE", "--config"),
        ("serve --adapter-folder GONE", "--adapter-folder"),
        ("bench GONE", "MODEL"),
        ("bench -m GONE", "--model-id"),
        ("tune GONE", "MODEL"),
        ("doctor GONE", "MODEL"),
        ("doctor --plan GONE", "--plan"),
        ("doctor --plan MODEL --isq Q8_0 --topology GONE", "--topology"),
        ("quantize GONE OUT", "SOURCE"),
        ("quantize MODEL OUT --imatrix GONE", "--imatrix"),
        ("quantize MODEL OUT --calibrate GONE", "--calibrate"),
        ("quantize MODEL OUT --topology GONE", "--topology"),
        ("quantize MODEL GONE/x.gguf", "TARGET"),
        ("quantize MODEL OUT --mmproj GONE/x.gguf", "--mmproj"),
        ("from-config GONE", "'FILE'"),
        ("run Hi -m MODEL -f gone.gguf", "--quantized-file"),
        ("run Hi -m GGUF -f below/gone.gguf", "--quantized-file"),
        ("serve -m GGUF --port 0 -f gone.gguf", "--quantized-file"),
        ("bench GGUF -f gone.gguf", "--quantized-file"),
        ("doctor --plan GGUF -f gone.gguf", "--quantized-file"),
    ],
)
def test_the_option_is_named(command: str, option: str, model: str, gguf: str, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    values = {"GONE": gone, "MODEL": model, "GGUF": gguf, "OUT": str(tmp_path / "out.gguf")}
    arguments = command.split(" ")
    for name, value in values.items():
        arguments = [each.replace(name, value) for each in arguments]
    shown = said(*arguments)
    assert f"Invalid value for {option}: " in shown.replace("'--", "--").replace("':", ":").replace("'FILE", "'FILE'")
    assert "gone" in shown
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"model": "GONE"}, "model"),
        ({"model": "MODEL", "tokenizer": "GONE"}, "tokenizer"),
        ({"model": "MODEL", "chat_template": "GONE"}, "chat_template"),
        ({"model": "MODEL", "adapters": {"style": "GONE"}}, "adapters"),
        ({"model": "MODEL", "topology": "GONE"}, "topology"),
        ({"model": "MODEL", "isq": "Q8_0", "imatrix": "GONE"}, "imatrix"),
        ({"model": "MODEL", "isq": "Q8_0", "calibration_file": "GONE"}, "calibration_file"),
        ({"model": "MODEL", "draft_model": "GONE"}, "draft_model"),
        ({"model": "MODEL", "token_source": "path:GONE"}, "token_source"),
        ({"model": "GGUF", "mmproj": "GONE"}, "mmproj"),
        ({"model": "GGUF", "quantized_files": ["gone.gguf"]}, "quantized_files"),
        ({"model": "MODEL", "server": {"adapter_folder": "GONE"}}, "server.adapter_folder"),
        ({"models": [{"model": "MODEL", "name": "a"}, {"model": "GONE"}]}, "models[1].model"),
        (
            {"chat_template": "GONE", "models": [{"model": "MODEL", "chat_template": None}, {"model": "MODEL"}]},
            "chat_template",
        ),
        (
            {
                "models": [
                    {"model": "MODEL", "name": "a", "topology": {}},
                    {"model": "MODEL", "topology": "GONE"},
                ]
            },
            "models[1].topology",
        ),
    ],
)
def test_the_file_and_the_key_are_named(
    content: dict[str, Any], key: str, model: str, gguf: str, tmp_path: Path
) -> None:
    text = json.dumps({"server": {"port": 0}} | content)
    for name, path in {"GONE": str(tmp_path / "gone"), "MODEL": model, "GGUF": gguf}.items():
        text = text.replace(name, path)
    file = tmp_path / "service.json"
    file.write_text(text)
    shown = said("serve", "--config", str(file))
    assert f"Invalid value for --config: {file}: {key}: " in shown
    assert "gone" in shown


def test_the_command_line_counts_before_a_path_in_a_file(model: str, tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    file.write_text(json.dumps({"model": model, "chat_template": str(tmp_path / "gone"), "isq": "Q8_0"}))
    others = "--chat-template", str(tmp_path / "gone too")
    assert "Invalid value for --chat-template: " in said("serve", "--config", str(file), "--port", "0", *others)


def test_a_path_may_be_relative_or_begin_with_a_tilde(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for option in ("--imatrix", "--chat-template", "--topology"):
        for path in ("gone", "./gone", "~/gone"):
            assert f"{option}: " in said("run", "Hi", "-m", model, "--isq", "Q8_0", option, path)


def test_a_file_that_exists_and_cannot_be_used_is_an_error_of_the_model(model: str, tmp_path: Path) -> None:
    file = tmp_path / "imatrix"
    file.write_text("no matrix")
    assert said("run", "Hi", "-m", model, "--isq", "Q8_0", "--imatrix", str(file), code=1).startswith("error: ")


def test_a_target_of_an_image_encoder_that_exists_is_named_by_its_option(model: str, tmp_path: Path) -> None:
    out, taken = str(tmp_path / "out.gguf"), tmp_path / "mmproj.gguf"
    taken.touch()
    assert "--mmproj: " in said("quantize", model, out, "--mmproj", str(taken))
    assert "--mmproj-type: " in said("quantize", model, out, "--mmproj", str(tmp_path / "new"), "--mmproj-type", "Q3_K")
