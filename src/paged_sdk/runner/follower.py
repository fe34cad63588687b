"""Run the steps that rank 0 has made, in a process that holds another part of the model."""

from __future__ import annotations

import torch

from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.sharded import SharedHead
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import ADAPTER, END, LOGITS, NO_ADAPTER, STEP, logits_rows, step_from
from paged_sdk.runner.input_batch import make_input_batch

__all__ = ["follow"]


def follow(
    model: CausalModel, head: SharedHead, backend: AttentionBackend, group: Group, adapters: AdapterBank
) -> None:
    """Compute this rank's part of every step, until rank 0 says that it was the last.

    :param backend: keeps the keys and values of this rank's heads
    :param adapters: this rank's part of those that rows may go through
    :raises EngineDeadError: another rank has ended
    """
    with torch.inference_mode():
        while True:
            message = group.hear()
            match message[0]:
                case kind if kind == STEP:
                    step = step_from(message)
                    if step.copies:
                        backend.copy(step.copies)
                    backend.release(step.released)
                    if step.rows:
                        batch = make_input_batch(step.rows, model.device)
                        context = StepContext(
                            attention=backend.prepare(step.rows),
                            is_long=batch.is_long,
                            adapted=adapters.rows(step.rows),
                        )
                        model.forward(batch.token_ids, batch.positions, context)
                case kind if kind == LOGITS:
                    head.help(logits_rows(message))
                case kind if kind == ADAPTER:
                    _, number, path = message
                    own = adapters.add(adapters.read(path).lora)
                    assert own == number, "ranks number adapters alike"
                case kind if kind == NO_ADAPTER:
                    adapters.remove(message[1])
                case kind:
                    assert kind == END, kind
                    return
