"""The documentation is true: its code runs, its links lead somewhere, its names exist."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import paged_sdk
import tiny
from adapter_files import write_adapter
from doc_blocks import ROOT, code_blocks, read, run_blocks
from gguf_encoder_files import word_piece_metadata, write_encoder
from paged_sdk.config import env
from paged_sdk.models.family import supported_families
from tiny_encoder import make_encoder, make_ranker, word_pieces

PAGES: Final = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
)
RUNNABLE: Final = ("README.md", "docs/quickstart.md")
RUN_ELSEWHERE: Final = (
    "docs/extending.md",  # tests/test_extending.py
    "docs/frameworks.md",  # tests/clients/test_frameworks.py
)
MODELS: Final = {
    "docs/adapters.md": ("Qwen/Qwen2.5-1.5B-Instruct",),
    "docs/embeddings.md": (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen/Qwen3-Embedding-0.6B",
        "BAAI/bge-small-en-v1.5",
        "BAAI/bge-reranker-base",
    ),
    "docs/gguf.md": ("path/to/model", "bge-small-en-v1.5-q8_0.gguf"),
    "docs/mistralrs.md": ("mistralai/Mistral-7B-Instruct-v0.1",),
    "docs/quantization.md": ("path/or/hub-id",),
}
"""The checkpoints that pages name and load."""


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def make_files_of(page: str) -> None:
    """Write tiny models and adapters under the names that a page has for them, below the current directory."""
    for name in MODELS.get(page, ()):
        if name.endswith(".gguf"):
            make_encoder("bert", Path("encoder"))
            metadata = word_piece_metadata(word_pieces(), 256)
            write_encoder(Path("encoder"), Path(name), quantization="Q8_0", tokenizer=metadata)
            continue
        if "bge" in name:
            (make_ranker if "reranker" in name else make_encoder)("bert", Path(name))
            continue
        # Wide enough for blocks of 256 weights.
        wide: dict[str, Any] = {"intermediate_size": 256, "hidden_size": 256} if page == "docs/gguf.md" else {}
        directory = tiny.make_checkpoint("mistral" if "Mistral" in name else "qwen2", Path(name), **wide)
        if "Embedding" in name:
            write_json(directory / "modules.json", [{"type": "Transformer"}, {"type": "Pooling", "path": "pooling"}])
            write_json(directory / "pooling" / "config.json", {"pooling_mode_lasttoken": True})
            write_json(directory / "config_sentence_transformers.json", {"prompts": {"query": "Find: "}})
    if page == "docs/adapters.md":
        for name in ("legal", "v3", "french"):
            write_adapter(Path("adapters", name), tiny.build_model("qwen2"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: threads that wait for each other over tiny matrices cost forty times the work on a busy
    machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prints(block: tuple[int, str, str]) -> bool:
    names = [node.id for node in ast.walk(ast.parse(block[1])) if isinstance(node, ast.Name)]
    return "print" in names


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page) and page not in RUN_ELSEWHERE])
def test_the_code_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.make_gguf(tmp_path)
    monkeypatch.setattr(paged_sdk, "embedded_model_path", lambda: model)
    monkeypatch.chdir(tmp_path)
    make_files_of(page)
    run_blocks(page)
    assert capsys.readouterr().out or not any(map(prints, code_blocks(page)))


@pytest.mark.smollm2
def test_the_readme_s_ten_lines_answer(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("README.md")
    assert "Paris" in capsys.readouterr().out


def test_the_readme_s_program_is_short() -> None:
    ((_, program, _),) = code_blocks("README.md")
    statements = [line for line in program.splitlines() if line.strip()]
    assert len(statements) <= 10


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    """Return what GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    places = (ROOT, ROOT / "src", ROOT / "src" / "paged_sdk")
    names = re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.(?:py|md|toml|txt|cpp|h))?)`", read(page))
    missing = [name for name in names if not any((place / name).exists() for place in places)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_rows_of_a_table_have_as_many_cells(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        first, *others = table.splitlines()
        assert [row for row in others if num_cells(row) != num_cells(first)] == []


def num_cells(row: str) -> int:
    """Return how many cells a row of a table has."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def test_every_family_is_listed_by_name() -> None:
    """Of families of images, the types of their text decoders alone are not."""
    (section,) = re.findall(r"^## Models by name$(.*?)^## ", read("docs/architectures.md"), re.MULTILINE | re.DOTALL)
    listed = [name for row in section.splitlines() if row.startswith("|") for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted({"model_type", *(name.removesuffix("_text") for name in supported_families())})


VARIABLES: Final = {value for name, value in vars(env).items() if name.isupper() and isinstance(value, str)}
OF_REPLICAS: Final = {name for name in VARIABLES if name.startswith("PAGED_SDK_")}
OF_TORCHRUN: Final = {name for name in VARIABLES - OF_REPLICAS if not name.startswith("MISTRALRS_")}


@pytest.mark.parametrize("page", RUNNABLE)
def test_every_environment_variable_is_documented(page: str) -> None:
    documented = set(re.findall(r"MISTRALRS_\w+", read(page)))
    assert documented == VARIABLES - OF_TORCHRUN - OF_REPLICAS


def test_every_variable_of_replicas_is_documented() -> None:
    assert set(re.findall(r"PAGED_SDK_\w+", read("docs/scale.md"))) == OF_REPLICAS


def test_every_variable_of_torchrun_is_documented() -> None:
    assert OF_TORCHRUN
    assert {name for name in OF_TORCHRUN if f"`{name}`" in read("docs/parallel.md")} == OF_TORCHRUN


def test_every_builder_call_is_documented() -> None:
    calls = {name for name in dir(paged_sdk.TextModelBuilder) if name.startswith("with")}
    documented = set(re.findall(r"\bwith(?:out)?_\w+", read("docs/quickstart.md")))
    assert calls <= documented
    requests = {name for name in dir(paged_sdk.RequestBuilder) if name.startswith("with")}
    pool = {name for name in dir(paged_sdk.PagedAttentionMetaBuilder) if name.startswith("with")}
    assert documented <= calls | requests | pool


def test_every_flag_exists() -> None:
    (section,) = re.findall(r"^## The command line$(.*)", read("docs/quickstart.md"), flags=re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-c", "from paged_sdk.cli import main; main()", "run", "--help"]
    wide = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout
    assert set(re.findall(r"--[a-z][a-z-]+", section)) <= set(re.findall(r"--[a-z][a-z-]+", shown))


def test_the_error_tree_is_the_code_s() -> None:
    listed = re.findall(r"^[│ ]*[├└]── (\w+)|^(PagedError)$", read("docs/quickstart.md"), flags=re.MULTILINE)
    names = {first or second for first, second in listed}
    assert names == set(paged_sdk.errors.__all__)
