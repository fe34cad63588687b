"""Runs steps for trial before there are requests, so that no request waits for a kernel to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.types.step import StepRow

__all__ = ["run_for_trial", "trial_steps"]

# Kernels are chosen, and compiled, by numbers of tokens: one of each range within which that is the same. Beyond the
# last, matrices are decoded first, and a mixture's tiles grow up to 128 rows of an expert.
_COUNTS: Final = (1, 2, 3, 4, 5, 16, 17, 33, 65, 129, 257, 385, 512, 1024)


def trial_steps(
    *, block_size: int, max_num_tokens: int, max_num_rows: int, max_model_len: int
) -> Iterator[list[StepRow]]:
    """Yield steps that launch every kernel, in every variant, that steps of an engine may: chunks of prompts of rising
    length, at the beginning of a text and at the end of a long one, alone, several and beside decodes; decodes alone.

    All rows write to the first block, which holds nothing yet. Their sequences have ids below 0, as no request's
    has: what a backend keeps by id stays out of their way.
    """

    def row(index: int, count: int, end: int) -> StepRow:
        blocks = [0] * -(-end // block_size)
        return StepRow(-1 - index, end - count, [0] * count, blocks, num_prompt_tokens=end, num_logits=1)

    longest = min(max_num_tokens, max_model_len)
    counts = [*(count for count in _COUNTS if count < longest), longest]
    for count in counts:
        for end in dict.fromkeys((count, max_model_len)):
            yield [row(0, count, end)]
            # Decodes come first, as the scheduler has them.
            if max_num_rows > 1 and count < max_num_tokens:
                yield [row(0, 1, 1), row(1, count, end)]
                yield [row(0, 1, max_model_len), row(1, count, end)]
            if max_num_rows > 1 and 2 * count <= max_num_tokens:
                yield [row(index, count, end) for index in range(2)]
    rows = min(max_num_rows, max_num_tokens)
    for end in dict.fromkeys((1, max_model_len)):
        yield [row(index, 1, end) for index in range(rows)]
        rest = min((max_num_tokens - rows + 1) // 2, max_model_len)
        if rows > 2 and rest > 1:
            yield [*(row(index, 1, end) for index in range(rows - 2)), *(row(rows + i, rest, rest) for i in range(2))]


def run_for_trial(
    model: CausalModel,
    backend: AttentionBackend,
    steps: Sequence[Sequence[StepRow]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run steps, of which nothing is kept, and compute the logits of each row's last token."""
    for done, rows in enumerate(steps, 1):
        batch = make_input_batch(rows, model.device)
        hidden = model.forward(batch.token_ids, batch.positions, StepContext(attention=backend.prepare(rows)))
        last = [first + row.num_new_tokens - 1 for first, row in zip(batch.first_tokens, rows, strict=True)]
        model.logits(hidden[torch.tensor(last, device=hidden.device)])
        on_progress(done, len(steps))
