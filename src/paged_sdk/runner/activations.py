"""Measures the memory that steps need besides weights and KV, by running the largest step."""

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
"""Runs a function and returns its peak memory use above the previous level, in bytes."""


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
    """Measure the peak memory of the largest step, which has the maximum number of tokens, rows and logits, in bytes.

    The result is at least the size of its hidden states and logits, even if other threads free memory meanwhile.

    :param make_backend: allocates KV memory of a number of blocks, which is not counted and freed on return
    :param num_tokens: maximum number of tokens of a step
    :param num_rows: maximum number of rows of a step
    :param num_logits: maximum number of tokens of a step whose logits are computed at once
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
    """Return a function that measures with the counters of torch's allocator; it empties the allocator's cache.

    The counters include other threads, so the result is the maximum of several runs: a run in which another model frees
    memory shows too little, whereas too much only leaves memory unused. The growth of memory reserved on the device
    counts if it is larger: the allocator reserves whole segments and keeps the gaps between tensors.
    """

    def peak_bytes(run: Callable[[], None]) -> int:
        run()  # compiles kernels and allocates the permanent workspaces of libraries
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
