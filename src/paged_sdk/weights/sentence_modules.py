"""Read the modules and prompts that sentence-transformers stores beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import frozen

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.system.files import is_file, read_json_if_there, read_text

__all__ = ["SentenceModule", "read_modules", "read_prompts"]

_MOST_MODULES: Final = 16


@frozen
class SentenceModule:
    """Holds one module of a sentence-transformers pipeline.

    :ivar kind: the name of the module's class
    :ivar directory: the directory of the module's files
    """

    kind: str
    directory: Path


def read_modules(directory: Path) -> list[SentenceModule] | None:
    """Return the checkpoint's modules in order; None if it has no modules.json.

    :raises CheckpointError: modules.json cannot be read, lists more than 16 modules, or names a directory outside of
        the checkpoint
    """
    path = directory / "modules.json"
    if not is_file(path):
        return None
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", path=path) from error
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise CheckpointError(f"{path}: expected a list of modules", path=path)
    if len(content) > _MOST_MODULES:
        raise CheckpointError(f"{path} lists {len(content)} modules: at most {_MOST_MODULES} are read", path=path)
    return [
        SentenceModule(
            str(module.get("type", "")).rpartition(".")[2], directory / _relative(path, module.get("path", ""))
        )
        for module in content
    ]


def read_prompts(directory: Path) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts (prefixes of texts) by name, and the name of the default prompt or None.

    :raises CheckpointError: config_sentence_transformers.json cannot be read, or has invalid values
    """
    path = directory / "config_sentence_transformers.json"
    settings = read_json_if_there(path)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    are_texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not are_texts or (default is not None and not (isinstance(default, str) and default in prompts)):
        raise CheckpointError(
            f"{path}: prompts = {shown(prompts)}, default_prompt_name = {shown(default)}: expected texts by name, and "
            "one of the names or null",
            path=path,
        )
    return prompts, default


def _relative(path: Path, value: object) -> str:
    """Return the path of a module's directory, after checking that it lies within the checkpoint's directory."""
    if not isinstance(value, str) or value.startswith("/") or ".." in Path(value).parts or "\0" in value:
        raise CheckpointError(f"{path}: path = {shown(value)}: expected a directory beside it", path=path)
    return value
