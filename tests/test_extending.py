"""What docs/extending.md shows works."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

import paged_sdk.models
import paged_sdk.weights.formats
import tiny
from doc_blocks import run_blocks
from paged_sdk import TextModelBuilder


@pytest.fixture(autouse=True)
def _paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what the page names, and take back what it changes."""
    monkeypatch.chdir(tmp_path)
    for package in (paged_sdk.models, paged_sdk.weights.formats):
        monkeypatch.setattr(package, "__path__", list(package.__path__))
    for module in ("paged_sdk.models.tea", "paged_sdk.weights.formats.rows8"):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    tiny.make_checkpoint("llama", Path("path/to/a/llama"))
    tea = tiny.make_checkpoint("qwen2", Path("path/to/tea"), seed=1)
    config = json.loads((tea / "config.json").read_text(encoding="utf-8"))
    of_tea = {**config, "model_type": "tea", "architectures": ["TeaForCausalLM"]}
    (tea / "config.json").write_text(json.dumps(of_tea), encoding="utf-8")


def test_every_example_does_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    namespace = run_blocks("docs/extending.md")
    plain, varied = namespace["plain"], namespace["varied"]
    assert len(set(plain)) < len(plain) == len(varied) == len(set(varied))
    drafts, tea, rows8, short = capsys.readouterr().out.splitlines()
    accepted, _, drafted, *_ = drafts.split()
    assert 8 < int(accepted) <= int(drafted)
    assert tea.startswith("tea [")
    # A 127th of the largest weight is too little to change what a model says first.
    assert json.loads(rows8)[:2] == plain[:2]
    assert json.loads(short) == plain

    # Tea has the layers of Qwen 2, so its weights say the same under that name.
    path = Path("path/to/tea")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    of_qwen = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(of_qwen), encoding="utf-8")

    async def said_by_qwen() -> object:
        async with TextModelBuilder(path).build() as model:
            return await namespace["tokens_of"](model, namespace["request"])

    assert asyncio.run(said_by_qwen()) == json.loads(tea.removeprefix("tea "))
