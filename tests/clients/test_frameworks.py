"""Frameworks as their users have them: the code of docs/frameworks.md against a server.

They have an environment of their own, which `make test-clients` makes. The model is scripted: it shows that every
request is taken and every answer understood, and not what a model would say.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from doc_blocks import code_blocks, read
from paged_sdk.testing import FakeRequest, fake_model
from serving import Serving, serving

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(sys.prefix) / "clients" / "bin" / "python").exists(), reason="make test-clients installs them"
    ),
]

PAGE: Final = "docs/frameworks.md"
ADDRESS: Final = "http://127.0.0.1:8000"
CLIENTS: Final = Path(sys.prefix) / "clients"
PRINTED: Final = {
    "LangChain and LangGraph": "Hello there!city='Oslo' degrees=20",
    "LlamaIndex": "Hello there!",
    "pydantic-ai": "city='Oslo' degrees=20",
    "OpenAI Agents SDK": "city='Oslo' degrees=20",
    "Instructor": "city='Oslo' degrees=20",
    "LiteLLM": "Hello there!",
    "Haystack": "Hello there!",
    "smolagents": "Hello there!",
}
"""What each section's code prints."""


def reply(request: FakeRequest) -> str:
    """Call the first tool, then answer in JSON if that is asked for."""
    if request.options.shown_tools and request.messages[-1].role.value == "user":
        call = {"name": request.options.shown_tools[0].name, "arguments": {"city": "Oslo"}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    return '{"city": "Oslo", "degrees": 20}' if request.options.constraint is not None else "Hello there!"


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving({"chat": lambda: fake_model(reply)}) as served:
        yield served


def ran(command: list[str], directory: Path) -> str:
    """Return what a program prints."""
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout.strip()


def sections() -> dict[str, str]:
    """Return the Python code of each section."""
    lines = read(PAGE).splitlines()
    return {
        next(line for line in reversed(lines[:number]) if line.startswith("## ")).removeprefix("## "): code
        for number, code, _ in code_blocks(PAGE)
    }


def test_every_section_is_tried() -> None:
    assert sections().keys() == PRINTED.keys()


@pytest.mark.parametrize("section", PRINTED)
def test_the_code_of_the_page_runs(served: Serving, tmp_path: Path, section: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(sections()[section].replace(ADDRESS, served.url), encoding="utf-8")
    assert ran([str(CLIENTS / "bin" / "python"), "-W", "ignore", str(program)], tmp_path) == PRINTED[section]


def test_the_javascript_of_the_page_runs(served: Serving, tmp_path: Path) -> None:
    node, packages = shutil.which("node"), CLIENTS / "node_modules"
    if node is None or not packages.exists():
        pytest.skip("there is no node")
    (code,) = re.findall(r"^```js\n(.*?)^```$", read(PAGE), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "node_modules").symlink_to(packages)
    (tmp_path / "program.mjs").write_text(code.replace(ADDRESS, served.url), encoding="utf-8")
    assert ran([node, "program.mjs"], tmp_path) == "{ city: 'Oslo', degrees: 20 }"


def test_the_versions_are_those_that_are_installed() -> None:
    lines = read("tests/clients/requirements.txt").splitlines()
    found = dict(line.split("==", 1) for line in lines if "==" in line)
    for names, versions in re.findall(r"^\| ([a-z, -]+?) \| ([0-9., ]+) \|", read(PAGE), flags=re.MULTILINE):
        for name, version in zip(names.split(", "), versions.split(", "), strict=True):
            assert found.get(name, version) == version, name
