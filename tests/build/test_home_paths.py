"""Paths of files may begin with ``~``, in Python as on a command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paged_sdk import IsqType, TextModelBuilder, Topology


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_path_may_begin_with_the_home_directory(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    (tmp_path / "t.yaml").write_text("0: {isq: Q8_0}")
    shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path / "own.json")
    topology = Topology.from_yaml("~/t.yaml")
    assert len(topology.selectors) == 1
    builder = TextModelBuilder(tiny_checkpoint).with_chat_template("~/t.jinja").with_tokenizer_json("~/own.json")
    async with builder.with_isq(IsqType.Q8_0).with_topology(topology).build() as model:
        asked = await model.send_chat_request([{"role": "user", "content": "Hello"}])
        assert asked.usage.prompt_tokens == len(await model.tokenize("Hello!"))
