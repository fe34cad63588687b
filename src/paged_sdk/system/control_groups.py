"""Finds the control groups (cgroups, v1 and v2) of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

__all__ = ["ControlGroup", "control_groups"]


@frozen
class ControlGroup:
    """Reads the files of one cgroup.

    :ivar is_v1: whether the files are those of cgroup v1
    """

    _directory: Path
    is_v1: bool

    def read(self, name: str) -> str:
        """Return the content of a file; an empty string if there is no such file."""
        try:
            return (self._directory / name).read_text()
        except OSError:
            return ""


def control_groups(controller: str, root: Path) -> Iterator[ControlGroup]:
    """Yield the cgroups that limit this process: its own and the groups above it.

    :param controller: "cpu" or "memory"
    :param root: the directory of ``proc`` and ``sys``; another one in tests
    """
    groups = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux, or hidden by a sandbox: then the top group may be the process's own
        yield ControlGroup(groups, is_v1=False)
        yield ControlGroup(groups / controller, is_v1=True)
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controller if controllers else groups
        directory = top / path.lstrip("/")
        # In a container the path may be the host's, and not exist: then the top group is the process's own.
        for group in (directory, *directory.parents):
            yield ControlGroup(group, is_v1=bool(controllers))
            if group == top:
                break
