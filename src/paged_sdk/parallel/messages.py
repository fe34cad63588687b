"""Serialize what rank 0 sends to the other ranks, such as steps and requests for logits, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from attrs import fields
from torch import Tensor

from paged_sdk.kernels.step import InsertedRows
from paged_sdk.parallel.group import Message
from paged_sdk.types.media import ImageSpan, PromptMedia
from paged_sdk.types.step import Step, StepRow

__all__ = [
    "ADAPTER",
    "DRAWN",
    "END",
    "FOUND",
    "LOGITS",
    "NO_ADAPTER",
    "REQUANTIZE",
    "STEP",
    "WAY",
    "StepReader",
    "StepWriter",
    "logits_message",
    "logits_rows",
]

STEP: Final = "step"
LOGITS: Final = "logits"
ADAPTER: Final = "adapter"
NO_ADAPTER: Final = "no adapter"
REQUANTIZE: Final = "requantize"
END: Final = "end"
# For ranks on GPUs:
WAY: Final = "way"
"""How to run the next step: a value of :class:`~paged_sdk.runner.device_decoding.Way`."""
DRAWN: Final = "drawn"
"""The number of sampled tokens that rank 0 broadcasts next, into the buffer that the next step reads."""
FOUND: Final = "found"
"""The sequence ids of the tokens in that buffer."""

_OTHERS: Final = tuple(each.name for each in fields(StepRow) if each.name not in ("token_ids", "kv_ids", "media"))
"""The fields of a row that are sent as they are."""
_others: Final = attrgetter(*_OTHERS)


class StepWriter:
    """Writes steps as messages. A prompt's image spans are sent once, with the first step of its sequence."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def message(self, step: Step, inserted: InsertedRows | None) -> Message:
        """Return a step as a message.

        :param inserted: image vectors that replace token embeddings
        """
        rows = []
        media = []
        for row in step.rows:
            rows.append((list(row.token_ids), list(row.kv_ids), *_others(row)))
            if row.media is not None and row.seq_id not in self._told:
                self._told.add(row.seq_id)
                media.append((row.seq_id, _written_media(row.media)))
        self._told.difference_update(step.finished_seq_ids)
        vectors = None if inserted is None else _written_inserted(inserted)
        return (
            STEP,
            rows,
            step.copies,
            step.state_copies,
            list(step.released),
            list(step.finished_seq_ids),
            media,
            vectors,
        )


class StepReader:
    """Reads the messages of a :class:`StepWriter`, which must all be read, in order."""

    def __init__(self) -> None:
        self._media: dict[int, PromptMedia] = {}

    def read(self, message: Message) -> tuple[Step, InsertedRows | None]:
        """Return the step of a message, and the image vectors that replace token embeddings."""
        _, rows, copies, state_copies, released, finished, media, vectors = message
        self._media |= {seq_id: _read_media(*written) for seq_id, written in media}
        step = Step(
            rows=[
                StepRow(token_ids=token_ids, kv_ids=kv_ids, **dict(zip(_OTHERS, others, strict=True)))
                for token_ids, kv_ids, *others in rows
            ],
            copies=copies,
            state_copies=state_copies,
            released=released,
            finished_seq_ids=finished,
        )
        for row in step.rows:
            row.media = self._media.get(row.seq_id)
        for seq_id in finished:
            self._media.pop(seq_id, None)
        return step, None if vectors is None else _read_inserted(*vectors)


def _written_media(media: PromptMedia) -> tuple[Any, ...]:
    spans = [(span.first_token, span.num_tokens, span.places.tobytes(), span.is_bidirectional) for span in media.spans]
    return spans, None if media.positions is None else media.positions.tobytes()


def _read_media(spans: Iterable[tuple[int, int, bytes, bool]], positions: bytes | None) -> PromptMedia:
    return PromptMedia(
        spans=tuple(
            ImageSpan(
                first_token=first_token,
                num_tokens=num_tokens,
                places=np.frombuffer(places, np.int64),
                digest=b"",
                inputs={},
                is_bidirectional=is_bidirectional,
            )
            for first_token, num_tokens, places, is_bidirectional in spans
        ),
        positions=None if positions is None else np.frombuffer(positions, np.int64).reshape(3, -1),
    )


def _written_inserted(inserted: InsertedRows) -> tuple[Any, ...]:
    return inserted.places.numpy().tobytes(), [_written_rows(each) for each in (inserted.vectors, *inserted.later)]


def _read_inserted(places: bytes, tensors: Iterable[tuple[str, int, bytes]]) -> InsertedRows:
    vectors, *later = (_read_rows(*written) for written in tensors)
    return InsertedRows(torch.frombuffer(bytearray(places), dtype=torch.int64), vectors, tuple(later))


def logits_message(hidden: Tensor) -> Message:
    """Return a message that requests the logits of hidden states.

    :param hidden: ``[num_rows, hidden_size]``, on the CPU
    """
    return (LOGITS, *_written_rows(hidden))


def logits_rows(message: Message) -> Tensor:
    """Return the hidden states of a message."""
    return _read_rows(*message[1:])


def _written_rows(rows: Tensor) -> tuple[str, int, bytes]:
    content = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return str(rows.dtype).removeprefix("torch."), rows.shape[1], content


def _read_rows(dtype: str, width: int, content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(-1, width)
