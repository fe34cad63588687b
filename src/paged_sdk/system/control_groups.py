"""Finds the control groups that this process is in (Linux, both versions of the interface)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

__all__ = ["ControlGroup", "control_groups"]


@frozen
class ControlGroup:
    """Reads the files of one group.

    :ivar is_first: whether they are of the interface's first version
    """

    _directory: Path
    is_first: bool

    def read(self, name: str) -> str:
        """Return what a file says; nothing if there is none."""
        try:
            return (self._directory / name).read_text()
        except OSError:
            return ""


def control_groups(controller: str, root: Path) -> Iterator[ControlGroup]:
    """Yield the groups that limit this process in something, its own and those that this is in.

    :param controller: "cpu" or "memory"
    :param root: where ``proc`` and ``sys`` lie; another directory in tests
    """
    groups = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux, or what a sandbox does not show: then the limits at the top may be the process's own
        yield ControlGroup(groups, is_first=False)
        yield ControlGroup(groups / controller, is_first=True)
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controller if controllers else groups
        directory = top / path.lstrip("/")
        # In a container the path may be that of the host, where it leads nowhere: then the top is the process's own.
        for group in (directory, *directory.parents):
            yield ControlGroup(group, is_first=bool(controllers))
            if group == top:
                break
