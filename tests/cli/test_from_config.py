"""``paged-sdk from-config`` runs what a file says, and names what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner, Result

import tiny
from paged_sdk.cli.app import app
from paged_sdk.cli.config_file import json_schema, read_arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("model"))


def written(directory: Path, content: object, name: str = "c.yaml") -> Path:
    file = directory / name
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return file


def from_config(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["from-config", *map(str, arguments)])


def test_a_command_runs_as_from_the_command_line(model: Path, tmp_path: Path) -> None:
    content = {
        "command": "run",
        "prompt": "-x",
        "model": str(model),
        "dtype": "float32",
        "num-threads": 1,
        "pa-context-len": 512,
        "max-tokens": 6,
        "quiet": True,
        "raw": False,
    }
    flags = ["--dtype", "float32", "--num-threads", "1", "--pa-context-len", "512", "--max-tokens", "6", "--quiet"]
    expected = CliRunner().invoke(app, ["run", "-m", str(model), *flags, "--", "-x"])
    assert expected.exit_code == 0
    assert from_config(written(tmp_path, content)).stdout == expected.stdout
    as_json = written(tmp_path, json.dumps(content), "c.json")
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in content.items())
    assert read_arguments(as_json) == read_arguments(written(tmp_path, toml, "c.toml"))
    assert from_config(as_json).stdout == expected.stdout


def test_the_exit_code_is_the_command_s(tmp_path: Path) -> None:
    none = {"command": "doctor", "plan": str(tmp_path)}
    assert from_config(written(tmp_path, none)).exit_code == 1
    bad = from_config(written(tmp_path, {"command": "doctor", "plan": "x", "isq": "Q9"}))
    assert (bad.exit_code, "--isq" in bad.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("command: run\npaged-attn: on", ["run", "--paged-attn=on"]),
        ("command: run\npaged-attn: off", ["run", "--paged-attn=off"]),
        ("command: run\npaged-attn: auto", ["run", "--paged-attn=auto"]),
        ("command: run\nspeculate: true", ["run", "--speculate"]),
        ("command: run\nspeculate: 4\nisq: 4", ["run", "--speculate=4", "--isq=4"]),
        ("command: run\nimage: [a, b]", ["run", "--image=a", "--image=b"]),
        ("command: run\nimage: a", ["run", "--image=a"]),
        ("command: quantize\ntarget: t\nsource: s", ["quantize", "--", "s", "t"]),
        ("command: run\nmax-tokens: 4.0\ntemperature: 1.0", ["run", "--max-tokens=4", "--temperature=1.0"]),
        ("command: serve\nport: 0\napi-key: [k]", ["serve", "--port=0", "--api-key=k"]),
    ],
)
def test_values(text: str, arguments: list[str], tmp_path: Path) -> None:
    assert read_arguments(written(tmp_path, text)) == arguments


def test_a_file_of_serve_s_own_is_one_of_these_too(tmp_path: Path) -> None:
    """Where all its keys are, and not all are options."""
    file = written(tmp_path, '{"command": "serve", "isq": "4", "paged": {"block_size": 16}}', "c.json")
    assert read_arguments(file) == ["serve", f"--config={file}"]
    options = written(tmp_path, '{"command": "serve", "isq": "4", "model": "m"}', "c.json")
    assert read_arguments(options) == ["serve", "--isq=4", "--model-id=m"]
    neither = from_config(written(tmp_path, '{"command": "serve", "paged": {}, "port": 80}', "c.json"))
    assert (neither.exit_code, "no such option" in neither.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("command: run\nmax_seqs: 4", "c.yaml", "did you mean max-seqs?"),
        ("command: run\nwhatever-this-is: 4", "c.yaml", "whatever-this-is"),
        ("command: run\nport: 4", "c.yaml", "run has no such option"),
        ("command: run\nraw: 1", "c.yaml", "expected true or false"),
        ("command: run\nmax-tokens: [1]", "c.yaml", "expected one value"),
        ("command: run\nmax-tokens: {a: 1}", "c.yaml", "expected integer"),
        ("command: run\nmax-tokens: true", "c.yaml", "expected integer"),
        ("command: run\nmax-tokens: 4.5", "c.yaml", "--max-tokens"),
        ("command: run\nmax-tokens: x", "c.yaml", "--max-tokens"),
        ("command: run\nmodel: a\nmodel-id: a", "c.yaml", "the same option as model"),
        ("command: run\nraw: true\nraw: true", "c.yaml", "twice"),
        ('{"command": "run", "raw": true, "raw": false}', "c.json", "twice"),
        ("command: from-config", "c.yaml", "expected one of run, serve"),
        ("prompt: x", "c.yaml", "it is missing"),
        ("command: quantize\ntarget: t", "c.yaml", "quantize needs it"),
        ("- run", "c.yaml", "expected names of options"),
        ("a: [", "c.yaml", "cannot be read"),
        ("{", "c.json", "cannot be read"),
        ("=", "c.toml", "cannot be read"),
        ("command: run", "c.ini", "ends in .yaml"),
    ],
)
def test_what_cannot_be_is_said(text: str, name: str, expected: str, tmp_path: Path) -> None:
    result = from_config(written(tmp_path, text, name))
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.replace("│", " ").split())


def test_the_schema_is_published_and_says_the_same(tmp_path: Path) -> None:
    shown = from_config("--schema")
    assert shown.stdout.strip() == json_schema()
    schema: dict[str, Any] = json.loads(json_schema())
    judge = jsonschema.Draft202012Validator(schema)
    judge.check_schema(schema)
    fine = (
        {"command": "run", "isq": 4, "speculate": True},
        {"command": "quantize", "source": "s", "target": "t"},
        {"command": "serve", "port": 80, "model": ["a", "b"]},
        {"command": "serve", "paged": {"context_len": 512}, "server": {"port": 80}},
    )
    wrong = (
        {"command": "run", "port": 1},
        {"command": "run", "raw": 1},
        {"command": "run", "format": "other"},
        {"command": "quantize"},
        {"prompt": "x"},
        {"paged": {"context_len": 512}},
        {"command": "serve", "paged": {"context_len": 512}, "max-seqs": 2},
    )
    assert [judge.is_valid(each) for each in (*fine, *wrong)] == [True] * len(fine) + [False] * len(wrong)
    assert from_config("--schema", written(tmp_path, "command: run")).exit_code == 2
    assert from_config().exit_code == 2
