"""Tests that have torch refuse to wait for a device ignore that it warns of doing so: warnings are errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parent
CALL: Final = "set_sync_debug_mode"
IGNORED: Final = 'filterwarnings("ignore:Synchronization debug mode")'


def checked_in(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name, the text and the decorators of tests in a file."""
    text = path.read_text()
    if CALL not in text:
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            body = ast.get_source_segment(text, node) or ""
            yield node.name, body, [ast.get_source_segment(text, each) or "" for each in node.decorator_list]


def test_all_that_refuse_to_wait_ignore_the_warning() -> None:
    found = [
        (f"{path.name}: {name}", any(IGNORED in each for each in decorators))
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__)
        for name, body, decorators in checked_in(path)
        if CALL in body
    ]
    assert len(found) >= 4
    assert not [name for name, is_ignored in found if not is_ignored]
