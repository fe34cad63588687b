"""What the log says of steps that were recorded or tried, and of those that could not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paged_sdk.build import device_steps
from paged_sdk.build.device_steps import OnProgress, _recorded, compile_steps
from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import EngineError
from paged_sdk.parallel.group import Group
from paged_sdk.runner.decode_graphs import DecodeGraphs
from rank_threads import run_ranks


class Graphs:
    """Stands for recorded steps of up to 8 rows."""

    largest = 8

    def __init__(self, *errors: Exception, fails: bool = False) -> None:
        self.errors = list(errors)
        self._fails = fails

    def check(self) -> None:
        if self._fails:
            raise RuntimeError("another result\nand where it was")


def recorded(graphs: Graphs, group: Group | None = None) -> object:
    def make(on_progress: OnProgress) -> DecodeGraphs:
        on_progress(1, 1)
        return cast("DecodeGraphs", graphs)

    return _recorded("decode steps", "rows", make, visible=False, group=group)


def test_recorded_steps_are_kept_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paged_sdk")
    graphs = Graphs()
    assert recorded(graphs) is graphs
    (said,) = caplog.messages
    assert said.startswith("Decode steps of up to 8 rows recorded in ")


def test_steps_that_larger_ones_stand_for_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs(RuntimeError("out of memory"))
    assert recorded(graphs) is graphs
    assert "Some decode steps are padded: theirs could not be recorded (out of memory)." in caplog.messages


def test_steps_that_cannot_be_recorded_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    assert recorded(Graphs(fails=True)) is None
    (said,) = caplog.messages
    assert said == "Decode steps are launched one operation at a time: they cannot be recorded (another result)."


def test_steps_that_only_some_ranks_can_replay_are_an_error_on_all() -> None:
    """A rank that launched its steps would not take part in what the others recorded."""

    def record(group: Group) -> None:
        with pytest.raises(EngineError, match=r"on some ranks only \(.*another result"):
            recorded(Graphs(fails=group.rank == 1), group)

    run_ranks(2, record)
    assert run_ranks(2, lambda group: recorded(Graphs(fails=True), group)) == [None, None]


def compiled(monkeypatch: pytest.MonkeyPatch, error: Exception, num_threads: int | None = None) -> None:
    """Compile kernels by steps that end with an error."""

    def fail(*args: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(device_steps, "run_for_trial", fail)
    nothing: Any = None
    config = EngineConfig(
        num_blocks=8, block_size=8, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, max_queue=8
    )
    backend: Any = SimpleNamespace(windows=())
    compile_steps(nothing, backend, config, visible=False, num_threads=num_threads)


LACKS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", LACKS, ids=["torch", "cuda", "triton"])
def test_steps_for_trial_without_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Requests may wait for a kernel then. Other ranks would wait for the part of this one."""
    compiled(monkeypatch, error)
    (said,) = caplog.messages
    assert said.startswith("Some kernels are not compiled yet: there is no memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        compiled(monkeypatch, error, num_threads=1)


def test_steps_for_trial_that_fail_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.AcceleratorError):
        compiled(monkeypatch, torch.AcceleratorError("CUDA error: device-side assert triggered"))
