"""What a sweep of the sizes of tiles tries, and what it makes of the times."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer

pytest.importorskip("triton")

from benchmarks.gpu import parts
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.quantized_linear import best_choices, candidates

from paged_sdk.kernels.triton.tile_choices import EXPERT_TILE_CHOICES, TILE_CHOICES, MatrixUnits, tile_choice


@pytest.mark.parametrize("units", MatrixUnits)
def test_a_table_serves_all_numbers_of_rows(units: MatrixUnits) -> None:
    for choices in (TILE_CHOICES[units], EXPERT_TILE_CHOICES[units]):
        sizes = [choice.block_m for choice in choices]
        assert sizes == sorted(set(sizes))
        assert [tile_choice(choices, size) for size in sizes] == list(choices)
        assert tile_choice(choices, 1) is choices[0]
        assert tile_choice(choices, sizes[-1] + 1) is choices[-1]


def test_a_sweep_tries_what_is_in_use_and_others_of_each_size() -> None:
    own = TILE_CHOICES[MatrixUnits.SHARED_MEMORY]
    tried = list(candidates(MatrixUnits.SHARED_MEMORY))
    assert tried[: len(own)] == list(own)
    assert len(set(tried)) == len(tried)
    assert {choice.block_m for choice in tried[len(own) :]} == {choice.block_m for choice in own}


def test_the_best_choice_is_so_over_all_matrices() -> None:
    times = {"a": (10.0, 40.0), "b": (15.0, 20.0), "c": (1.0, None)}
    rows = [
        {"rows": 16, "choice": choice} | ({"error": "out of resource"} if us is None else {"us": us})
        for choice, pair in times.items()
        for us in pair
    ]
    assert best_choices([*rows, {"rows": 64, "choice": "d", "us": 3.0}]) == {16: "b", 64: "d"}


def test_tests_run_without_plugins_and_below_another_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    path = tmp_path / "tests" / "test_two.py"
    path.parent.mkdir()
    path.write_text(
        "import os, pytest\n"
        "def test_one(): assert os.environ['CHECKED'] == 'yes'\n"
        "def test_two(): raise ValueError('two')\n"
        "@pytest.mark.long\n"
        "def test_three(): raise AssertionError\n"
    )
    environment = {"CHECKED": "yes", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    summary, failure = parts._test(path, sys.executable, "-c", RUNNER, **environment)
    assert summary["case"] == "1 passed, 1 failed, 0 skipped"
    assert failure["case"] == "test_two failed"
    assert "two" in failure["error"]
    path.write_text("def test_one(): pass\n")
    _, ended = parts._test(path, sys.executable, "-c", RUNNER + "; sys.exit(86)", **environment)
    assert ended["case"] == "ended with 86"


RUNNER = "import subprocess, sys; subprocess.run(sys.argv[1:], check=False)"


def test_memcheck_says_that_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    (row,) = parts._memcheck(torch.device("cpu"), dry=True)
    assert "not installed" in row["case"]


def test_without_a_device_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="no CUDA device: --dry-run"):
        main()
