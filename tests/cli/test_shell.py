"""The program among others: how shells complete its command lines, what colors it writes, and its exit codes."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paged_sdk.cli.app import app
from paged_sdk.weights.gguf.mixtures import MIXTURES

MAIN = "import sys; sys.argv[0] = 'paged-sdk'; from paged_sdk.cli import main; main()"


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which there is the program."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "paged-sdk"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{MAIN}" "$@"\n')
    script.chmod(0o755)
    # typer asks which shell its parent is; a test's parent is none.
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


def said(environment: dict[str, str], *words: str) -> str:
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_shell_completes_command_lines(program: dict[str, str]) -> None:
    script = said(program, "paged-sdk", "--show-completion", "bash")
    function = next(line.removesuffix("() {") for line in script.splitlines() if line.endswith("() {"))

    def completed(line: str) -> list[str]:
        words = line.split(" ")
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; {function} paged-sdk"
        return said(program, "bash", "-c", f'{script}\n{asked}; printf "%s\\n" "${{COMPREPLY[@]}}"').split()

    assert completed("paged-sdk fro") == ["from-config"]
    assert completed("paged-sdk serve --pa-memory-") == ["--pa-memory-mb", "--pa-memory-fraction"]
    assert completed("paged-sdk -m x --paged-attn o") == ["on", "off"]


TWO_ERRORS = """
import sys
from paged_sdk.cli import main
from paged_sdk.cli.terminal import Terminal
Terminal(quiet=False).error("of this package")
sys.argv = ["paged-sdk", "run", "--no-such-option"]
main()
"""


def test_it_ends_without_looking_for_garbage() -> None:
    """That would take most of a second."""
    last = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); "
    done = subprocess.run(
        [sys.executable, "-c", last + MAIN, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize("no_color", [False, True])
def test_colors_are_left_out_where_nobody_wants_them(no_color: bool) -> None:
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": "1" if no_color else ""}
    environment.pop("FORCE_COLOR", None)
    terminal, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TWO_ERRORS], env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as ran:
        assert ran.wait(120) == 2
    shown = os.read(terminal, 1 << 16)
    os.close(theirs)
    os.close(terminal)
    plain = re.sub(rb"\x1b\[[\d;]*m", b"", shown)
    assert b"No such option: --no-such-option" in plain
    assert b"error: of this package\r\n" in plain
    assert bool(re.search(rb"\x1b\[(?:\d+;)*[349][0-7]m", shown)) is not no_color


def ended(*arguments: str, redirected: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a shell does whose user closes or redirects its streams."""
    command = [sys.executable, "-c", MAIN, *arguments]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *command],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


CTRL_C_MEANWHILE = """
import sys
from paged_sdk.cli import main

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
main()
"""


def test_ctrl_c_before_a_command_has_begun_is_no_traceback() -> None:
    command = [sys.executable, "-c", CTRL_C_MEANWHILE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_streams_may_be_closed_from_the_start() -> None:
    run = ended("run", redirected="<&- >&-")
    assert run.returncode == 2
    assert "there is no prompt: give one, or pipe one in" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    run = ended("serve", "--config-schema", redirected=">/dev/full")
    assert run.returncode == 1
    assert run.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", ["", "run", "serve", "bench", "tune", "quantize", "doctor", "top", "from-config"])
def test_help_gives_flags_no_value_and_arguments_a_name(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"] if command else ["--help"], env={"COLUMNS": "200"}).output
    assert "--help " in shown
    assert "<bool>" not in shown
    usage = next(line for line in shown.splitlines() if "Usage:" in line)
    assert all(word.isupper() for word in re.findall(r"[\[{](\w+)[\]}]", usage))


def test_help_names_every_type_that_files_can_have() -> None:
    shown = CliRunner().invoke(app, ["quantize", "--help"], env={"COLUMNS": "200"}).output
    assert not set(MIXTURES) - set(re.findall(r"\w+", shown))
