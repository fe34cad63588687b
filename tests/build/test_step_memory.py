"""What steps need of a device's memory, by a stand-in for the device that says how much is free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from torch import Tensor

pytest.importorskip("triton")


from paged_sdk.attention.backend import KvStorage
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.triton_paged import TritonPagedBackend
from paged_sdk.build import step_memory
from paged_sdk.build.step_memory import activations_of, most_logits, recorded_bytes
from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import EngineError, OutOfMemoryError
from paged_sdk.kernels.placement import Placement
from paged_sdk.kv.pool_size import DeviceMemory
from paged_sdk.parallel.group import Group
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import StepResults
from rank_threads import run_ranks
from recorded_steps import ATTENDING, Attending, let_torch_attend

CPU: Final = torch.device("cpu")
CUDA: Final = torch.device("cuda", 0)
MIB: Final = 2**20
CONFIG: Final = EngineConfig(
    num_blocks=8, block_size=8, max_num_seqs=5, max_num_batched_tokens=20, max_model_len=64, max_queue=8
)
VOCAB: Final = 50
MODEL: Final[Any] = Attending()
#: Steps of 16 and 20 tokens; decodes of 1, 2, 3, 4 and 5 rows.
NUM_GRAPHS: Final = 7


class Device:
    """Has some memory, of which recordings take some: the pool that all share, and some for each."""

    def __init__(self, *, shared: int, each: int, others_free: int = 0) -> None:
        self.free = 1000 * MIB
        self.num_recorded = 0
        self._shared = shared
        self._each = each
        self._others_free = others_free

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        self.free -= self._each + (0 if self.num_recorded else self._shared) - self._others_free
        self.num_recorded += 1
        return function


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> KvStorage:
    let_torch_attend(monkeypatch)
    settings = PoolSettings(block_size=8, dtype=torch.float32, device=CPU)
    return KvStorage(make=partial(TritonPagedBackend, ATTENDING, settings, max_num_seqs=5, max_model_len=64))


def test_what_recorded_steps_keep_is_what_the_device_lacks_then(storage: KvStorage) -> None:
    device = Device(shared=50 * MIB, each=3 * MIB)
    with torch.inference_mode():
        found = recorded_bytes(MODEL, storage, CONFIG, record=device.record, free=lambda: device.free)
    assert found == (50 + 3 * NUM_GRAPHS) * MIB
    assert device.num_recorded == 2 + 4


def test_memory_that_others_free_meanwhile_is_not_counted_on(storage: KvStorage) -> None:
    device = Device(shared=50 * MIB, each=3 * MIB, others_free=10 * MIB)
    with torch.inference_mode():
        found = recorded_bytes(MODEL, storage, CONFIG, record=device.record, free=lambda: device.free)
    assert found == (50 + 2 * 3 - 2 * 10) * MIB


@pytest.mark.parametrize(
    ("failing", "kept"),
    [
        ({0}, 50 + 3 * 5),  # the largest step with prompts: all decode steps are recorded
        ({1}, 50 + 3 * 2),  # the largest decode step: all steps with prompts are recorded
        ({0, 1}, 0),
    ],
)
def test_a_kind_whose_largest_step_cannot_be_recorded_counts_as_nothing(
    storage: KvStorage, failing: set[int], kept: int
) -> None:
    device, num_asked = Device(shared=50 * MIB, each=3 * MIB), 0

    def record(function: Callable[[], None]) -> Callable[[], None]:
        nonlocal num_asked
        num_asked += 1
        if num_asked - 1 in failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return device.record(function)

    with torch.inference_mode():
        assert recorded_bytes(MODEL, storage, CONFIG, record=record, free=lambda: device.free) == kept * MIB


@pytest.mark.parametrize(("rows", "gamma", "logits"), [(5, 0, 64), (5, 16, 85), (32, 4, 160)])
def test_logits_are_those_of_all_drafts_or_of_a_tile_of_a_prompt(rows: int, gamma: int, logits: int) -> None:
    assert most_logits(evolve(CONFIG, max_num_seqs=rows, gamma=gamma)) == logits


@pytest.fixture
def far_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Let the CPU stand in for a CUDA device with 40 MiB for each of cuBLAS's workspaces and 9 for recordings."""
    device = Device(shared=9 * MIB, each=0)
    monkeypatch.setattr(step_memory, "CudaGraphRecorder", lambda _, is_trial: device.record)
    monkeypatch.setattr(step_memory, "cuda_peak_bytes", lambda _: lambda run: 70 * MIB)
    monkeypatch.setattr(step_memory, "device_memory", lambda _: DeviceMemory(total=2000 * MIB, free=device.free))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 32 * MIB, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "cublaslt_workspace_size", lambda: 8 * MIB, raising=False)
    return device


def reserve(storage: KvStorage, config: EngineConfig = CONFIG) -> int:
    placement = Placement.on(CUDA, 1)
    storage = evolve(storage, scratch={CUDA: 4 * MIB})
    found = activations_of(MODEL, storage, config, processors=(), vocab_size=VOCAB, placement=placement)
    return found[CUDA]


def test_everything_is_reserved(storage: KvStorage, far_device: Device) -> None:
    """The step's peak, what recordings keep, logits for the host, for what it changes, for the device and for logprobs,
    attention's scratch, a workspace for each thread, and what no trial shows.
    """
    sampling = 4 * 5 * VOCAB * 4
    assert reserve(storage) == (70 + 9 + 4 + 6 * (32 + 8) + 128) * MIB + sampling


def test_recordings_count_though_the_device_shows_none(
    storage: KvStorage, far_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model frees memory meanwhile, or nothing can be recorded now: there is a computed floor."""
    sampling = 4 * 5 * VOCAB * 4
    floor = (70 + 4 + 240 + 128) * MIB + sampling + 2 * 5 * VOCAB * 4 + NUM_GRAPHS * MIB // 4
    far_device._others_free = 100 * MIB
    assert reserve(storage) == floor

    def refused(*_: object) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_memory, "CudaGraphRecorder", lambda _, is_trial: refused)
    assert reserve(storage) == floor


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "cuda", "triton", "cublas"],
)
def test_a_step_that_does_not_fit(
    storage: KvStorage, far_device: Device, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def none_left(run: Callable[[], None]) -> int:
        raise error

    monkeypatch.setattr(step_memory, "cuda_peak_bytes", lambda _: none_left)
    with pytest.raises(OutOfMemoryError, match=r"a step of 20 tokens does not fit into the 1000\.0 MiB") as caught:
        reserve(storage)
    assert caught.value.available == 1000 * MIB


def test_a_step_that_fails_otherwise(storage: KvStorage, far_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Callable[[], None]) -> int:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(step_memory, "cuda_peak_bytes", lambda _: broken)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        reserve(storage)


class Shard(Attending):
    """Stands for a rank's part of a model: the ranks add up their states."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        return self._group.sum_(super().forward(token_ids, positions, ctx))


def sized_by_ranks(
    storage: KvStorage, monkeypatch: pytest.MonkeyPatch, lacking: set[int], num_allocated: int
) -> list[int | str]:
    """Have two ranks measure what steps need and agree on the size of a pool, as while a model is built.

    :param lacking: ranks on which one allocation between recordings fails
    :param num_allocated: how many of these succeed before it
    :returns: each rank's size, or the message of its EngineError
    """
    own = threading.local()

    def limited(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocated(*args: Any) -> Any:
            own.num_allocated += 1
            if own.rank in lacking and own.num_allocated == num_allocated + 1:
                raise RuntimeError("CUDA error: out of memory")
            return allocate(*args)

        return allocated

    def size(group: Group) -> int | str:
        own.rank, own.num_allocated = group.rank, 0
        model: Any = Shard(group)
        placement = Placement.on(CUDA, 1)
        try:
            found = activations_of(
                model, storage, CONFIG, processors=(), vocab_size=VOCAB, placement=placement, group=group
            )
        except EngineError as error:
            return str(error)
        return group.smallest(2000 * MIB - found[CUDA])

    monkeypatch.setattr(step_memory, "StepResults", limited(StepResults))
    monkeypatch.setattr(RecordableLayers, "host_input", limited(RecordableLayers.host_input))
    return run_ranks(2, size)


# The tensors of the steps' results, then the input of each step before it is recorded.
ALLOCATIONS: Final = {"results": 0, "chunks": 1, "decodes": 2, "first small step": 3, "last small step": 6}


@pytest.mark.parametrize("num_allocated", ALLOCATIONS.values(), ids=ALLOCATIONS)
@pytest.mark.parametrize("lacking", [0, 1])
def test_all_ranks_fail_if_one_fails_between_recordings(
    storage: KvStorage, far_device: Device, monkeypatch: pytest.MonkeyPatch, num_allocated: int, lacking: int
) -> None:
    """It would go on, to its next recording or to the size of the pool, and the others would wait in this one."""
    errors = sized_by_ranks(storage, monkeypatch, {lacking}, num_allocated)
    assert errors[lacking] == "a step can be recorded on some ranks only (CUDA error: out of memory)"
    said = f"rank {lacking} of 2 could not do its part: RuntimeError: CUDA error: out of memory"
    assert errors[1 - lacking] == f"a step can be recorded on some ranks only ({said})"


@pytest.mark.parametrize("num_allocated", [*ALLOCATIONS.values(), 100], ids=[*ALLOCATIONS, "none"])
def test_ranks_that_all_fail_between_recordings_go_on(
    storage: KvStorage, far_device: Device, monkeypatch: pytest.MonkeyPatch, num_allocated: int
) -> None:
    one, other = sized_by_ranks(storage, monkeypatch, {0, 1}, num_allocated)
    assert isinstance(one, int)
    assert one == other
