"""Runs the code of a page of the documentation."""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any, Final

__all__ = ["ROOT", "code_blocks", "read", "run_blocks"]

ROOT: Final = Path(__file__).parents[1]
_BLOCK: Final = re.compile(r'^```python(?: title="([^"]+)")?\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)


def read(page: str) -> str:
    """Return the text of a page, by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def code_blocks(page: str) -> list[tuple[int, str, str]]:
    """Return the Python blocks of a page: the number of the line before it, its code, and its file, if it is one."""
    text = read(page)
    return [(text.count("\n", 0, found.start(2)), found[2], found[1] or "") for found in _BLOCK.finditer(text)]


def run_blocks(page: str) -> dict[str, Any]:
    """Run a page from top to bottom in one namespace, with ``await`` allowed at the top as in an async REPL. A block
    with a title is a file, written below the current directory.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    with asyncio.Runner() as runner:
        for line, block, file in code_blocks(page):
            if file:
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).write_text(block, encoding="utf-8")
                continue
            tree = ast.increment_lineno(ast.parse(block), line)
            code = compile(tree, str(ROOT / page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(FunctionType(code, namespace)())
            else:
                exec(code, namespace)
    return namespace
