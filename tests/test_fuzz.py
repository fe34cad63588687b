"""A short form of ``make fuzz``, and whether the harness sees what it is there to see."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from fuzz.targets import Target, targets
from fuzz.workers import Case, run_case, run_cases
from paged_sdk.errors import CheckpointError

CASES = 24


@pytest.fixture(scope="module")
def all_targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in targets(tmp_path_factory.mktemp("seeds"))}


NAMES = (
    "gguf",
    "ggjt",
    "imatrix",
    "safetensors",
    "index",
    "quantized",
    "config",
    "tokenizer",
    "tokenizer-config",
    "generation-config",
    "template",
)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_load_or_are_refused(name: str, all_targets: dict[str, Target], tmp_path: Path) -> None:
    assert all_targets.keys() == set(NAMES)
    target = all_targets[name]
    refused = [run_case(target, Case(name, 0, index), tmp_path / "case") for index in range(CASES)]
    assert any(refused)


def _nothing(rng: random.Random, directory: Path) -> None:
    (directory / "n").write_text(str(rng.random()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_harness_finds_crashes_hangs_and_untyped_errors() -> None:
    seen: list[float] = []

    def behave(directory: Path) -> None:
        number = float((directory / "n").read_text())
        seen.append(number)
        if number < 0.05:
            os.abort()
        if number < 0.1:
            time.sleep(60)
        if number < 0.4:
            raise KeyError(number)
        if number < 0.5:
            bytearray(1 << 40)
        if number < 0.8:
            raise CheckpointError("no")

    target = Target("toy", 1, _nothing, behave)
    report = run_cases([target], seed=0, first=0, count=20, workers=2, limit=0.5)
    numbers = [Case("toy", 0, index).random().random() for index in range(20)]
    assert report.done == 20
    assert report.refused == sum(0.5 <= number < 0.8 for number in numbers)
    found = {find.case.index: find.what for find in report.finds}
    assert found.keys() == {index for index, number in enumerate(numbers) if number < 0.5}
    for index, what in found.items():
        number = numbers[index]
        expected = ("SIGABRT", "more than 3 s", "KeyError", "MemoryError")
        assert expected[(number >= 0.05) + (number >= 0.1) + (number >= 0.4)] in what
    assert not seen  # in other processes
