"""Two builds of the native library that take turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import typer
from benchmarks import kernels_beside, kernels_cpu
from benchmarks.kernels_beside import attention_cells, in_turns
from typer.testing import CliRunner

from native_weights import needs_library, workspace
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.kv_cache import gather_decoded
from paged_sdk.kernels.native import library


def test_each_is_called_first_as_often_as_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[float] = []
    monkeypatch.setattr(kernels_beside, "time", SimpleNamespace(perf_counter=lambda: sum(called)))
    ratio = in_turns(lambda: called.append(2.0), lambda: called.append(6.0), 0.0)
    assert called == [6.0, 2.0, 2.0, 6.0] * 4
    assert (ratio.times_as_fast, ratio.seconds) == (3.0, (2.0, 6.0))
    assert len(called) == 16
    in_turns(lambda: called.append(2.0), lambda: called.append(6.0), 100.0)
    assert len(called) == 16 + 26  # in pairs of 8 seconds, until 100 are over


@needs_library
def test_a_library_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_cpu, "STREAMED_BYTES", 8 << 20)
    app = typer.Typer()
    app.command()(kernels_beside.main)
    given = [str(library._PATH), "--types", "Q4_1", "--rows", "1,9", "--no-attention", "--seconds", "0"]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    _, title, *cells = shown.output.splitlines()
    assert title == "product with 2240 x 1536 weights in Q4_1"
    assert [cell.split(":")[0].strip() for cell in cells] == ["1 rows", "9 rows"]

    shown = CliRunner().invoke(app, [str(library._PATH), "--types", "Q4_1,Q9"])
    assert shown.exit_code == 2
    assert "Q9" in shown.output


@pytest.mark.parametrize("cache_type", kernels_cpu.PAGES)
def test_pages_of_every_type(cache_type: PagedCacheType) -> None:
    cache = kernels_cpu.random_pages((3, 8, 2, 64), cache_type)
    key, value = gather_decoded(cache, torch.arange(24), torch.arange(24), torch.float32)
    for vectors in (key, value):
        assert (vectors.std() - 1).abs() < 0.1
        blocks = torch.unflatten(vectors, 0, (3, 8))
        assert torch.equal(blocks[1:], blocks[:1].expand(2, -1, -1, -1))


@needs_library
def test_attention_in_turns() -> None:
    builds = workspace(), workspace()
    cells = list(attention_cells(builds, (4, 2, 32), [(1, 40), (3, 40)], 0.0))
    assert [(tokens, context) for tokens, context, _ in cells] == [(1, 40), (3, 40)]
    assert all(ratio.times_as_fast > 0 for *_, ratio in cells)
