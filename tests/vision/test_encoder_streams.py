"""On which stream the memory of an image's vectors is, by a stand-in for CUDA's streams."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged_sdk.vision.encoder import EncodedImage, ImageEncoder
from paged_sdk.vision.family import Inputs


class Streams:
    """Stands in for CUDA's streams, and notes what happens on which.

    :ivar current: the one that memory is taken of
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.current = "steps"
        owner = self

        class Stream:
            def __init__(self, device: object = None, name: str = "encoder") -> None:
                self.name = name

            def synchronize(self) -> None:
                owner.notes.append(f"{self.name} done")

            def record_event(self) -> Stream:
                return self

        @contextmanager
        def current(stream: Stream) -> Iterator[None]:
            owner.current = stream.name
            yield
            owner.current = "steps"

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name=owner.current))
        copy = Tensor.clone

        def cloned(tensor: Tensor) -> Tensor:
            owner.notes.append(f"copy by {owner.current}")
            return copy(tensor)

        monkeypatch.setattr(Tensor, "clone", cloned)


def test_vectors_are_memory_of_the_stream_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are copies of is another stream's, which may have it back when the copies are there, no sooner."""
    streams = Streams(monkeypatch)
    encoder = ImageEncoder(nn.Module(), dtype=torch.float32, device=torch.device("cuda", 0))

    def encode(inputs: Inputs) -> EncodedImage:
        streams.notes.append(f"encoding on {streams.current}")
        vectors, later = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
        for tensor in (vectors, later):
            weakref.finalize(tensor, streams.notes.append, "freed")
        return EncodedImage(vectors, (later,))

    monkeypatch.setattr(encoder, "_encode", encode)
    inputs: Any = {}
    made = encoder.encode(inputs, lambda: None)
    assert made.vectors.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert made.later[0].tolist() == [[1.0] * 3] * 2
    assert streams.notes == [
        "encoding on encoder",
        "encoder done",
        *["copy by steps"] * 2,
        "steps done",
        *["freed"] * 2,
    ]
