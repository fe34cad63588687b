"""Prepares a device before an engine runs on it: checks memory, records steps, and keeps other set-ups away."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from paged_sdk.attention.backend import AttentionBackend, DecodeBackend, KvStorage
from paged_sdk.build.progress import LoadingBar
from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import OutOfMemoryError, PagedError
from paged_sdk.files import is_file
from paged_sdk.kernels.lora_slots import AdapterSlots
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.triton.availability import launch_errors
from paged_sdk.logs import get_logger
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.activations import activation_bytes, cuda_peak_bytes
from paged_sdk.runner.cuda_graph import CudaGraphRecorder
from paged_sdk.runner.decode_graphs import DecodeGraphs, batch_sizes, context_bounds
from paged_sdk.runner.device import address_space, device_memory
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.runner.warm_up import run_for_trial, trial_steps
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.processor import Processor

__all__ = ["activations_of", "alone_on", "make_device_decoding", "memory_must_do", "prepare_thread", "weights_must_fit"]

_log = get_logger(__name__)

# One lock for the process: a thread that waits for a device breaks what other threads are recording on it.
_ONE_AT_A_TIME: Final = threading.Lock()

# What loading takes beside the weights: tokenizer, tables, and 64 MiB of addresses for malloc's arena of one thread.
_WITHOUT_WEIGHTS: Final = 128 * 2**20

_GPU: Final = re.compile(r"\bGPU (\d+)\b")

# Reserved for allocations after the pool is sized: workspaces of cuBLAS, twice 32 MiB on Hopper, and CUDA graphs.
_CUDA_RESERVE: Final = 256 * 2**20


@contextmanager
def alone_on(*devices: torch.device) -> Iterator[None]:
    """Make the first CUDA device of some this thread's current one, and set up one model at a time on CUDA devices.

    Pools are sized by the free memory, and a recording must not be disturbed. Models that already run do not disturb
    it.
    """
    device = next((each for each in devices if each.type == "cuda"), None)
    if device is None:
        yield
        return
    with _ONE_AT_A_TIME, torch.cuda.device(device):
        yield


def prepare_thread(device: torch.device, num_threads: int | None) -> None:
    """Set torch's per-thread settings; to be called on the thread that steps an engine.

    :param num_threads: how many CPU threads one of torch's operations uses; None: torch's choice
    """
    if num_threads is not None:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        # Threads that are started later would take the number over: for them it is set back, on a thread of its own.
        others = threading.Thread(target=torch.set_num_threads, args=(before,))
        others.start()
        others.join()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        make_handle: Callable[[], int] = torch.cuda.current_blas_handle  # it has no annotations
        make_handle()  # of cuBLAS: each thread has its own, which takes time and memory to make


@contextmanager
def memory_must_do(path: Path) -> Iterator[None]:
    """Turn a failure to allocate host memory in the block into a typed error.

    :raises OutOfMemoryError: the process gets no more memory, because of its limits or the machine's
    """
    space, needed = address_space(), _size_of(path) + _WITHOUT_WEIGHTS
    if space is not None and space.free < needed:
        # Asked beforehand: without memory, libraries that are not Python end the process.
        raise OutOfMemoryError(
            f"{path.name} needs {needed / 2**20:.0f} MiB of addresses to be loaded, and the limit of this process "
            f"(ulimit -v) leaves {space.free / 2**20:.0f} MiB",
            path=path,
            needed=needed,
            available=space.free,
        )
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, PagedError) or not _is_lack_of_memory(error):
            raise
        reason = str(error) or type(error).__name__
        raise OutOfMemoryError(
            f"the memory that this process may have is not enough to load {path.name}: {reason}",
            path=path,
            available=device_memory(torch.device("cpu")).free,
        ) from error


def _size_of(path: Path) -> int:
    """Return the bytes of a checkpoint's weights on disk."""
    files = [path] if is_file(path) else path.glob("*.safetensors")
    # Links that lead nowhere are for the reader of the weights to refuse.
    return sum(file.stat().st_size for file in files if is_file(file))


def _is_lack_of_memory(error: MemoryError | RuntimeError | OSError) -> bool:
    # torch says it by a RuntimeError of its allocator, and mmap by an OSError.
    is_torch = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torch or getattr(error, "errno", None) == errno.ENOMEM


@contextmanager
def weights_must_fit(path: Path, devices: Sequence[torch.device]) -> Iterator[None]:
    """Turn an allocation failure of the block into a typed error.

    :param devices: those that the weights are for
    :raises OutOfMemoryError: a device runs out of memory while the weights are loaded
    """
    free = {device: device_memory(device).free for device in devices}
    try:
        yield
    except torch.OutOfMemoryError as error:
        needed, device = _size_of(path), _device_that_lacks(error, devices)
        share = "" if len(free) == 1 else ", or the part of them that is for it,"
        raise OutOfMemoryError(
            f"the weights of {path.name}, {needed / 2**20:.1f} MiB of files{share} do not fit {device}: "
            f"{free[device] / 2**20:.1f} MiB were free",
            path=path,
            needed=needed,
            available=free[device],
        ) from error


def _device_that_lacks(error: torch.OutOfMemoryError, devices: Sequence[torch.device]) -> torch.device:
    """Return the device that had no memory left, which torch's message names by its number."""
    found = _GPU.search(str(error))
    on_gpus = [device for device in devices if device.type != "cpu"] or list(devices)
    return next((each for each in on_gpus if found is not None and each.index == int(found[1])), on_gpus[0])


def activations_of(
    model: CausalModel,
    storage: KvStorage,
    config: EngineConfig,
    *,
    processors: Sequence[Processor[Any]],
    vocab_size: int,
    placement: Placement,
) -> dict[torch.device, int]:
    """Measure the bytes that steps need beside weights and KV, by running the largest step, on each CUDA device.

    :param processors: logits processors, which may keep state on the device of the logits
    :raises OutOfMemoryError: the weights leave too little memory
    """
    found: dict[torch.device, int] = {}
    for device in placement.devices:
        if device.type == "cuda" and config.paged:
            found[device] = _activations_on(device, model, storage, config)
            if device == placement.head:
                found[device] += DeviceSampler.num_bytes(processors, config.max_num_seqs, vocab_size)
    return found


def _activations_on(device: torch.device, model: CausalModel, storage: KvStorage, config: EngineConfig) -> int:
    available = device_memory(device).free
    try:
        shown = activation_bytes(
            model,
            storage.make,
            block_size=config.block_size,
            num_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len),
            num_rows=config.max_num_seqs,
            peak_bytes=cuda_peak_bytes(device),
        )
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {config.max_num_batched_tokens} tokens does not fit into the {available / 2**20:.1f} MiB that "
            f"the weights leave on {device}: a smaller with_max_num_batched_tokens, or quantized weights, need less",
            available=available,
        ) from error
    torch.cuda.empty_cache()  # frees the pool that the step ran on
    _log.info(
        "Activations on %s: %.1f MiB for steps of %d tokens.", device, shown / 2**20, config.max_num_batched_tokens
    )
    return shown + storage.scratch.get(device, 0) + _CUDA_RESERVE


def make_device_decoding(
    model: CausalModel,
    backend: AttentionBackend,
    config: EngineConfig,
    *,
    processors: Sequence[Processor[Any]],
    vocab_size: int,
    placement: Placement,
    visible: bool,
    make_slots: Callable[[int], AdapterSlots] | None = None,
) -> DeviceDecoding | None:
    """Make what lets steps overlap on CUDA devices, so that they do not wait for Python; None where another device has
    part of the model.

    A step that the CPU computes part of is over when it has been launched. Steps are recorded on one device only: what
    several compute has not been.

    :param processors: logits processors, in order
    :param make_slots: makes room for adapters in steps of so many rows; None: recorded steps know none
    """
    if any(device.type != "cuda" for device in placement.devices):
        return None
    if config.paged:
        _compile(model, backend, config, visible=visible)
    overlap = OverlapTokens(config.max_num_seqs, placement.head)
    recordable = backend.decode_backend if placement.is_one_device else None
    slots = None if make_slots is None or recordable is None else make_slots(config.max_num_seqs)
    graphs = (
        None if recordable is None else _decode_graphs(model, recordable, overlap, config, slots=slots, visible=visible)
    )
    sampler = DeviceSampler(processors, config.max_num_seqs, vocab_size, placement.head)
    path = DeviceDecoding(sampler, overlap, graphs, slots)
    with torch.inference_mode():
        path.warm_up(model)
    return path


def _compile(model: CausalModel, backend: AttentionBackend, config: EngineConfig, *, visible: bool) -> None:
    """Compile the kernels of all steps, by running some; Triton keeps what it has compiled for the next start.

    Where other models leave too little memory for one of them, requests may wait for a kernel.
    """
    start = time.monotonic()
    steps = list(
        trial_steps(
            block_size=config.block_size,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_rows=config.max_num_seqs,
            max_model_len=min(config.max_model_len, config.num_blocks * config.block_size),
        )
    )
    try:
        with LoadingBar("Compiling kernels", visible=visible) as bar, torch.inference_mode():
            run_for_trial(model, backend, steps, bar.update)
    except torch.OutOfMemoryError as error:
        _log.warning("Some kernels are not compiled yet: there is no memory for a step for trial (%s).", error)
        return
    _log.info("Kernels compiled and tried in %d steps, in %.1f s.", len(steps), time.monotonic() - start)


def _decode_graphs(
    model: CausalModel,
    backend: DecodeBackend,
    overlap: OverlapTokens,
    config: EngineConfig,
    *,
    slots: AdapterSlots | None,
    visible: bool,
) -> DecodeGraphs | None:
    """Record decode steps. Return None if the model does something that cannot be recorded, and log it."""
    start = time.monotonic()
    try:
        with LoadingBar("Recording decode steps", visible=visible) as bar, torch.inference_mode():
            graphs = DecodeGraphs(
                model,
                backend,
                overlap.tokens,
                sizes=batch_sizes(config.max_num_seqs),
                bounds=context_bounds(config.max_model_len),
                record=CudaGraphRecorder(model.device),
                slots=slots,
                on_progress=bar.update,
            )
            graphs.check()
    except launch_errors() as error:
        _log.warning("Decode steps are launched one operation at a time: they cannot be recorded (%s).", _reason(error))
        return None
    if graphs.errors:
        _log.warning("Some decode steps are padded: theirs could not be recorded (%s).", _reason(graphs.errors[0]))
    _log.info("Decode steps of up to %d rows recorded in %.1f s.", graphs.largest, time.monotonic() - start)
    return graphs


def _reason(error: Exception) -> str:
    """Return the first line of what has ended a recording, after which torch raises another error as it ends it."""
    cause = error.__context__ or error
    return next(iter(str(cause).splitlines()), type(cause).__name__)
