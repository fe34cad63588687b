"""Orders the images that are to be encoded, for whom they are, and keeps what was made of the last ones.

No tensors are used here. The engine's thread asks and takes, one other thread encodes.
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
"""Vectors are kept up to 256 MiB. One image of 1,000 tokens of a 7B model has 8 MiB in bfloat16."""
_T = TypeVar("_T")
_BESIDE: Final = 2.0
"""Beside an encoder a step takes at most so many times as long: each of two calls has half the threads at least."""


class AbandonedError(Exception):
    """Nobody wants the image any more that is being encoded."""


@define(eq=False)
class _Image(Generic[_T]):
    """Holds an image that sequences want, or have wanted.

    :ivar num_bytes: how many bytes its vectors take
    :ivar wanted_by: sequences that wait for it or have not computed all of its tokens yet
    :ivar made: its vectors; None: they are not there
    :ivar error: why it could not be encoded, until nobody wants it any more
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
    """Holds what a sequence wants.

    :ivar spans: its images by digest
    :ivar images: the same images once there is memory for their vectors; None before
    :ivar is_awaited: whether the scheduler is to hear when all have come
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
    images or none, so that two never wait for each other; what has no room waits until others have computed with
    theirs, and only those pass that need no more memory. An image that several want is encoded once. One that could
    not be encoded counts as there: whoever computes with it hears why.

    :param bytes_per_vector: how many bytes the vectors of one token take
    :param max_slowdown: by what factor tokens of texts may take longer beside the encoder; 0 is no limit. Since the
        encoder makes a step twice as long at most, 2 and more need nothing. With less it waits between its parts
        for steps without it.
    :ivar on_ready: called on the encoder's thread when a sequence's images have come
    """

    def __init__(self, bytes_per_vector: int, *, max_slowdown: float = 0.0, most_bytes: int = MOST_BYTES) -> None:
        self.on_ready: Callable[[], object] = lambda: None
        self._bytes_per_vector = bytes_per_vector
        self._most_bytes = most_bytes
        # With m steps beside the encoder and p without, tokens take (2 m + p) / (m + p) times as long on average.
        self._steps_between = (_BESIDE - max_slowdown) / (max_slowdown - 1) if 1 < max_slowdown < _BESIDE else 0.0
        self._changed = threading.Condition()
        self._images: OrderedDict[bytes, _Image[_T]] = OrderedDict()  # the one used longest ago first
        self._wants: dict[int, _Want[_T]] = {}
        self._num_bytes = 0  # of all images that are there or will be
        self._ready: list[Sequence] = []
        self._current: _Image[_T] | None = None
        self._num_steps = 0
        self._seen_steps = 0  # those that the encoder has counted
        self._owed = 0.0  # steps that are to come before the encoder goes on
        self._beside_texts = False
        self._is_closed = False

    # On the engine's thread

    @property
    def has_ready(self) -> bool:
        """Do what :attr:`ImageGate.has_ready` says."""
        return bool(self._ready)

    def ask(self, sequence: Sequence, start: int) -> bool:
        """Do what :meth:`ImageGate.ask` says."""
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
        """Do what :meth:`ImageGate.take_ready` says."""
        with self._changed:
            ready, self._ready = self._ready, []
            return ready

    def let_go(self, seq_id: int) -> None:
        """Do what :meth:`ImageGate.let_go` says."""
        if seq_id in self._wants:
            with self._changed:
                self._drop(seq_id)
                self._give_memory()

    def note_step(self, num_texts: int) -> None:
        """Do what :meth:`ImageGate.note_step` says."""
        with self._changed:
            self._beside_texts = num_texts > 0
            self._num_steps += 1
            self._changed.notify_all()

    def is_wanted_by(self, seq_id: int) -> bool:
        """Say whether a sequence has not let go of its images yet."""
        return seq_id in self._wants

    def take(self, digest: bytes) -> _T:
        """Return what was made of an image that a sequence wants and that has come.

        :raises RequestFailedError: it could not be encoded
        """
        with self._changed:
            image = self._images[digest]
            self._images.move_to_end(digest)
            if image.error is not None:  # each request needs an error of its own
                raise RequestFailedError(f"the image cannot be encoded: {image.error}") from image.error
            assert image.made is not None, "nobody has waited for the image"
            return image.made

    def close(self) -> None:
        """Have the encoder's thread end, and let go of all vectors: who has closed an engine may hold it for long."""
        with self._changed:
            self._is_closed = True
            self._images.clear()
            self._wants.clear()
            self._ready.clear()
            self._num_bytes = 0
            self._changed.notify_all()

    # On the encoder's thread

    def next(self) -> ImageSpan | None:
        """Wait for the next image that is to be encoded; None: the queue is closed. :meth:`done` must follow."""
        with self._changed:
            while not self._is_closed:
                self._current = self._first()
                if self._current is not None:
                    self._seen_steps, self._owed = self._num_steps, 0.0
                    return self._current.span
                self._changed.wait()
            return None

    def go_on(self) -> None:
        """Wait until the encoder may compute its next part.

        :raises AbandonedError: nobody wants the image any more
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
        """Take in what was made of the image of the last :meth:`next`, or why nothing was.

        :param made: the vectors; None: there is an error, or nobody wants them
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
        """Return the image that is to be encoded first."""
        wants = sorted((want for want in self._wants.values() if want.images), key=_rank)
        images = (image for want in wants for image in want.images or ())
        return next((image for image in images if not image.is_settled), None)

    def _is_wanted(self, image: _Image[_T] | None) -> bool:
        return image is not None and bool(image.wanted_by) and not self._is_closed

    def _give_memory(self) -> None:
        """Give memory for images to those that wait for it, in order, and take it from images that nobody wants."""
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
        """Forget what a sequence wanted, and images that nobody wants any more and that are not there."""
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
