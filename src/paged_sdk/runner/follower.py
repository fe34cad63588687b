"""Run the steps that rank 0 sends, on another rank."""

from __future__ import annotations

import torch

from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.sharded import SharedHead
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import (
    ADAPTER,
    DRAWN,
    END,
    FOUND,
    LOGITS,
    NO_ADAPTER,
    REQUANTIZE,
    STEP,
    WAY,
    StepReader,
    logits_rows,
)
from paged_sdk.runner.device_decoding import DeviceDecoding, Way
from paged_sdk.runner.input_batch import make_input_batch

__all__ = ["follow"]


def follow(
    model: CausalModel,
    head: SharedHead,
    backend: AttentionBackend,
    group: Group,
    adapters: AdapterBank,
    path: DeviceDecoding | None = None,
) -> IsqType | None:
    """Compute this rank's part of every step, until rank 0 ends it.

    :param backend: holds the KV of this rank's heads
    :param adapters: this rank's shards of the loaded adapters
    :param path: holds the same recorded steps as rank 0's, on this rank's device; None: steps are not recorded
    :returns: the type to quantize the weights to before more steps arrive; None: rank 0 has ended
    :raises EngineDeadError: another rank has ended
    """
    way = Way.LAUNCHED
    steps = StepReader()
    with torch.inference_mode():
        while True:
            message = group.receive_message()
            match message[0]:
                case kind if kind == STEP:
                    step, inserted = steps.read(message)
                    if step.copies:
                        backend.copy(step.copies)
                    if step.state_copies:
                        backend.copy_states(step.state_copies)
                    backend.release(step.released)
                    if step.rows and path is not None and way is not Way.LAUNCHED:
                        path.run(way, step.rows)
                    elif step.rows:
                        batch = make_input_batch(step.rows, model.device, None if path is None else path.overlap)
                        context = StepContext(
                            attention=backend.prepare(step.rows),
                            is_long=batch.is_long,
                            adapted=adapters.rows(step.rows),
                            inserted=inserted,
                        )
                        model.forward(batch.token_ids, batch.positions, context)
                    way = Way.LAUNCHED
                case kind if kind == WAY:
                    # REPEATED runs as RECORDED: only rank 0 skips the preparation of its rows.
                    way = Way.MIXED if Way(message[1]) is Way.MIXED else Way.RECORDED
                case kind if kind == DRAWN:
                    assert path is not None
                    group.broadcast(path.overlap.tokens[: message[1]])
                case kind if kind == FOUND:
                    assert path is not None
                    path.overlap.found(message[1])
                case kind if kind == LOGITS and group.is_on_devices:
                    _, num_rows, dtype = message
                    head.help_on_device(num_rows, dtype, model.device)
                case kind if kind == LOGITS:
                    head.help(logits_rows(message))
                case kind if kind == ADAPTER:
                    _, number, file = message
                    own = adapters.add(adapters.read(file).lora)
                    assert own == number, "ranks number adapters alike"
                case kind if kind == NO_ADAPTER:
                    adapters.remove(message[1])
                case kind if kind == REQUANTIZE:
                    return IsqType.parse(message[1])
                case kind:
                    assert kind == END, kind
                    return None
