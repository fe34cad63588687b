"""Read what a checkpoint that was loaded says it is."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["model_type"]


def model_type(model_id: str, revision: str | None) -> str:
    """Return the ``model_type`` of a checkpoint, of whose parts the engine names the decoder alone.

    :param model_id: a directory, or a hub id whose files are in the cache: it is loaded
    """
    directory = Path(model_id).expanduser()
    path = directory / "config.json"
    if not directory.is_dir():
        from huggingface_hub import hf_hub_download  # late, because that takes some 0.2 s

        path = Path(hf_hub_download(model_id, "config.json", revision=revision, local_files_only=True))
    found = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    return str(found)
