"""Encodes images in a thread of its own, and gives steps the vectors that replace the embeddings of image tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.errors import RequestFailedError
from paged_sdk.guard import clear_frames, drop_tracebacks
from paged_sdk.kernels.step import InsertedRows
from paged_sdk.kernels.transfer import to_device
from paged_sdk.runner.image_queue import AbandonedError, ImageQueue
from paged_sdk.system.threads import thread_must_start
from paged_sdk.types.media import ImageSpan
from paged_sdk.types.step import StepRow
from paged_sdk.vision.encoder import EncodedImage, ImageEncoder

__all__ = ["ImageVectors"]


class ImageVectors:
    """Encodes images on a thread of its own, so that steps do not wait for it.

    If encoding an image fails, its requests fail when a step needs its vectors; if ``on_start`` fails, all requests
    with images do.

    :param encoder: makes the vectors
    :param queue: decides which image is next
    :param on_start: called first on the thread (thread-local settings of the tensor library)
    """

    def __init__(
        self, encoder: ImageEncoder, queue: ImageQueue[EncodedImage], *, on_start: Callable[[], None] = lambda: None
    ) -> None:
        self._queue = queue
        # A daemon, so that an application that forgets to close the model can exit.
        self._thread = threading.Thread(
            target=_run, args=(encoder, queue, on_start), name="paged-sdk-images", daemon=True
        )

    def start(self) -> None:
        """Start the thread.

        :raises EngineError: the system gives this process no more threads
        """
        with thread_must_start("for images to be encoded on"):
            self._thread.start()

    def of(
        self, rows: Sequence[StepRow], first_tokens: Sequence[int], on_error: Callable[[int, Exception], None]
    ) -> InsertedRows | None:
        """Return the vectors that replace embeddings of a step's tokens; None: there are none. A sequence releases its
        images with the step of their last token.

        :param first_tokens: the index in the step of each row's first token
        :param on_error: called with the index of a row whose image could not be encoded; its tokens keep their
            embeddings
        """
        places: list[npt.NDArray[np.int64]] = []
        images: list[tuple[Tensor, ...]] = []
        for index, row in enumerate(rows):
            if row.media is None or not self._queue.is_wanted_by(row.seq_id):
                continue
            for span in row.media.spans_in(row.start, row.end):
                first, last = np.searchsorted(span.places, (row.start, row.end))
                if first == last:
                    continue
                try:
                    own = self._queue.take(span.digest)
                except RequestFailedError as error:
                    on_error(index, error)
                    continue
                places.append(span.places[first:last] + (first_tokens[index] - row.start))
                images.append(tuple(each[first:last] for each in (own.vectors, *own.later)))
            if row.end >= row.media.spans[-1].end:
                self._queue.let_go(row.seq_id)
        if not places:
            return None
        vectors, *later = map(torch.cat, zip(*images, strict=True))
        (on_device,) = to_device(vectors.device, np.concatenate(places))
        return InsertedRows(on_device, vectors, tuple(later))

    def close(self) -> None:
        """End the thread; this takes at most the time of one part of the encoder."""
        self._queue.close()
        if self._thread.is_alive():
            self._thread.join()


def _run(encoder: ImageEncoder, queue: ImageQueue[EncodedImage], on_start: Callable[[], None]) -> None:
    failure: BaseException | None = None
    try:
        on_start()
    except BaseException as error:  # if it ended the thread, requests would wait for ever
        clear_frames(error)
        drop_tracebacks(error)  # their frames would keep the encoder alive
        failure = error
    while (span := queue.next()) is not None:
        if failure is not None:
            queue.done(error=failure)
            continue
        try:
            queue.done(_encoded(encoder, span, queue.wait_for_turn))
        except AbandonedError:
            queue.done()
        except BaseException as error:  # any error of the encoder ends only the requests of this image
            clear_frames(error)
            drop_tracebacks(error)
            queue.done(error=error)


def _encoded(encoder: ImageEncoder, span: ImageSpan, before_layer: Callable[[], None]) -> EncodedImage:
    with torch.inference_mode():
        made = encoder.encode(span.inputs, before_layer)
    if len(made.vectors) != len(span.places):
        raise ValueError(f"{len(made.vectors)} vectors for an image of {len(span.places)} tokens")
    return made
