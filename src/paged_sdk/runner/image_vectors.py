"""Gives a step the vectors of the images that its tokens stand for, and keeps those of the last ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.errors import RequestFailedError
from paged_sdk.kernels.step import InsertedRows
from paged_sdk.types.media import ImageSpan
from paged_sdk.types.step import StepRow
from paged_sdk.vision.encoder import EncodedImage, ImageEncoder

__all__ = ["ImageVectors"]

_KEPT_BYTES: Final = 1 << 28
"""Vectors are kept up to 256 MiB. One of 1,000 tokens of a 7B model has 8 MiB in bfloat16."""


class ImageVectors:
    """Encodes images when a step first needs them; a step that goes on within one, or another request with the same,
    finds the vectors.

    :param encoder: makes them
    """

    def __init__(self, encoder: ImageEncoder) -> None:
        self._encoder = encoder
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._kept_bytes = 0

    def of(
        self, rows: Sequence[StepRow], first_tokens: Sequence[int], on_error: Callable[[int, Exception], None]
    ) -> InsertedRows | None:
        """Return what takes the place of the embeddings of a step's tokens; None: nothing does.

        :param first_tokens: the index in the step of each row's first token
        :param on_error: told of a row whose image could not be encoded; its tokens keep their embeddings
        """
        places: list[npt.NDArray[np.int64]] = []
        images: list[tuple[Tensor, ...]] = []
        for index, row in enumerate(rows):
            for span in () if row.media is None else row.media.spans_in(row.start, row.end):
                first, last = np.searchsorted(span.places, (row.start, row.end))
                if first == last:
                    continue
                try:
                    own = self._vectors(span)
                except Exception as error:  # whatever an encoder raises ends this request alone
                    on_error(index, error)
                    continue
                places.append(span.places[first:last] + (first_tokens[index] - row.start))
                images.append(tuple(each[first:last] for each in (own.vectors, *own.later)))
        if not places:
            return None
        vectors, *later = map(torch.cat, zip(*images, strict=True))
        return InsertedRows(torch.from_numpy(np.concatenate(places)).to(vectors.device), vectors, tuple(later))

    def _vectors(self, span: ImageSpan) -> EncodedImage:
        found = self._kept.get(span.digest)
        if found is not None:
            self._kept.move_to_end(span.digest)
            return found
        made = self._encoder.encode(span.inputs)
        if len(made.vectors) != len(span.places):
            raise RequestFailedError(
                f"the image encoder gives {len(made.vectors)} vectors for an image of {len(span.places)} tokens"
            )
        self._kept[span.digest] = made
        self._kept_bytes += made.num_bytes
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return made
