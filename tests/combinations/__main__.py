"""Try random combinations of settings and requests."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from combinations.combination import Combination
from combinations.configuration import Checkpoints


def main() -> int:
    """Run the command line; return 1 if a combination fails."""
    parser = argparse.ArgumentParser(prog="python -m combinations", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=300, help="how many seeds (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="this seed alone, of which all is shown that was drawn")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="show a script that fails as it was drawn, and do not look for a shorter one",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    hidden: Any = transformers.utils.logging.disable_progress_bar  # it has no annotations
    hidden()
    warnings.simplefilter("error")
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.count)
    console, failed, counts = Console(), list[int](), Counter[str]()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        checkpoints = Checkpoints(Path(folder))
        bar = progress.add_task("combinations", total=len(seeds))
        for seed in seeds:
            combination = Combination.draw(seed)
            if options.seed is not None:
                console.print(str(combination), markup=False, highlight=False, soft_wrap=True)
            outcome = combination.run(checkpoints)
            counts += outcome.counts
            if outcome.problems:
                failed.append(seed)
                shown = combination if options.whole else combination.shrunk(checkpoints)
                problems = (outcome if shown is combination else shown.run(checkpoints)).problems or outcome.problems
                console.print(
                    f"seed {seed}:\n{shown}\n" + "\n".join(problems), markup=False, highlight=False, soft_wrap=True
                )
            progress.update(bar, advance=1, description=f"combinations, {len(failed)} failed")
    seconds = time.monotonic() - started
    told = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
    console.print(f"{len(seeds)} combinations in {seconds:.0f} s: {told}", highlight=False)
    if failed:
        console.print(f"failed: {', '.join(map(str, failed))}", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
