"""The threads that the native kernels share: their names, their rest, forks, and many callers at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from native_weights import library, needs_library, random_weight
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.sources import SOURCES

pytestmark = needs_library

CYCLES = Path(__file__).parents[1] / "native" / "pool_cycles.cpp"
THREADS = 3

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")


def a_linear(seed: int = 0) -> tuple[NativeLinear, Tensor, Tensor]:
    """Return a product that is worth sharing among threads, its input, and its output by one thread."""
    generator = torch.Generator().manual_seed(seed)
    packed, _ = random_weight(gguf.GGMLQuantizationType.Q4_0, 2000 + 16 * seed, 1024, generator)
    x = torch.randn(40, 1024, generator=generator)
    return (
        NativeLinear(Workspace(library(), num_threads=THREADS), [packed]),
        x,
        NativeLinear(Workspace(library(), num_threads=1), [packed])(x),
    )


def number_of_helpers(at_least: int = 0) -> int:
    """Count the pool's threads; they name themselves when they first run, for which it waits."""
    for _ in range(1000):
        names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
        if names.count("paged-compute") >= at_least:
            break
        time.sleep(0.01)
    return names.count("paged-compute")


@needs_proc
def test_all_callers_share_threads_that_have_a_name() -> None:
    for seed in range(3):
        linear, x, alone = a_linear(seed)
        assert torch.equal(linear(x), alone)
    assert THREADS - 1 <= number_of_helpers(THREADS - 1) <= 7  # tests before this one may have asked for more


def test_callers_at_the_same_time_get_what_they_would_alone() -> None:
    cases = [a_linear(seed) for seed in range(4)]
    right: list[bool] = []

    def call(index: int) -> None:
        linear, x, alone = cases[index]
        right.append(all(torch.equal(linear(x), alone) for _ in range(30)))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * len(cases)


def test_threads_rest_when_nobody_calls() -> None:
    """Judged by the processor's time of the whole process, in which nothing else runs either."""
    linear, x, _ = a_linear()
    for _ in range(20):
        linear(x)
    used = 1.0
    for _ in range(20):  # on a busy machine they get their last turns of looking for work later
        before = time.process_time()
        time.sleep(0.4)
        used = time.process_time() - before
        if used < 0.04:
            break
    assert used < 0.04


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    program = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
import torch
from test_native_pool import a_linear, number_of_helpers
torch.set_num_threads(1)  # torch's own threads do not survive a fork
linear, x, alone = a_linear()
assert torch.equal(linear(x), alone)
child = os.fork()
if child == 0:
    right = number_of_helpers() == 0 and torch.equal(linear(x), alone)
    os._exit(0 if right and number_of_helpers({THREADS - 1}) == {THREADS - 1} else 1)
assert torch.equal(linear(x), alone)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def run_cycles(tmp_path: Path, count: int, *flags: str) -> None:
    """Run the cycles in three processes at once: what goes wrong in a pool does when its threads are stopped."""
    program = tmp_path / "pool_cycles"
    sources = [CYCLES, SOURCES / "pool.cpp", SOURCES / "system.cpp"]
    command = ["g++", "-std=c++20", "-g", "-pthread", "-fno-exceptions", *flags, f"-I{SOURCES}"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    together = [
        subprocess.Popen(
            [program, str(count)],
            # LD_PRELOAD: `make sanitize` has another sanitizer's runtime loaded before everything.
            env=os.environ | {"TSAN_OPTIONS": "die_after_fork=0 halt_on_error=1", "LD_PRELOAD": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        assert [process.communicate(timeout=280)[0] for process in together] == [f"{count} cycles\n"] * 3
    finally:
        for process in together:
            process.kill()
            process.communicate()
    assert [process.returncode for process in together] == [0] * 3


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux", reason="the sanitizer is gcc's, on Linux"
)
OPTIMIZED = ("-O3",)
SANITIZED = [("-O1", "-fsanitize=thread"), ("-O1", "-fsanitize=address,undefined")]


@needs_compiler
def test_models_open_close_fork_and_give_up(tmp_path: Path) -> None:
    run_cycles(tmp_path, 500, *OPTIMIZED)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(("count", "flags"), [*((1000, flags) for flags in SANITIZED), (50_000, OPTIMIZED)])
def test_many_models_open_close_fork_and_give_up(tmp_path: Path, count: int, flags: tuple[str, ...]) -> None:
    run_cycles(tmp_path, count, *flags)
