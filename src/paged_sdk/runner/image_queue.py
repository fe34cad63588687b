"""Queues images for encoding, tracks which sequences need them, and caches the vectors of recent images.

This module uses no tensors. The engine's thread requests and takes images; the encoder's thread encodes them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from attrs import define, field

from paged_sdk.errors import RequestFailedError
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.waiting_queue import rank
from paged_sdk.types.media import ImageSpan

__all__ = ["MOST_BYTES", "AbandonedError", "ImageQueue"]

MOST_BYTES: Final = 1 << 28
"""Memory for image vectors: 256 MiB. An image of 1,000 tokens takes 8 MiB for a 7B model in bfloat16."""
_T = TypeVar("_T")
_BESIDE: Final = 2.0
"""Maximum slowdown of a step that runs beside the encoder: each of the two native calls gets at least half the
threads.
"""


class AbandonedError(Exception):
    """No sequence needs the image being encoded any more."""


@define(eq=False)
class _Image(Generic[_T]):
    """Holds an image that sequences need, or needed: its vectors stay cached.

    :ivar num_bytes: size of its vectors in bytes
    :ivar wanted_by: ids of sequences that have not computed all of its tokens yet
    :ivar made: its vectors; None: not encoded
    :ivar error: why encoding failed
    """

    span: ImageSpan
    num_bytes: int
    wanted_by: set[int] = field(factory=set)
    made: _T | None = None
    error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        return self.made is not None or self.error is not None


@define(eq=False)
class _Want(Generic[_T]):
    """Holds the images that a sequence needs.

    :ivar spans: its images by digest
    :ivar images: the same images once memory for their vectors is granted; None before
    :ivar is_awaited: whether the scheduler must be told when all of them are settled
    """

    sequence: Sequence
    spans: Mapping[bytes, ImageSpan]
    images: list[_Image[_T]] | None = None
    is_awaited: bool = False

    @property
    def is_settled(self) -> bool:
        return self.images is not None and all(image.is_settled for image in self.images)


class ImageQueue(Generic[_T]):
    """Implements the scheduler's :class:`~paged_sdk.scheduler.awaited_images.ImageGate`.

    Images are encoded in the order of their sequences: by priority, then by arrival. A sequence gets memory for all its
    images or none, so that two sequences never wait for each other. A sequence without memory waits until others have
    computed their image tokens; only sequences that need no new memory pass it. An image that several sequences need is
    encoded once. An image that cannot be encoded counts as settled: :meth:`take` raises its error.

    :param bytes_per_vector: bytes per image token, over all its vectors
    :param max_slowdown: maximum factor by which the encoder may lengthen the average step of decoding sequences; 0: no
        limit. The encoder at most doubles a step, so 2 and more have no effect. Below 2, the encoder pauses between its
        parts while steps run without it.
    :ivar on_ready: called on the encoder's thread when all images of a sequence are settled
    """

    def __init__(self, bytes_per_vector: int, *, max_slowdown: float = 0.0, most_bytes: int = MOST_BYTES) -> None:
        self.on_ready: Callable[[], object] = lambda: None
        self._bytes_per_vector = bytes_per_vector
        self._most_bytes = most_bytes
        # With m steps beside the encoder and p without, the average step takes (2 m + p) / (m + p) times as long.
        self._steps_between = (_BESIDE - max_slowdown) / (max_slowdown - 1) if 1 < max_slowdown < _BESIDE else 0.0
        self._changed = threading.Condition()
        self._images: OrderedDict[bytes, _Image[_T]] = OrderedDict()  # least recently used first
        self._wants: dict[int, _Want[_T]] = {}
        self._num_bytes = 0  # of all images, encoded or not
        self._ready: list[Sequence] = []
        self._current: _Image[_T] | None = None
        self._num_steps = 0
        self._seen_steps = 0  # steps that the encoder has taken into account
        self._owed = 0.0  # steps to wait for before the encoder resumes
        self._beside_texts = False
        self._is_closed = False

    # On the engine's thread

    @property
    def has_ready(self) -> bool:
        """Implement :attr:`ImageGate.has_ready`."""
        return bool(self._ready)

    def ask(self, sequence: Sequence, start: int) -> bool:
        """Implement :meth:`ImageGate.ask`."""
        media = sequence.request.media
        spans = {} if media is None else {span.digest: span for span in media.spans if span.places[-1] >= start}
        if not spans:
            return True
        with self._changed:
            want = self._wants.get(sequence.seq_id)
            if want is None or not spans.keys() <= want.spans.keys():
                self._drop(sequence.seq_id)
                want = self._wants[sequence.seq_id] = _Want(sequence, spans)
                self._give_memory()
            want.is_awaited = not want.is_settled
            return want.is_settled

    def take_ready(self) -> list[Sequence]:
        """Implement :meth:`ImageGate.take_ready`."""
        with self._changed:
            ready, self._ready = self._ready, []
            return ready

    def let_go(self, seq_id: int) -> None:
        """Implement :meth:`ImageGate.let_go`."""
        if seq_id in self._wants:
            with self._changed:
                self._drop(seq_id)
                self._give_memory()

    def note_step(self, num_decodes: int) -> None:
        """Implement :meth:`ImageGate.note_step`."""
        with self._changed:
            self._beside_texts = num_decodes > 0
            self._num_steps += 1
            self._changed.notify_all()

    def is_wanted_by(self, seq_id: int) -> bool:
        """Tell whether a sequence has not released its images yet."""
        return seq_id in self._wants

    def take(self, digest: bytes) -> _T:
        """Return the vectors of a settled image that a sequence needs.

        :raises RequestFailedError: encoding failed
        """
        with self._changed:
            image = self._images[digest]
            self._images.move_to_end(digest)
            if image.error is not None:  # a new exception for each request
                raise RequestFailedError(f"the image cannot be encoded: {image.error}") from image.error
            assert image.made is not None, "the image is not settled"
            return image.made

    def close(self) -> None:
        """End the encoder's thread, and free all vectors, since a closed engine may be referenced for long."""
        with self._changed:
            self._is_closed = True
            self._images.clear()
            self._wants.clear()
            self._ready.clear()
            self._num_bytes = 0
            self._changed.notify_all()

    # On the encoder's thread

    def next(self) -> ImageSpan | None:
        """Wait for the next image to encode and return it; None: the queue is closed. :meth:`done` must follow."""
        with self._changed:
            while not self._is_closed:
                self._current = self._first()
                if self._current is not None:
                    self._seen_steps, self._owed = self._num_steps, 0.0
                    return self._current.span
                self._changed.wait()
            return None

    def wait_for_turn(self) -> None:
        """Wait until the encoder may compute its next part.

        :raises AbandonedError: no sequence needs the image any more
        """
        with self._changed:
            self._owed += (self._num_steps - self._seen_steps) * self._steps_between
            self._seen_steps = self._num_steps
            while self._owed >= 1 and self._beside_texts and self._is_wanted(self._current):
                self._changed.wait()
                self._owed -= self._num_steps - self._seen_steps
                self._seen_steps = self._num_steps
            if not self._is_wanted(self._current):
                raise AbandonedError

    def done(self, made: _T | None = None, error: BaseException | None = None) -> None:
        """Record the result for the image that :meth:`next` returned last.

        :param made: the vectors; None: encoding failed or was abandoned
        """
        with self._changed:
            image, self._current = self._current, None
            if image is None or not self._is_wanted(image):
                return
            image.made, image.error = made, error
            self._tell()
            has_ready = self.has_ready
        if has_ready:
            self.on_ready()

    # Under the lock

    def _first(self) -> _Image[_T] | None:
        """Return the first image by rank that is not settled."""
        wants = sorted((want for want in self._wants.values() if want.images), key=_rank)
        images = (image for want in wants for image in want.images or ())
        return next((image for image in images if not image.is_settled), None)

    def _is_wanted(self, image: _Image[_T] | None) -> bool:
        return image is not None and bool(image.wanted_by) and not self._is_closed

    def _give_memory(self) -> None:
        """Grant memory to waiting sequences by rank, and evict images that no sequence needs."""
        num_wanted = sum(image.num_bytes for image in self._images.values() if image.wanted_by)
        is_full = False
        for want in sorted((each for each in self._wants.values() if each.images is None), key=_rank):
            sizes = {digest: len(span.places) * self._bytes_per_vector for digest, span in want.spans.items()}
            images = {digest: self._images.get(digest) for digest in want.spans}
            more = sum(sizes[digest] for digest, image in images.items() if image is None or not image.wanted_by)
            if more and (is_full or (num_wanted and num_wanted + more > self._most_bytes)):
                is_full = True
                continue
            num_wanted += more
            for digest, span in want.spans.items():
                if digest not in self._images:
                    self._images[digest] = _Image(span, sizes[digest])
                    self._num_bytes += sizes[digest]
                self._images[digest].wanted_by.add(want.sequence.seq_id)
            want.images = [self._images[digest] for digest in want.spans]
        for digest in [digest for digest, image in self._images.items() if not image.wanted_by]:
            if self._num_bytes <= self._most_bytes:
                break
            self._num_bytes -= self._images.pop(digest).num_bytes
        self._tell()
        self._changed.notify_all()

    def _drop(self, seq_id: int) -> None:
        """Drop a sequence's needs, and images without vectors that no other sequence needs."""
        want = self._wants.pop(seq_id, None)
        for image in () if want is None else want.images or ():
            image.wanted_by.discard(seq_id)
            if not image.wanted_by and image.made is None:
                self._num_bytes -= self._images.pop(image.span.digest).num_bytes

    def _tell(self) -> None:
        for want in self._wants.values():
            if want.is_awaited and want.is_settled:
                want.is_awaited = False
                self._ready.append(want.sequence)


def _rank(want: _Want[Any]) -> tuple[bool, int, float, int]:
    return rank(want.sequence)
