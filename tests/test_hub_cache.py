"""Models, tokenizers and adapters by their hub ids, from a cache of the hub's form and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import tiny
from adapter_files import write_adapter
from paged_sdk import ModelLoadError
from paged_sdk.weights.hub import resolve_tokenizer

PROGRAM: Final = """
import json, sys
from typer.testing import CliRunner
from paged_sdk import GgufModelBuilder
from paged_sdk.cli.app import app
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which

# The library has read where its cache is by now; a tokenizer's place is part of what is asked for.
flags = ["--num-threads", "1", "--pa-context-len", "512", "--max-tokens", "8", "--quiet"]
said = {}
for name, words in {
    "hub": ["-m", "some/model", "--format", "gguf", "-t", "some/tokenizer", "HELLO"],
    "directory": ["-m", "some/model", "--format", "gguf", "-t", sys.argv[1], "HELLO"],
    "own": ["-m", "some/model", "--format", "gguf", "HELLO"],
    "plain": ["-m", "some/plain", "--adapter", "some/adapter", "-t", "some/tokenizer", "HELLO"],
    "gone": ["-m", "some/model", "--format", "gguf", "-t", "some/gone", "HELLO"],
}.items():
    result = CliRunner().invoke(app, ["run", *flags, *words])
    said[name] = result.stdout if result.exit_code == 0 else [result.exit_code, result.stderr]
runner = Runner(Which.GGUF("some/model", "tiny-llama.F32.gguf", tok_model_id="some/tokenizer"))
request = ChatCompletionRequest([{"role": "user", "content": "HELLO"}], "default", max_tokens=8)
said["dropin"] = runner.send_chat_completion_request(request).choices[0].message.content
print(json.dumps(said))
"""


def cached(cache: Path, name: str) -> Path:
    """Make a repository in a cache, as downloading one does, and return where its files are to be."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    return snapshot


def test_ids_are_found_in_a_cache_without_a_network(tmp_path: Path) -> None:
    model = cached(tmp_path, "some/model")
    tiny.make_gguf(model)
    tokenizer = cached(tmp_path, "some/tokenizer")
    saved = json.loads(tiny.tokenizer().to_str())
    saved["normalizer"] = {"type": "Lowercase"}
    (tokenizer / "tokenizer.json").write_text(json.dumps(saved))
    tiny.make_checkpoint("llama", cached(tmp_path, "some/plain"))
    write_adapter(cached(tmp_path, "some/adapter"), tiny.build_model("llama"))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tokenizer)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["hub"] == said["directory"] != said["own"]
    assert f"{said['dropin']}\n" == said["hub"]
    assert isinstance(said["plain"], str)
    assert said["gone"][0] == 1
    assert said["gone"][1].startswith("error: 'some/gone' does not exist in ")
    assert "HF_HUB_OFFLINE" in said["gone"][1]


def test_a_tokenizer_is_a_directory_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        resolve_tokenizer(str(tmp_path))
    file.touch()
    assert resolve_tokenizer(str(tmp_path)) == resolve_tokenizer(str(file)) == file
    for missing in ("./no", "a/b/c", str(tmp_path / "no")):
        with pytest.raises(ModelLoadError, match="does not exist"):
            resolve_tokenizer(missing)
