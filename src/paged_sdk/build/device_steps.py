"""Compiles the kernels of an engine's steps and records steps as CUDA graphs, before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.build.progress import LoadingBar
from paged_sdk.build.step_memory import most_logits
from paged_sdk.config.engine import EngineConfig
from paged_sdk.guard import clear_frames
from paged_sdk.kernels.lora_slots import AdapterSlots
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.triton.availability import launch_errors, why_not
from paged_sdk.logs import get_logger
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.parallel.group import Group
from paged_sdk.runner.cuda_graph import CudaGraphRecorder
from paged_sdk.runner.decode_graphs import DecodeGraphs, batch_sizes, context_bounds
from paged_sdk.runner.device import is_lack_of_memory
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.live_compilations import LiveCompilations
from paged_sdk.runner.lockstep import LockstepModel, all_or_none, recorded_alike
from paged_sdk.runner.mixed_graphs import MixedGraphs, token_counts
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.shared_overlap import SharedOverlap
from paged_sdk.runner.step_results import StepResults
from paged_sdk.runner.step_table import Record
from paged_sdk.runner.warm_up import COMPILING_THREADS, run_for_trial, trial_steps
from paged_sdk.sampling.candidates import argmax
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.processor import Processor
from paged_sdk.system.processors import usable_processors

__all__ = ["compile_argmax", "compile_steps", "live_compilations", "make_device_decoding", "make_overlap"]

_log = get_logger(__name__)

OnProgress: TypeAlias = Callable[[int, int], None]
GraphsT = TypeVar("GraphsT", DecodeGraphs, MixedGraphs)


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
    group: Group | None = None,
) -> DeviceDecoding | None:
    """Make the device decoding of a model, with which steps overlap and do not wait for Python; None unless the whole
    model is on CUDA devices.

    If the CPU computes part of a step, launching the step already waits for it. Steps are recorded only if one device
    holds the whole model: recording over several devices is not implemented.

    :param processors: logits processors, in order
    :param make_slots: makes adapter slots for recorded steps of up to a number of tokens; None: recorded steps do not
        support adapters
    :param group: the tensor-parallel ranks, all of which call this at the same time; None: one process
    """
    if any(device.type != "cuda" for device in placement.devices):
        return None
    if group is not None:
        model = LockstepModel(model, group)
    if config.paged:
        # With several threads, ranks would run the steps in different orders and wait for each other for ever.
        compile_steps(model, backend, config, visible=visible, num_threads=None if group is None else 1)
    overlap = make_overlap(config.max_num_seqs, placement.head, group)
    recordable = backend.decode_backend if placement.is_one_device else None
    slots = graphs = mixed = None
    if recordable is not None:
        counts, sizes = token_counts(config.max_num_batched_tokens), batch_sizes(config.max_num_seqs)
        bounds = context_bounds(config.max_model_len)
        largest = max(counts[-1], config.max_num_seqs)
        slots = None if make_slots is None else make_slots(largest)
        layers = RecordableLayers(model, recordable, StepResults(overlap.tokens, largest), slots)
        record: Record = CudaGraphRecorder(model.device)
        if group is not None:
            record = recorded_alike(record, group)

        def record_mixed(on_progress: OnProgress) -> MixedGraphs:
            return MixedGraphs(layers, counts=counts, bounds=bounds, record=record, on_progress=on_progress)

        def record_decodes(on_progress: OnProgress) -> DecodeGraphs:
            return DecodeGraphs(layers, sizes=sizes, bounds=bounds, record=record, on_progress=on_progress)

        # The steps with the most tokens first: the others fit into their memory.
        with torch.inference_mode():
            mixed = _recorded("steps with prompts", "tokens", record_mixed, visible=visible, group=group)
            graphs = _recorded("decode steps", "rows", record_decodes, visible=visible, group=group)
    sampler = DeviceSampler(processors, config.max_num_seqs, vocab_size, placement.head)
    path = DeviceDecoding(sampler, overlap, graphs, mixed, slots)
    with torch.inference_mode():
        path.warm_up(torch.zeros(1, vocab_size, dtype=torch.float32, device=placement.head))
    path.compilations = live_compilations(placement.head)
    return path


def live_compilations(device: torch.device) -> LiveCompilations | None:
    """Make a detector of kernels that are compiled from now on; None: the device does not run Triton's kernels."""
    if why_not(device) is not None:
        return None
    from paged_sdk.kernels.triton.compiled import CompiledKernels

    return LiveCompilations(CompiledKernels(device.index or 0))


def compile_argmax(vocab_size: int, device: torch.device) -> None:
    """Compile argmax for a vocabulary size: a draft model's may differ from its target's, and need another variant."""
    with torch.inference_mode():
        argmax(torch.zeros(1, vocab_size, dtype=torch.float32, device=device))


def make_overlap(max_num_seqs: int, device: torch.device, group: Group | None) -> OverlapTokens:
    """Make the store of sampled tokens on the device; that of rank 0 also updates those of the other ranks.

    :param group: the tensor-parallel ranks; None: one process
    """
    if group is None or group.rank > 0:
        return OverlapTokens(max_num_seqs, device)
    return SharedOverlap(max_num_seqs, device, group)


def compile_steps(
    model: CausalModel,
    backend: AttentionBackend,
    config: EngineConfig,
    *,
    visible: bool,
    num_threads: int | None = None,
) -> None:
    """Compile the kernels of all steps by running trial steps, several at once; Triton caches them for the next start.

    If other models leave too little memory for a trial step, requests may have to wait for a kernel.

    :param num_threads: number of threads that run trial steps; must be 1 with several ranks, so that all run them in
        the same order; None: chosen by the number of CPUs, with one process
    """
    start, most = time.monotonic(), min(COMPILING_THREADS, usable_processors())
    steps = list(
        trial_steps(
            block_size=config.block_size,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_rows=config.max_num_seqs,
            max_model_len=min(config.max_model_len, config.num_blocks * config.block_size),
            windows=backend.windows,
        )
    )
    try:
        with LoadingBar("Compiling kernels", visible=visible) as bar, torch.inference_mode():
            run_for_trial(
                model,
                backend,
                steps,
                bar.update,
                num_threads=num_threads or most,
                most_logits=most_logits(config),
            )
    except (RuntimeError, MemoryError) as error:
        if num_threads is not None or not is_lack_of_memory(error):  # other ranks would wait for this one
            raise
        _log.warning("Some kernels are not compiled yet: there is no memory for a step for trial (%s).", error)
        return
    _log.info("Kernels compiled and tried in %d steps, in %.1f s.", len(steps), time.monotonic() - start)


def _recorded(
    which: str, unit: str, make: Callable[[OnProgress], GraphsT], *, visible: bool, group: Group | None = None
) -> GraphsT | None:
    """Record steps, check them, and log the result. Return None if they cannot be recorded, and log why.

    :param which: name of this kind of steps
    :param unit: what the size of a step counts
    :raises EngineError: some ranks can record steps that others cannot
    """
    start = time.monotonic()
    try:
        with LoadingBar(f"Recording {which}", visible=visible) as bar, all_or_none(group):
            graphs = make(bar.update)
            graphs.check()
    except launch_errors() as error:
        what = f"{which.capitalize()} are launched one operation at a time: they cannot be recorded"
        _log.warning("%s (%s).", what, _reason(error))
        clear_frames(error)  # its frames hold the model
        return None
    if graphs.errors:
        _log.warning("Some %s are padded: theirs could not be recorded (%s).", which, _reason(graphs.errors[0]))
    seconds = time.monotonic() - start
    _log.info("%s of up to %d %s recorded in %.1f s.", which.capitalize(), graphs.largest, unit, seconds)
    return graphs


def _reason(error: Exception) -> str:
    """Return the first line of the error that ended a recording; torch raises another one when it ends the capture."""
    cause = error.__context__ or error
    return next(iter(str(cause).splitlines()), type(cause).__name__)
