"""Write what rank 0 tells the others as plain values, and read it: what a step is, and whose logits are wanted."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.parallel.group import Message
from paged_sdk.types.step import Step, StepRow

__all__ = [
    "ADAPTER",
    "END",
    "LOGITS",
    "NO_ADAPTER",
    "STEP",
    "logits_message",
    "logits_rows",
    "step_from",
    "step_message",
]

STEP: Final = "step"
LOGITS: Final = "logits"
ADAPTER: Final = "adapter"
NO_ADAPTER: Final = "no adapter"
END: Final = "end"


def step_message(step: Step) -> Message:
    """Return a step as a message. It brings no images."""
    rows = [
        (
            row.seq_id,
            row.start,
            list(row.token_ids),
            list(row.kv_ids),
            row.num_prompt_tokens,
            row.kv_version,
            row.num_logits,
            row.is_long,
            row.adapter,
            row.adapter_start,
        )
        for row in step.rows
    ]
    return (STEP, rows, step.copies, list(step.released), list(step.finished_seq_ids))


def step_from(message: Message) -> Step:
    """Return the step of a message."""
    _, rows, copies, released, finished = message
    return Step(rows=[StepRow(*row) for row in rows], copies=copies, released=released, finished_seq_ids=finished)


def logits_message(hidden: Tensor) -> Message:
    """Return the message that asks for the logits of hidden states.

    :param hidden: ``[num_rows, hidden_size]``, on the CPU
    """
    content = hidden.contiguous().view(torch.uint8).numpy().tobytes()
    return (LOGITS, str(hidden.dtype).removeprefix("torch."), hidden.shape[1], content)


def logits_rows(message: Message) -> Tensor:
    """Return the hidden states of a message."""
    _, dtype, hidden_size, content = message
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(-1, hidden_size)
