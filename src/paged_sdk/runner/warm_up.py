"""Runs trial steps before the first request, so that no request waits for kernels to be compiled."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Final

import torch

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.kernels.placement import working_on
from paged_sdk.kernels.step import StepContext
from paged_sdk.kernels.triton.tile_choices import DECODE_ALL_ROWS, TILE_CHOICES
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.runner.prompt_logprobs import LOGITS_TILE
from paged_sdk.types.step import StepRow

__all__ = ["COMPILING_THREADS", "run_for_trial", "trial_steps"]

COMPILING_THREADS: Final = 4
"""Threads that run trial steps. Each keeps a cuBLAS handle and workspace afterwards, 32 MiB on Hopper."""

# Kernels are chosen and compiled by the number of tokens: one count per range that shares kernels. From 256 tokens on,
# GGUF matrices are decoded before the product, and tiles of mixtures of experts grow up to 128 rows per expert.
# Attention tiles have 16, 32 or 64 rows (tokens times query heads per KV head): with counts in powers of two, each tile
# size occurs whatever the number of query heads.
_COUNTS: Final = (1, 2, 3, 4, 5, 8, 16, 17, 33, 65, 129, 257, 385, 512, 1024)
# More rows than the largest tile take several tiles, and each number of tiles splits the sums in another way, which is
# another variant: one count per number of tiles, unless a count above has it.
_TILED: Final = {
    count
    for choices in TILE_CHOICES.values()
    for count in range(choices[-1].block_m + 1, DECODE_ALL_ROWS, choices[-1].block_m)
}
# From this number of rows on, a matrix is decoded before the product, so more rows need no other kernel. float32 logits
# of 256 rows over a vocabulary of 152,000 take 156 MB.
_MOST_LOGITS: Final = DECODE_ALL_ROWS


def trial_steps(
    *,
    block_size: int,
    max_num_tokens: int,
    max_num_rows: int,
    max_model_len: int,
    windows: Iterable[int | None] = (),
) -> Iterator[list[StepRow]]:
    """Yield steps that launch every variant of every kernel that an engine's steps may launch.

    Prompt chunks of increasing length run at the start of a sequence, at the end of the longest one, and at the end of
    a context that just fits a window; alone, in pairs, beside one decode, and beside the maximum number of decodes.
    Chunks at the end of a window's length run alone only. Decodes also run without chunks.

    All rows write to block 0, which is still empty. Their sequence ids are negative, unlike those of requests, so that
    they do not collide with per-sequence state of backends.

    :param windows: sliding windows of the layers; None: full attention
    """

    def row(index: int, count: int, end: int) -> StepRow:
        blocks = [0] * -(-end // block_size)
        return StepRow(-1 - index, end - count, [0] * count, blocks, num_prompt_tokens=end, num_logits=1)

    longest = min(max_num_tokens, max_model_len)
    # Contexts no longer than a window are computed by the variant without window.
    held = sorted(window for window in windows if window is not None and window < max_model_len)
    counts = sorted({*(count for count in (*_COUNTS, *held) if count < longest), longest})

    def of_count(count: int) -> Iterator[list[StepRow]]:
        for end in dict.fromkeys((count, *(window for window in held if window > count), max_model_len)):
            yield [row(0, count, end)]
            if count < end < max_model_len:
                continue
            # Decodes come first, as in the scheduler's steps.
            if max_num_rows > 1 and count < max_num_tokens:
                yield [row(0, 1, 1), row(1, count, end)]
                yield [row(0, 1, max_model_len), row(1, count, end)]
            if max_num_rows > 1 and 2 * count <= max_num_tokens:
                yield [row(index, count, end) for index in range(2)]
        if max_num_rows > 2 and count > 1 and max_num_rows - 1 + count <= max_num_tokens:
            # This many rows occupy the device without splitting contexts, so short decodes suffice: the variants that
            # split longer contexts nevertheless were launched by the steps of two rows.
            for end in dict.fromkeys((count, *(window + 1 for window in held if window >= count))):
                yield [*(row(index, 1, 1) for index in range(max_num_rows - 1)), row(max_num_rows - 1, count, end)]

    # Consecutive steps have different numbers of tokens, so that steps run in parallel compile different kernels.
    for steps in itertools.zip_longest(*map(of_count, counts)):
        yield from filter(None, steps)
    yield from ([row(0, count, count)] for count in sorted(_TILED.difference(counts)) if count < longest)
    rows = min(max_num_rows, max_num_tokens)
    for end in dict.fromkeys((1, max_model_len)):
        yield [row(index, 1, end) for index in range(rows)]
        rest = min((max_num_tokens - rows + 1) // 2, max_model_len)
        if rows > 2 and rest > 1:
            yield [*(row(i, 1, end) for i in range(rows - 2)), *(row(i, rest, rest) for i in range(rows - 2, rows))]


def run_for_trial(
    model: CausalModel,
    backend: AttentionBackend,
    steps: Sequence[Sequence[StepRow]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    num_threads: int = 1,
    most_logits: int = LOGITS_TILE,
) -> None:
    """Run steps, discard their results, and copy a block.

    Logits are computed for each row's last token; for a step of one row that starts at position 0, for as many tokens
    as prompt logprobs, scores or drafts may need.

    :param most_logits: maximum number of tokens whose logits are computed at once
    :param num_threads: maximum number of steps that run at once, so that their kernels compile in parallel. Together
        they have at most as many tokens as the largest step, and so need no more memory than it
    """
    if not steps:
        return
    sizes = [sum(row.num_new_tokens for row in rows) for rows in steps]
    room, preparing, is_over = _Room(max(sizes)), threading.Lock(), threading.Event()

    def compute(rows: Sequence[StepRow]) -> None:
        with preparing:  # backends have state that all steps share
            batch = make_input_batch(rows, model.device)
            context = StepContext(attention=backend.prepare(rows))
        hidden = model.forward(batch.token_ids, batch.positions, context)
        if len(rows) == 1 and not rows[0].start:
            model.logits(hidden[-min(most_logits, _MOST_LOGITS) :])
        else:
            last = [first + row.num_new_tokens - 1 for first, row in zip(batch.first_tokens, rows, strict=True)]
            model.logits(hidden[torch.tensor(last, device=hidden.device)])

    def run(rows: Sequence[StepRow], size: int) -> None:
        with room.for_tokens(size), working_on(model.device), torch.inference_mode():
            if is_over.is_set():
                return
            try:
                compute(rows)
            except BaseException:
                is_over.set()  # no other step begins, however late this error is seen
                raise

    run(steps[0], sizes[0])  # alone: many other steps use the same kernels
    with working_on(model.device), torch.inference_mode():
        backend.copy([(0, 0, 1)])  # copies whole blocks: one call covers every number of tokens
    on_progress(1, len(steps))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="paged-sdk-compiling") as pool:
        running = [pool.submit(run, rows, size) for rows, size in zip(steps[1:], sizes[1:], strict=True)]
        try:
            for done, step in enumerate(as_completed(running), 2):
                step.result()
                on_progress(done, len(steps))
        finally:
            pool.shutdown(cancel_futures=True)


class _Room:
    """Limits the total number of tokens of the steps that run at once."""

    def __init__(self, num_tokens: int) -> None:
        self._free = num_tokens
        self._changed = threading.Condition()

    @contextmanager
    def for_tokens(self, count: int) -> Iterator[None]:
        """Wait until there is room for ``count`` tokens, and occupy it within the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()
