"""Measures the device memory that steps need besides weights and KV, before the KV pool takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from paged_sdk.attention.backend import KvStorage
from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import OutOfMemoryError
from paged_sdk.guard import clear_frames
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.triton.availability import launch_errors
from paged_sdk.logs import get_logger
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.parallel.group import Group
from paged_sdk.runner.activations import activation_bytes, cuda_peak_bytes
from paged_sdk.runner.cuda_graph import CudaGraphRecorder
from paged_sdk.runner.decode_graphs import DecodeGraphs, batch_sizes, context_bounds
from paged_sdk.runner.device import device_memory, is_lack_of_memory, return_cached_memory
from paged_sdk.runner.lockstep import LockstepModel, all_or_none, recorded_alike
from paged_sdk.runner.mixed_graphs import MixedGraphs, token_counts
from paged_sdk.runner.prompt_logprobs import LOGITS_TILE
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import StepResults
from paged_sdk.runner.step_table import Record
from paged_sdk.runner.warm_up import COMPILING_THREADS
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.processor import Processor

__all__ = ["activations_of", "most_logits", "recorded_bytes", "workspace_bytes"]

_log = get_logger(__name__)

_T = TypeVar("_T")

# For what trial steps do not show: kernels that are loaded later, and fragmentation.
_RESERVE: Final = 128 * 2**20

# cuBLAS has a workspace per thread and stream: those of the worker, of each compiling thread, and of the recording
# stream.
_NUM_WORKSPACES: Final = COMPILING_THREADS + 2
_WORKSPACE_BYTES: Final = 33 * 2**20  # Hopper's, with cuBLASLt's; used if torch does not report the sizes

# The driver keeps some kilobytes per node of a recorded step, and a step has several hundred nodes.
_LEAST_PER_GRAPH: Final = 256 * 2**10
_NUM_WEIGHED: Final = 4


def activations_of(
    model: CausalModel,
    storage: KvStorage,
    config: EngineConfig,
    *,
    processors: Sequence[Processor[Any]],
    vocab_size: int,
    placement: Placement,
    group: Group | None = None,
) -> dict[torch.device, int]:
    """Measure the bytes that steps need besides weights and KV on each CUDA device: the largest launched step, recorded
    steps, sampling, workspaces, scratch and a reserve. Of other devices, only the scratch is known.

    :param processors: logits processors, which may keep state on the logits' device
    :param group: the tensor-parallel ranks, all of which call this at the same time; None: one process
    :raises OutOfMemoryError: the weights leave too little memory
    """
    if group is not None:
        model = LockstepModel(model, group)
    found = {device: scratch for device, scratch in storage.scratch.items() if scratch and device.type != "cuda"}
    for device in placement.devices:
        if device.type != "cuda" or not config.paged:
            continue
        launched = _launched_bytes(device, model, storage, config)
        sampling = recorded = 0
        if device == placement.head:
            sampling = DeviceSampler.num_bytes(processors, config.max_num_seqs, vocab_size)
        if placement.is_one_device:
            recorded = _recorded_bytes_on(device, model, storage, config, vocab_size, group)
        found[device] = (
            launched
            + recorded
            + sampling
            + storage.scratch.get(device, 0)
            + _NUM_WORKSPACES * workspace_bytes()
            + _RESERVE
        )
        _log.info(
            "Left free on %s: %.1f MiB, of which steps of %d tokens take %.1f, recorded steps %.1f and sampling %.1f.",
            device,
            found[device] / 2**20,
            config.max_num_batched_tokens,
            launched / 2**20,
            recorded / 2**20,
            sampling / 2**20,
        )
    return found


def most_logits(config: EngineConfig) -> int:
    """Return the maximum number of tokens whose logits are computed at once: ``gamma + 1`` per sequence, or a tile of
    prompt logprobs.

    Tokens forced by grammars are drafts even without speculation, and are not counted: if all sequences had them at
    once and memory ran out, the sequences would restart.
    """
    return max(LOGITS_TILE, config.max_num_seqs * (config.gamma + 1))


def _launched_bytes(device: torch.device, model: CausalModel, storage: KvStorage, config: EngineConfig) -> int:
    available = device_memory(device).free
    try:
        shown = activation_bytes(
            model,
            storage.make,
            block_size=config.block_size,
            num_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len),
            num_rows=config.max_num_seqs,
            num_logits=most_logits(config),
            peak_bytes=cuda_peak_bytes(device),
        )
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"a step of {config.max_num_batched_tokens} tokens does not fit into the {available / 2**20:.1f} MiB that "
            f"the weights leave on {device}: a smaller with_max_num_batched_tokens, or quantized weights, need less",
            available=available,
        ) from error
    torch.cuda.empty_cache()  # frees the KV memory of the trial step
    return shown


def _recorded_bytes_on(
    device: torch.device,
    model: CausalModel,
    storage: KvStorage,
    config: EngineConfig,
    vocab_size: int,
    group: Group | None = None,
) -> int:
    def free() -> int:
        torch.cuda.synchronize(device)
        return device_memory(device).free

    # Two sets of logits: in the steps' results, and in the recordings' memory.
    num_graphs, floor = _num_graphs(config), 2 * config.max_num_seqs * vocab_size * torch.float32.itemsize
    floor += num_graphs * _LEAST_PER_GRAPH
    record = CudaGraphRecorder(device, is_trial=True)
    try:
        with torch.inference_mode(), all_or_none(group):
            measured = recorded_bytes(model, storage, config, record=record, free=free, group=group)
    except launch_errors() as error:  # not even the steps' results fit
        clear_frames(error)
        measured = 0
    torch.cuda.empty_cache()
    return max(measured, floor)


def recorded_bytes(
    model: CausalModel,
    storage: KvStorage,
    config: EngineConfig,
    *,
    record: Record,
    free: Callable[[], int],
    group: Group | None = None,
) -> int:
    """Measure the bytes that recorded steps keep, by the device's free memory before and after recording.

    The largest step of each kind is recorded, since the others fit into its memory, and a few small ones, which show
    what each step takes besides. If the largest step of a kind cannot be recorded, that kind counts as 0.

    :param free: returns the free bytes of the device
    :param group: the tensor-parallel ranks, all of which call this at the same time; None: one process
    :raises Exception: there is no memory for the steps' results, or for the small steps
    :raises EngineError: some ranks can record steps that others cannot
    """
    if group is not None:
        record = recorded_alike(record, group)
    backend = storage.make(1)
    recordable = backend.decode_backend
    if recordable is None:
        return 0
    counts, sizes = token_counts(config.max_num_batched_tokens), batch_sizes(config.max_num_seqs)
    longest = context_bounds(config.max_model_len)[-1:]
    overlap = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=model.device)
    layers = RecordableLayers(model, recordable, StepResults(overlap, max(counts[-1], sizes[-1])))
    before = free()
    mixed = _if_possible(lambda: MixedGraphs(layers, counts=counts[-1:], bounds=longest, record=record), group)
    decodes = _if_possible(lambda: DecodeGraphs(layers, sizes=sizes[-1:], bounds=longest, record=record), group)
    for_largest = before - free()
    small: list[DecodeGraphs] | list[MixedGraphs]
    if decodes is not None:
        small = [DecodeGraphs(layers, sizes=sizes[:1], bounds=longest, record=record) for _ in range(_NUM_WEIGHED)]
    elif mixed is not None:
        small = [MixedGraphs(layers, counts=counts[:1], bounds=longest, record=record) for _ in range(_NUM_WEIGHED)]
    else:
        return for_largest
    for_small = max(0, before - for_largest - free())
    nums_recorded = [0 if mixed is None else len(counts), 0 if decodes is None else len(sizes)]
    num_bounds = len(context_bounds(config.max_model_len))
    num_others = sum(num * num_bounds - 1 for num in nums_recorded if num)
    return for_largest + for_small * num_others // len(small)


def _if_possible(record: Callable[[], _T], group: Group | None) -> _T | None:
    """Record steps; None if that fails on all ranks. The reason is not logged here but when the real steps are
    recorded.
    """
    try:
        with all_or_none(group):
            return record()
    except launch_errors() as error:
        clear_frames(error)
    return_cached_memory()  # memory of the failed recording must not count
    return None


def _num_graphs(config: EngineConfig) -> int:
    """Return the number of steps that will be recorded."""
    num_sizes = len(token_counts(config.max_num_batched_tokens)) + len(batch_sizes(config.max_num_seqs))
    return num_sizes * len(context_bounds(config.max_model_len))


def workspace_bytes() -> int:
    """Return the bytes of the workspaces that cuBLAS and cuBLASLt allocate per thread and stream."""
    sizes = [getattr(torch.backends.cuda, name, None) for name in ("cublas_workspace_size", "cublaslt_workspace_size")]
    if any(size is None for size in sizes):
        return _WORKSPACE_BYTES
    return sum(int(size()) for size in sizes if size is not None)
