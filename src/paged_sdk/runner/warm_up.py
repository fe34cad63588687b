"""Runs steps for trial before there are requests, so that no request waits for a kernel to be compiled."""

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
"""Each has a handle and a workspace of cuBLAS's from then on, 32 MiB on Hopper."""

# Kernels are chosen, and compiled, by numbers of tokens: one of each range within which that is the same. Beyond the
# last, matrices are decoded first, and a mixture's tiles grow up to 128 rows of an expert. Attention's tiles have 16,
# 32 or 64 rows, tokens times the query heads of a KV head: with all powers of two each comes, whatever that number is.
_COUNTS: Final = (1, 2, 3, 4, 5, 8, 16, 17, 33, 65, 129, 257, 385, 512, 1024)
# What takes more rows than the largest tile has takes several, of which each number cuts sums otherwise, unless a count
# above has it.
_TILED: Final = {
    count
    for choices in TILE_CHOICES.values()
    for count in range(choices[-1].block_m + 1, DECODE_ALL_ROWS, choices[-1].block_m)
}
# From so many rows on a matrix is decoded first, whatever their number; logits of 152,000 tokens take 311 MB then.
_MOST_LOGITS: Final = DECODE_ALL_ROWS


def trial_steps(
    *,
    block_size: int,
    max_num_tokens: int,
    max_num_rows: int,
    max_model_len: int,
    windows: Iterable[int | None] = (),
) -> Iterator[list[StepRow]]:
    """Yield steps that launch every kernel, in every variant, that steps of an engine may: chunks of prompts of rising
    length, at the beginning of a text, at the end of a long one and at that of the longest that a window holds, alone,
    in pairs, beside one decode, and beside as many as there may be; decodes alone. Chunks at the end of a window's
    length run alone only.

    All rows write to the first block, which holds nothing yet. Their sequences have ids below 0, as no request's
    has: what a backend keeps by id stays out of their way.

    :param windows: of the layers' attention; None: of some layers it has none
    """

    def row(index: int, count: int, end: int) -> StepRow:
        blocks = [0] * -(-end // block_size)
        return StepRow(-1 - index, end - count, [0] * count, blocks, num_prompt_tokens=end, num_logits=1)

    longest = min(max_num_tokens, max_model_len)
    # A context that a window holds is computed without one.
    held = sorted(window for window in windows if window is not None and window < max_model_len)
    counts = sorted({*(count for count in (*_COUNTS, *held) if count < longest), longest})

    def of_count(count: int) -> Iterator[list[StepRow]]:
        for end in dict.fromkeys((count, *(window for window in held if window > count), max_model_len)):
            yield [row(0, count, end)]
            if count < end < max_model_len:
                continue
            # Decodes come first, as the scheduler has them.
            if max_num_rows > 1 and count < max_num_tokens:
                yield [row(0, 1, 1), row(1, count, end)]
                yield [row(0, 1, max_model_len), row(1, count, end)]
            if max_num_rows > 1 and 2 * count <= max_num_tokens:
                yield [row(index, count, end) for index in range(2)]
        if max_num_rows > 2 and count > 1 and max_num_rows - 1 + count <= max_num_tokens:
            # So many rows keep a device busy without splits of their contexts. Short ones do here: where longer ones
            # are split all the same, two rows have shown it.
            for end in dict.fromkeys((count, *(window + 1 for window in held if window >= count))):
                yield [*(row(index, 1, 1) for index in range(max_num_rows - 1)), row(max_num_rows - 1, count, end)]

    # Steps that follow one another have different numbers of tokens, so that those at once need different kernels.
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
    """Run steps, of which nothing is kept, and compute the logits of each row's last token, or of as many as there may
    be where a row is a whole text: those of a prompt, or after drafts. Copy a block, too.

    :param most_logits: the most tokens whose logits are computed at once
    :param num_threads: how many steps may run at once, so that their kernels are compiled side by side. They have no
        more tokens together than the largest step, and so take no more memory
    """
    if not steps:
        return
    sizes = [sum(row.num_new_tokens for row in rows) for rows in steps]
    room, preparing = _Room(max(sizes)), threading.Lock()

    def run(rows: Sequence[StepRow], size: int) -> None:
        with room.for_tokens(size), working_on(model.device), torch.inference_mode():
            with preparing:  # backends keep tables from step to step
                batch = make_input_batch(rows, model.device)
                context = StepContext(attention=backend.prepare(rows))
            hidden = model.forward(batch.token_ids, batch.positions, context)
            if len(rows) == 1 and not rows[0].start:
                model.logits(hidden[-min(most_logits, _MOST_LOGITS) :])
            else:
                last = [first + row.num_new_tokens - 1 for first, row in zip(batch.first_tokens, rows, strict=True)]
                model.logits(hidden[torch.tensor(last, device=hidden.device)])

    run(steps[0], sizes[0])  # whose kernels many others have, too
    with working_on(model.device), torch.inference_mode():
        backend.copy([(0, 0, 1)])  # of whole blocks, whatever the number of tokens
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
    """Lets steps begin as long as they have no more tokens together than there is room for."""

    def __init__(self, num_tokens: int) -> None:
        self._free = num_tokens
        self._changed = threading.Condition()

    @contextmanager
    def for_tokens(self, count: int) -> Iterator[None]:
        """Wait for room, and take it within the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()
