"""Vectors of images in steps, and what becomes of them when their thread cannot begin, and when an engine closes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_image_queue import with_images
from torch import Tensor

from paged_sdk.errors import RequestFailedError
from paged_sdk.kernels import transfer
from paged_sdk.runner import image_vectors
from paged_sdk.runner.image_queue import ImageQueue
from paged_sdk.runner.image_vectors import ImageVectors
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.step import StepRow
from paged_sdk.vision.encoder import EncodedImage

NUM_TOKENS = 4


class Encoder:
    """Makes vectors of two columns, and counts how many images it made them of."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self.error: Exception | None = None

    def encode(self, inputs: object, before_layer: Callable[[], None]) -> EncodedImage:
        if self.error is not None:
            raise self.error
        self.num_encoded += 1
        return EncodedImage(torch.full((NUM_TOKENS, 2), float(self.num_encoded)))


class Rig:
    """Has images encoded on their thread, and waits for them.

    :param on_start: called first on the thread
    """

    def __init__(self, on_start: Callable[[], None] = lambda: None) -> None:
        self.encoder = Encoder()
        self.queue = ImageQueue[EncodedImage](8)
        encoder: Any = self.encoder
        self.images = ImageVectors(encoder, self.queue, on_start=on_start)
        self.images.start()

    def ask(self, sequence: Sequence) -> None:
        """Ask for a sequence's images, and wait until they have come."""
        has_come = threading.Event()
        self.queue.on_ready = has_come.set
        assert not self.queue.ask(sequence, 0)
        assert has_come.wait(60)
        assert self.queue.take_ready() == [sequence]

    def of(self, sequence: Sequence) -> tuple[Any, list[tuple[int, str]]]:
        """Return what a step of a whole prompt inserts, and which of its rows failed."""
        row = StepRow(
            seq_id=sequence.seq_id,
            token_ids=list(sequence.token_ids),
            start=0,
            kv_ids=[0],
            num_prompt_tokens=sequence.num_prompt_tokens,
            media=sequence.request.media,
        )
        failed: list[tuple[int, str]] = []
        return self.images.of([row], [0], lambda index, error: failed.append((index, str(error)))), failed


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.images.close()


def test_a_thread_that_cannot_begin_answers_every_image() -> None:
    def fail() -> None:
        raise RuntimeError("no cuBLAS on this thread")

    rig = Rig(fail)
    for seq_id in range(2):
        sequence = with_images(seq_id, [b"%d" % seq_id])
        rig.ask(sequence)
        inserted, failed = rig.of(sequence)
        assert inserted is None
        assert failed == [(0, "the image cannot be encoded: no cuBLAS on this thread")]
    rig.images.close()
    assert rig.encoder.num_encoded == 0


@pytest.mark.parametrize("begins", [False, True])
def test_what_goes_wrong_keeps_no_encoder(*, begins: bool) -> None:
    """Nor the model's weights, though a caller keeps the error, and without waiting for a search for cycles."""

    def start() -> None:
        if not begins:
            raise RuntimeError("no cuBLAS on this thread")

    gc.disable()
    try:
        rig = Rig(start)
        rig.encoder.error = ValueError("no such picture")
        encoder, sequence = weakref.ref(rig.encoder), with_images(0, [b"a"])
        rig.ask(sequence)
        with pytest.raises(RequestFailedError) as caught:
            rig.queue.take(b"a")
        rig.images.close()
        del rig
        assert encoder() is None
    finally:
        gc.enable()
    assert caught.value.__cause__ is not None


def test_no_vectors_are_left_after_an_engine(rig: Rig) -> None:
    """Though the engine, the worker and the model still know of the queue."""
    sequence, other = with_images(0, [b"a"]), with_images(1, [b"b"])
    rig.ask(sequence)
    rig.ask(other)
    vectors = weakref.ref(rig.queue.take(b"a").vectors)
    rig.queue.let_go(0)  # kept for whoever comes next
    assert vectors() is not None
    rig.images.close()
    assert vectors() is None
    rig.queue.let_go(1)  # as an engine does for whoever is left


def test_a_thread_that_was_never_started() -> None:
    queue = ImageQueue[EncodedImage](8)
    encoder: Any = Encoder()
    ImageVectors(encoder, queue).close()
    assert queue.next() is None


def test_vectors_of_a_device(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their places are sent without waiting, and torch need not hear that a step reads them: it would record an event
    as they are freed, and end the process if the device has failed.
    """
    sent: list[list[int]] = []

    def send(device: torch.device, *arrays: np.ndarray[Any, Any]) -> list[Tensor]:
        sent.extend(array.tolist() for array in arrays)
        return transfer.to_device(device, *arrays)

    def refuse(tensor: Tensor, stream: object) -> None:
        raise AssertionError("torch is told of a stream")

    monkeypatch.setattr(image_vectors, "to_device", send, raising=False)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(Tensor, "record_stream", refuse, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    sequence = with_images(0, [b"a"])
    rig.ask(sequence)
    inserted, failed = rig.of(sequence)
    assert not failed
    assert sent == [[0, 1, 2, 3]]
    assert inserted.places.tolist() == sent[0]
    assert inserted.vectors.tolist() == [[1.0, 1.0]] * NUM_TOKENS
