"""Check out and build other versions of this project, to measure them against the working tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from attrs import frozen

from benchmarks.paths import cache_directory

__all__ = ["Version", "VersionError", "last_tag", "other_version", "working_tree"]

_REPOSITORY: Final = Path(__file__).parents[1]
# Written last: a directory without it is incomplete.
_MARKER: Final = ".built"


class VersionError(Exception):
    """Raised if a version is not available: unknown commit, or the build fails."""


@frozen
class Version:
    """Describes a version that is ready to run.

    :ivar name: the commit, and the revision by which it was requested
    :ivar source: the directory that holds the package ``paged_sdk``, with its native library
    """

    name: str
    source: Path


def working_tree() -> Version:
    """Return the working tree, as it is."""
    changed = "+changes" if _git("status", "--porcelain", "src") else ""
    return Version(_git("rev-parse", "--short", "HEAD") + changed, _REPOSITORY / "src")


def last_tag() -> str:
    """Return the last tag before the working tree's commit.

    :raises VersionError: there is none
    """
    try:
        return _git("describe", "--tags", "--abbrev=0")
    except VersionError:
        raise VersionError("no commit has a tag yet: name the commit to compare with, as in --against main~5") from None


def other_version(revision: str) -> Version:
    """Check out a commit in the cache directory and build it there, unless that was done before.

    :param revision: anything that git accepts as a commit
    :raises VersionError: unknown commit, or the build fails
    """
    commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}")
    directory = cache_directory("versions") / commit
    if not (directory / _MARKER).exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        archive = directory / "source.tar"
        _git("archive", "--output", str(archive), commit)
        _run(["tar", "-xf", str(archive), "-C", str(directory)])
        archive.unlink()
        _run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=directory)
        (directory / _MARKER).touch()
    name = commit[:7] if commit.startswith(revision) else f"{revision} ({commit[:7]})"
    return Version(name, directory / "src")


def _git(*arguments: str) -> str:
    return _run(["git", "-C", str(_REPOSITORY), *arguments])


def _run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VersionError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
