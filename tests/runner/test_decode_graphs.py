"""Recorded steps where some recordings fail, and what a recording of CUDA's leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paged_sdk.attention.backend import DecodeBackend
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.step import AttentionStep, StepContext
from paged_sdk.kernels.triton import availability
from paged_sdk.runner.activations import cuda_peak_bytes
from paged_sdk.runner.cuda_graph import CudaGraphRecorder
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import Recorded, StepResults
from paged_sdk.runner.step_table import Record

CPU: Final = torch.device("cpu")
SIZES: Final = (1, 2, 4)
BOUNDS: Final = (10, 100)
VOCAB: Final = 60


class Model:
    """Computes of each row a state that tells its token, its position and the bound of its step; the likeliest token
    after it is the next number.

    :ivar error: is added to every state
    """

    device = CPU
    error = 0.0

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        own: Any = ctx.attention
        return torch.stack((token_ids, positions, torch.full_like(positions, own.bound)), dim=1).float() + self.error

    def normed(self, hidden: Tensor) -> Tensor:
        raise AssertionError("recorded steps end with logits")

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        return -(torch.arange(VOCAB) - hidden[:, :1] - 1).abs()


class Bound(AttentionStep):
    def __init__(self, bound: int) -> None:
        self.bound = bound

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        raise AssertionError("the model has no layers")


class Backend(DecodeBackend):
    empty_seat = 7

    def seats(
        self, seq_ids: Sequence[int], versions: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.int64]:
        return np.zeros(len(seq_ids), dtype=np.int64)

    def decode(self, seats: Tensor, positions: Tensor, max_context_len: int) -> AttentionStep:
        return Bound(max_context_len)

    def mixed(self, *args: Tensor, max_context_len: int) -> AttentionStep:
        raise AssertionError("every row has one token")


class Recorder:
    """Records steps, unless they are of those that fail, counted from the first."""

    def __init__(self, failing: Mapping[int, Exception]) -> None:
        self._failing = failing
        self.num_asked = 0
        self.replays = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_asked += 1
        function()
        if self.num_asked - 1 in self._failing:
            raise self._failing[self.num_asked - 1]

        def replay() -> None:
            self.replays += 1
            function()

        return replay


def graphs(recorder: Record, model: Model | None = None, overlap: Tensor | None = None) -> DecodeGraphs:
    own: Any = model or Model()
    backend: Any = Backend()
    results = StepResults(torch.zeros(4, dtype=torch.int64) if overlap is None else overlap, num_tokens=5)
    return DecodeGraphs(RecordableLayers(own, backend, results), sizes=SIZES, bounds=BOUNDS, record=recorder)


def step(made: DecodeGraphs, positions: Sequence[int], sources: Sequence[int] | None = None) -> Recorded:
    """Run a step whose tokens are 50, 51, ... where ``sources`` do not say otherwise."""
    rows = len(positions)
    tokens = range(50, 50 + rows)
    ids, nothing = range(rows), [-1] * rows
    return made.forward(ids, [0] * rows, [[0]] * rows, positions, tokens, sources or nothing, nothing)


def run(made: DecodeGraphs, positions: Sequence[int]) -> list[list[float]]:
    """Return the states of a step whose tokens are 50, 51, ..."""
    states: list[list[float]] = step(made, positions).hidden.tolist()
    return states


def errors() -> tuple[Exception, ...]:
    return RuntimeError("refused"), torch.OutOfMemoryError("CUDA out of memory")


# They are recorded in this order: 4 rows to 100, 4 to 10, 2 to 100, 2 to 10, 1 to 100, 1 to 10.
@pytest.mark.parametrize(
    ("failing", "largest", "bounds"),
    [
        ((), 4, {(1, 5): 10, (1, 50): 100, (2, 5): 10, (2, 50): 100, (3, 5): 10, (3, 50): 100}),
        ((1,), 4, {(1, 5): 10, (2, 5): 10, (3, 5): 100, (4, 50): 100}),
        ((3, 5), 4, {(1, 5): 100, (1, 50): 100, (2, 5): 100, (4, 5): 10}),
        ((0,), 2, {(1, 5): 10, (1, 50): 100, (2, 5): 10, (2, 50): 100}),
        ((4, 5), 4, {(1, 5): 10, (1, 50): 100}),
    ],
)
def test_steps_that_could_be_recorded_serve_the_others(
    failing: tuple[int, ...], largest: int, bounds: dict[tuple[int, int], int]
) -> None:
    both = errors()
    made = graphs(Recorder({place: both[place % 2] for place in failing}))
    assert (made.largest, len(made.errors)) == (largest, len(failing))
    for (rows, position), bound in bounds.items():
        assert run(made, [position] * rows) == [[50 + row, position, bound] for row in range(rows)]


def test_what_cannot_be_recorded_is_not_tried_for_ever() -> None:
    failing = {place: RuntimeError(f"refused {place}") for place in range(6)}
    recorder = Recorder(failing)
    with pytest.raises(RuntimeError, match="refused 0"):
        graphs(recorder)
    assert recorder.num_asked == 3


def test_kernels_that_cannot_be_compiled() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    compiler_errors = pytest.importorskip("triton.compiler.errors")
    lacking = errors.OutOfResources(300_000, 232_448, "shared memory")
    assert isinstance(lacking, availability.launch_errors())
    assert issubclass(compiler_errors.CompilationError, availability.launch_errors())
    assert graphs(Recorder({0: lacking})).largest == 2


def test_steps_are_replayed_before_there_are_requests() -> None:
    recorder = Recorder({})
    made = graphs(recorder)
    made.check()
    assert recorder.replays == 7  # each once, and one more with a row
    assert run(made, [3]) == [[50.0, 3.0, 10.0]]


def test_a_replay_with_another_result_is_found() -> None:
    model = Model()

    def record(function: Callable[[], None]) -> Callable[[], None]:
        function()

        def replay() -> None:
            model.error = 5.0
            function()
            model.error = 0.0

        return replay

    with pytest.raises(RuntimeError, match="another result"):
        graphs(record, model).check()


def test_a_step_leaves_the_likeliest_tokens_for_the_next() -> None:
    overlap = torch.zeros(4, dtype=torch.int64)
    made = graphs(Recorder({}), overlap=overlap)
    found = step(made, [3, 4, 5])
    assert found.positions == [0, 1, 2]
    assert found.likeliest.tolist() == [51, 52, 53]
    assert found.logits.shape == (3, VOCAB)
    assert found.logits.argmax(-1).tolist() == [51, 52, 53]
    assert overlap[:3].tolist() == [51, 52, 53]
    found = step(made, [4, 5], sources=[2, -1])
    assert found.hidden[:, 0].tolist() == [53, 51]
    assert found.likeliest.tolist() == [54, 52]


def test_rows_without_a_likeliest_token() -> None:
    model, overlap = Model(), torch.zeros(4, dtype=torch.int64)
    made = graphs(Recorder({}), model, overlap)
    model.error = math.nan
    assert step(made, [3]).likeliest.tolist() == [-1]
    assert overlap[0] == 0


class Driver:
    """Stands in for what torch knows of CUDA's graphs, and notes what it is asked for.

    :param refuses: whether the driver refuses to end recordings
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False, has_left: bool = False) -> None:
        self.calls: list[object] = []
        driver = self

        class Graph:
            def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
                driver.calls.append(("begin", pool, capture_error_mode))

            def capture_end(self) -> None:
                driver.calls.append("end")
                if refuses:
                    raise RuntimeError("capture is invalid")

            def replay(self) -> None:
                driver.calls.append("replay")

        class Stream:
            def __init__(self, device: torch.device) -> None:
                pass

            def wait_stream(self, other: object) -> None:
                driver.calls.append("wait")

        @contextmanager
        def current(of: object) -> Iterator[None]:
            driver.calls.append("enter")
            yield
            driver.calls.append("leave")

        def leave_pool(index: int, pool: tuple[int, int]) -> None:
            if has_left:
                raise RuntimeError("not currently recording to this pool")
            driver.calls.append(("leave pool", index, pool))

        for name, value in (
            ("graph_pool_handle", lambda: (0, 5)),
            ("Stream", Stream),
            ("CUDAGraph", Graph),
            ("current_stream", lambda device: "stream"),
            ("device", current),
            ("stream", current),
            ("empty_cache", lambda: driver.calls.append("empty")),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave_pool, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda index, pool: driver.calls.append("release"), raising=False
        )


def test_a_recording_empties_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is at work already."""
    driver = Driver(monkeypatch)
    replay = CudaGraphRecorder(torch.device("cuda", 1))(lambda: driver.calls.append("run"))
    begin = ("begin", (0, 5), "thread_local")
    assert driver.calls == ["enter", "run", "wait", "enter", begin, "run", "end", "leave", "leave"]
    replay()
    assert driver.calls[-1] == "replay"


@pytest.mark.parametrize(
    ("refuses", "has_left", "left"),
    [(True, False, [("leave pool", 1, (0, 5)), "release"]), (True, True, []), (False, False, [])],
)
def test_a_recording_that_fails_leaves_the_allocator(
    monkeypatch: pytest.MonkeyPatch, *, refuses: bool, has_left: bool, left: list[object]
) -> None:
    driver = Driver(monkeypatch, refuses=refuses, has_left=has_left)

    def function() -> None:
        driver.calls.append("run")
        if driver.calls.count("run") == 2:
            raise LookupError("waits for the device")

    recorder = CudaGraphRecorder(torch.device("cuda", 1))
    with pytest.raises(RuntimeError if refuses else LookupError) as caught:
        recorder(function)
    if refuses:
        assert isinstance(caught.value.__context__, LookupError)
    assert driver.calls[driver.calls.index("end") + 1 :] == left


@pytest.mark.parametrize(("taken", "expected"), [(60, 80), (96, 96)])
def test_the_peak_is_the_highest_of_several_runs(monkeypatch: pytest.MonkeyPatch, taken: int, expected: int) -> None:
    """In one of which another model frees what it had when the run began. What torch takes of the device counts too."""
    allocated, peaks, reserved = iter([100, 900, 100]), iter([170, 920, 180]), iter([4_000, 4_000 + taken])
    emptied: list[None] = []
    for name, value in (
        ("synchronize", lambda device: None),
        ("reset_peak_memory_stats", lambda device: None),
        ("memory_allocated", lambda device: next(allocated)),
        ("max_memory_allocated", lambda device: next(peaks)),
        ("memory_reserved", lambda device: next(reserved)),
        ("empty_cache", lambda: emptied.append(None)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    assert cuda_peak_bytes(torch.device("cuda", 0))(lambda: None) == expected
    assert len(emptied) == 2
