"""What a sweep of the sizes of tiles tries, and what it makes of the times."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch
import typer

pytest.importorskip("triton")

from benchmarks.gpu import ahead, one_product, parts, quantized_linear
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.device_tests import Session
from benchmarks.gpu.quantized_linear import best_choices, candidates
from benchmarks.gpu.timing import Row

from paged_sdk.kernels.triton.tile_choices import EXPERT_TILE_CHOICES, TILE_CHOICES, MatrixUnits, tile_choice

CPU: Final = torch.device("cpu")


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


def test_a_sweep_says_after_each_matrix_what_was_best(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    monkeypatch.setattr(quantized_linear, "SHAPES", ((64, 256), (128, 256)))
    monkeypatch.setattr(quantized_linear, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(quantized_linear, "copies_of", lambda matrix: [matrix])
    monkeypatch.setattr(quantized_linear, "compile_side_by_side", lambda calls: compiled.append(len(list(calls))))
    monkeypatch.setattr(quantized_linear, "time_each", lambda call, matrices: float(matrices[0].rows))
    rows = list(quantized_linear.sweep(CPU))
    so_far = [place for place, row in enumerate(rows) if row["kernel"] == "sweep so far"]
    numbers = len({row["rows"] for row in rows if "rows" in row})
    assert len(so_far) == 4 * numbers
    assert so_far[0] == compiled[0]
    assert len(compiled) == 4


def test_kernels_are_compiled_side_by_side() -> None:
    both, done = threading.Barrier(2), list[str]()

    def wait(name: str) -> None:
        both.wait(60)
        done.append(name)

    def fail() -> None:
        raise RuntimeError("out of resource")

    ahead.compile_side_by_side([fail, partial(wait, "a"), partial(wait, "b"), fail])
    assert sorted(done) == ["a", "b"]


def test_memcheck_says_that_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    (row,) = parts._memcheck(parts.Run(device=CPU, directory=tmp_path))
    assert "not installed" in row["case"]


def test_memcheck_runs_some_of_the_tests_under_its_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Session] = []

    def see(sessions: Sequence[Session], directory: Path, *, seconds: float) -> Iterator[Row]:
        seen.extend(sessions)
        return iter(())

    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/a/compute-sanitizer")
    monkeypatch.setattr(parts, "run_sessions", see)
    (row,) = parts._memcheck(parts.Run(device=CPU, directory=tmp_path))
    assert row["case"].startswith("one in 8 tests")
    assert "test_triton_kv_cache.py" in {path.name for session in seen for path in session.files}
    for session in seen:
        assert session.before[0] == "/a/compute-sanitizer"
        assert list(session.options) == ["--one-in", "8"]


def test_one_product_is_of_as_many_copies_as_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[int] = []
    monkeypatch.setattr(one_product, "quantized_linear", lambda x, matrix: multiplied.append(matrix.rows))
    one_product.multiply("Q4_K", 1, (64, 256), CPU)
    assert multiplied == [64] * quantized_linear.MAX_COPIES


def test_without_a_device_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="no CUDA device: --dry-run"):
        main()
