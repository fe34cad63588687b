"""Recorded steps where some recordings fail, and what a recording of CUDA's leaves behind."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paged_sdk.attention.backend import DecodeBackend
from paged_sdk.build.device_steps import _recorded
from paged_sdk.guard import clear_frames
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.step import AttentionStep, StepContext
from paged_sdk.kernels.triton import availability
from paged_sdk.runner import cuda_graph
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

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        raise AssertionError("the model has no layers")

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
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

    As in torch, a pool is known from its first recording on, and refused once its last graph has gone.

    :param failing: which recordings fail, counted from the first
    :param how: where they do: "begin" when the allocator has begun, "run" in the function, "end" when the driver
        refuses to end it, "finish" when the allocator has ended
    :ivar pools: how many graphs each pool has
    :ivar num_streams: how many streams have been made
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: Sequence[int] = (), how: str = "") -> None:
        self.calls: list[object] = []
        self.pools: dict[object, int] = {}
        self.num_streams = 0
        self._failing = failing
        self._how = how
        self._num_begun = 0
        self._recording: object = None  # the pool that the allocator records to
        driver, handles = self, count(5)

        class Graph:
            def __init__(self) -> None:
                self.pool: object = None

            def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
                driver.calls.append(("begin", pool, capture_error_mode))
                driver._num_begun += 1
                if driver.pools.get(pool) == 0:
                    raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
                driver.pools[pool] = driver.pools.get(pool, 0) + 1
                if driver._recording is not None:
                    raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
                driver._recording = pool
                driver.fail("begin")

            def capture_end(self) -> None:
                driver.calls.append("end")
                if driver._how == "begin":
                    driver.fail("begin", "no stream is capturing")
                driver.fail("end")
                self.pool, driver._recording = driver._recording, None
                driver.fail("finish")

            def replay(self) -> None:
                driver.calls.append("replay")

            def __del__(self) -> None:
                if self.pool is not None:
                    driver.pools[self.pool] -= 1

        class Stream:
            def __init__(self, device: torch.device) -> None:
                driver.num_streams += 1

            def wait_stream(self, other: object) -> None:
                driver.calls.append("wait")

        @contextmanager
        def current(of: object) -> Iterator[None]:
            driver.calls.append("enter")
            yield
            driver.calls.append("leave")

        def leave_pool(index: int, pool: tuple[int, int]) -> None:
            if driver._recording != pool:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            driver._recording = None
            driver.calls.append(("leave pool", index, pool))

        def release_pool(index: int, pool: tuple[int, int]) -> None:
            driver.pools[pool] -= 1
            driver.calls.append("release")

        for name, value in (
            ("graph_pool_handle", lambda: (0, next(handles))),
            ("Stream", Stream),
            ("CUDAGraph", Graph),
            ("current_stream", lambda device: "stream"),
            ("device", current),
            ("stream", current),
            ("is_initialized", lambda: True),
            ("empty_cache", lambda: driver.calls.append("empty")),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave_pool, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", release_pool, raising=False)

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def fail(self, where: str, message: str = "capture is invalid") -> None:
        """Raise if that is where the recording under way fails."""
        if where == self._how and self._num_begun - 1 in self._failing:
            raise RuntimeError(message)


def test_a_recording_empties_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is at work already."""
    driver = Driver(monkeypatch)
    replay = CudaGraphRecorder(torch.device("cuda", 1))(lambda: driver.calls.append("run"))
    begin = ("begin", (0, 5), "thread_local")
    assert driver.calls == ["enter", "run", "wait", "enter", begin, "run", "end", "leave", "leave"]
    replay()
    assert driver.calls[-1] == "replay"


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("begin", [("leave pool", 1, (0, 5)), "release"]),
        ("run", []),
        ("end", [("leave pool", 1, (0, 5)), "release"]),
        ("finish", []),
    ],
)
def test_a_recording_that_fails_leaves_the_allocator(
    monkeypatch: pytest.MonkeyPatch, how: str, left: list[object]
) -> None:
    driver = Driver(monkeypatch, failing=[0], how=how)

    def function() -> None:
        driver.calls.append("run")
        if driver.calls.count("run") == 2 and how != "finish":
            raise LookupError("waits for the device")

    recorder = CudaGraphRecorder(torch.device("cuda", 1))
    with pytest.raises(LookupError if how == "run" else RuntimeError) as caught:
        recorder(function)
    if how == "end":
        assert isinstance(caught.value.__context__, LookupError)
    assert driver.calls[driver.calls.index("end") + 1 :] == left
    assert not driver.is_recording
    clear_frames(caught.value)
    assert driver.pools == {(0, 5): 0}


def recorded(driver: Driver, recorder: CudaGraphRecorder) -> DecodeGraphs:
    """Record steps whose runs fail where the driver says so."""

    class Failing(Model):
        def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
            if driver.is_recording:
                driver.fail("run", "operation not permitted when stream is capturing")
            return super().forward(token_ids, positions, ctx)

    return graphs(recorder, Failing())


@pytest.mark.parametrize("how", ["begin", "run", "end", "finish"])
@pytest.mark.parametrize(
    ("failing", "largest", "pools"), [((0,), 2, [0, 4]), ((2,), 4, [2, 3]), ((0, 3), 2, [0, 1, 2])]
)
def test_recordings_after_one_that_has_failed(
    monkeypatch: pytest.MonkeyPatch, how: str, failing: tuple[int, ...], largest: int, pools: list[int]
) -> None:
    """They share another pool: torch refuses the old one where it has no graph left. What the device has given to that
    is given back first. Of the largest size, no step is kept where that over the longest context has failed.
    """
    driver = Driver(monkeypatch, failing=failing, how=how)
    made = recorded(driver, CudaGraphRecorder(torch.device("cuda", 1)))
    assert (made.largest, len(made.errors)) == (largest, len(failing))
    assert list(driver.pools.values()) == pools
    assert driver.calls.count("empty") == len(failing)


def test_recordings_after_steps_that_were_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    recorder = CudaGraphRecorder(torch.device("cuda", 1))
    recorded(driver, recorder)
    assert driver.pools == {(0, 5): 0}
    made = recorded(driver, recorder)
    assert driver.pools == {(0, 5): 0, (0, 6): 6}
    assert made.largest == 4


def test_trials_have_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all models: cuBLAS keeps memory for each stream. Graphs that are replayed have one that no others have."""
    driver, device = Driver(monkeypatch), torch.device("cuda", 1)
    cuda_graph._stream_of_trials.cache_clear()
    try:
        for _ in range(3):
            recorded(driver, CudaGraphRecorder(device, is_trial=True))
        assert driver.num_streams == 1
        for _ in range(2):
            recorded(driver, CudaGraphRecorder(device))
        assert driver.num_streams == 3
    finally:
        cuda_graph._stream_of_trials.cache_clear()


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("num_failing", [1, 3])
@pytest.mark.usefixtures("without_collector")
def test_recordings_that_fail_leave_nothing(num_failing: int) -> None:
    """Neither the model nor steps that were recorded wait for Python's collector of garbage."""
    models, num_asked = [Model()], 0
    left = weakref.ref(models[0])

    def record(function: Callable[[], None]) -> Callable[[], None]:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= num_failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return function

    made = _recorded("decode steps", "rows", lambda on_progress: graphs(record, models.pop()), visible=False)
    assert (made is None) == (num_failing == 3)
    del made
    assert left() is None


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
