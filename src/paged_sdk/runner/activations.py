"""Measures how much memory steps need beside weights and KV, by running the largest step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.types.step import StepRow

__all__ = ["PeakBytes", "activation_bytes", "cuda_peak_bytes"]

_NUM_RUNS: Final = 3

PeakBytes: TypeAlias = Callable[[Callable[[], None]], int]
"""Runs a function, and returns how many bytes more than before were in use at the peak."""


def activation_bytes(
    model: CausalModel,
    make_backend: Callable[[int], AttentionBackend],
    *,
    block_size: int,
    num_tokens: int,
    num_rows: int,
    num_logits: int,
    peak_bytes: PeakBytes,
) -> int:
    """Measure the bytes that the largest step takes: it has the most tokens, rows and logits that a step may have.
    They are no less than its hidden states and its logits, whatever other threads free meanwhile.

    :param make_backend: allocates KV memory of so many blocks, which is freed on return and not counted
    :param num_tokens: the most tokens of a step
    :param num_rows: the most rows of a step
    :param num_logits: the most tokens of a step whose logits are computed at once
    """
    num_rows = min(num_rows, num_tokens)
    counts = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    blocks_per_row = -(-counts[0] // block_size)
    backend = make_backend(num_rows * blocks_per_row)
    spans = [
        StepRow(row, 0, [0] * count, range(row * blocks_per_row, (row + 1) * blocks_per_row), count, num_logits=1)
        for row, count in enumerate(counts)
    ]

    floor = 0

    def step() -> None:
        nonlocal floor
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
        positions = torch.cat([torch.arange(count, device=model.device) for count in counts])
        hidden = model.forward(tokens, positions, StepContext(attention=backend.prepare(spans)))
        logits = model.logits(hidden[-num_logits:])
        logits.argmax(-1)
        floor = hidden.nbytes + logits.nbytes

    with torch.inference_mode():
        peak = peak_bytes(step)
    return max(peak, floor)


def cuda_peak_bytes(device: torch.device) -> PeakBytes:
    """Make a measurement by the counters of torch's allocator; it also empties the allocator's cache.

    They count what other threads do as well, so that it is the highest of several: one that another model has freed
    memory in shows too little, and too much only leaves memory free. What torch takes of the device for it counts, if
    that is more: it takes whole pieces, and keeps what lies between tensors.
    """

    def peak_bytes(run: Callable[[], None]) -> int:
        run()  # compiles kernels and allocates the workspaces of libraries, which stay
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        peaks = []
        for _ in range(_NUM_RUNS):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run()
            torch.cuda.synchronize(device)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
        taken = torch.cuda.memory_reserved(device) - reserved
        torch.cuda.empty_cache()
        return max(taken, *peaks)

    return peak_bytes
