"""Fuzz the readers of checkpoints, and list what they did that no file may make them do."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from fuzz.targets import targets
from fuzz.workers import Case, run_case, run_cases


def main() -> int:
    """Run the command line; return 1 if there are finds."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the index of the first")
    parser.add_argument("--seed", type=int, default=0, help="other cases for another number")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--case", type=int, help="run this case of --target alone, here, and show what it raises")
    parser.add_argument("--keep", type=Path, help="with --case: write its files into this directory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [each for each in targets(Path(folder)) if not options.target or each.name in options.target]
        if not chosen:
            parser.error(f"no such target: {options.target}")
        if options.case is not None:
            directory = options.keep or Path(folder) / "case"
            refused = run_case(chosen[0], Case(chosen[0].name, options.seed, options.case), directory)
            print("refused with a typed error" if refused else "loaded")
            return 0
        started = time.monotonic()
        report = run_cases(chosen, seed=options.seed, first=options.first, count=options.cases, workers=options.workers)
    seconds = time.monotonic() - started
    print(
        f"{report.done} cases in {seconds:.0f} s ({report.done / seconds:.0f}/s): {report.refused} refused, "
        f"{report.done - report.refused - len(report.finds)} loaded, {len(report.finds)} finds; "
        f"the slowest took about {report.slowest:.1f} s"
    )
    by_kind = Counter((find.case.target, find.what.split(": '")[0]) for find in report.finds)
    for (target, kind), times in by_kind.most_common():
        print(f"{times:6} {target}: {kind}")
    for find in report.finds[:200]:
        print(f"--target {find.case.target} --seed {find.case.seed} --case {find.case.index}: {find.what}")
    return 1 if report.finds else 0


if __name__ == "__main__":
    sys.exit(main())
