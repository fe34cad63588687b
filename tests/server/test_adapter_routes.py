"""Adapters are models to clients, and are loaded by request from one folder alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from adapter_files import write_adapter
from paged_sdk import TextModelBuilder
from paged_sdk.testing import fake_model
from serving import HI, Serving, serving
from tiny import build_model


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("adapters")
    model = build_model("llama")
    write_adapter(folder / "first", model)
    write_adapter(folder / "in" / "second", model, seed=1)
    write_adapter(folder.parent / "outside", model, seed=2)
    (folder / "link").symlink_to(folder.parent / "outside")
    (folder / "empty").mkdir()
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    sources = {"tiny": builder.build, "other": lambda: fake_model("Hello!")}
    with serving(sources, adapter_folder=folder) as served:
        yield served


def change(served: Serving, way: str, **body: Any) -> Any:
    return served.http.post(f"/v1/{way}_lora_adapter", json=body)


def text(served: Serving, model: str) -> str | None:
    answer = served.openai.chat.completions.create(model=model, messages=HI, max_tokens=16, temperature=0)
    assert answer.model == model
    return answer.choices[0].message.content


def test_an_adapter_comes_and_goes(served: Serving) -> None:
    with pytest.raises(openai.NotFoundError):
        text(served, "lora")
    loaded = change(served, "load", lora_name="lora", lora_path="in/second", base_model_name="tiny")
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["parent"] == "tiny"
    assert [model.id for model in served.openai.models.list()] == ["tiny", "lora", "other"]
    assert text(served, "lora") != text(served, "tiny")
    again = change(served, "load", lora_name="lora", lora_path="first", base_model_name="tiny")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert change(served, "unload", lora_name="lora").json()["deleted"]
    with pytest.raises(openai.NotFoundError):
        text(served, "lora")
    assert change(served, "unload", lora_name="lora").status_code == 404


@pytest.mark.parametrize(
    "path", ["../outside", "link", "/etc", "..", ".", "nothing", "a\0b", "x" * 3000, "org/hub-id", "~"]
)
def test_no_other_folder_is_read(served: Serving, path: str) -> None:
    refused = change(served, "load", lora_name="lora", lora_path=path, base_model_name="tiny")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"lora_path": "first"}, 400, "base_model_name"),
        ({"base_model_name": "absent", "lora_path": "first"}, 404, "base_model_name"),
        ({"base_model_name": "other", "lora_path": "first"}, 400, "load_adapter"),
        ({"base_model_name": "tiny", "lora_path": "first", "lora_name": "other"}, 400, "lora_name"),
        ({"base_model_name": "tiny", "lora_path": "empty"}, 400, None),
        ({"base_model_name": "tiny", "lora_path": "first", "load_inplace": True}, 400, "load_inplace"),
    ],
)
def test_what_cannot_be_loaded(served: Serving, fields: dict[str, Any], status: int, param: str | None) -> None:
    refused = change(served, "load", **{"lora_name": "lora", **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert change(served, "unload", lora_name="tiny").json()["error"]["param"] == "lora_name"


def test_without_a_folder_there_is_nothing_to_load() -> None:
    with serving(fake_model("Hello!")) as served:
        for way, body in (("load", {"lora_name": "a", "lora_path": "b"}), ("unload", {"lora_name": "a"})):
            assert change(served, way, **body).status_code == 403
