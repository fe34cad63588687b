"""Save figures of versions of this project, in a file per processor, and find the last saved ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

__all__ = ["DIRECTORY", "Saved", "file_of", "last_saved", "save"]

DIRECTORY: Final = Path(__file__).parent / "results"

_MACHINE: Final = ("cpu", "cpu_family", "cpus", "instruction_sets", "memory_gib", "system", "python", "torch")


@frozen
class Saved:
    """Holds the medians of one version.

    :ivar version: the version's commit
    :ivar day: date of the measurement
    :ivar load_average: the machine's load average at that time
    :ivar figures: figures by the metric's key
    """

    version: str
    day: str
    load_average: float
    figures: dict[str, float]


def file_of(machine: Mapping[str, Any], directory: Path = DIRECTORY) -> Path:
    """Return the file of a machine's processor.

    Virtual machines may hide which processor it is ("AMD EPYC"), so the file's name contains the family and model that
    Linux reports.
    """
    name = f"{machine['cpu']} {machine['cpu_family']} {machine['cpus']} cpus"
    return directory / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def save(path: Path, machine: Mapping[str, Any], model: str, saved: Saved) -> None:
    """Add a version's figures with a model, replacing earlier ones of the same version."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"models": {}}
    kept["machine"] = {name: machine[name] for name in _MACHINE}
    versions = kept["models"].setdefault(model, {})
    versions.pop(saved.version, None)  # moves it to the end
    versions[saved.version] = asdict(saved, filter=lambda field, _: field.name != "version")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=2) + "\n")


def last_saved(path: Path, model: str) -> Saved | None:
    """Return what was saved last for a model on this processor; None: nothing."""
    if not path.exists():
        return None
    versions = json.loads(path.read_text())["models"].get(model)
    if versions is None:
        return None
    version, kept = versions.popitem()
    return Saved(version, **kept)
