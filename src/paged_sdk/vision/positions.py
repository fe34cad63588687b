"""Give tokens of images rotary positions in time, height and width (Wang et al., 2024, arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paged_sdk.types.media import ImageSpan

__all__ = ["grid_positions"]


def grid_positions(
    num_tokens: int, spans: Sequence[ImageSpan], grids: Sequence[npt.NDArray[np.generic]], merge: int
) -> npt.NDArray[np.int64]:
    """Return the positions of a prompt's tokens, ``[3, num_tokens]``.

    Text counts on by one in all three. An image's tokens all have the time of the first, and count rows and columns
    from there; what follows goes on after the greatest of them.

    :param spans: the prompt's images, in order
    :param grids: the patches of each image in time, height and width
    :param merge: so many patches in height, and in width, have one token
    """
    positions = np.empty((3, num_tokens), np.int64)
    token = position = 0
    for span, grid in zip(spans, grids, strict=True):
        first, count = int(span.places[0]), len(span.places)
        positions[:, token:first] = position + np.arange(first - token)
        position += first - token
        _, height, width = (int(side) for side in grid)
        rows, columns = height // merge, width // merge
        positions[0, first : first + count] = position
        index = np.arange(count)
        positions[1, first : first + count] = position + index // columns % rows
        positions[2, first : first + count] = position + index % columns
        position += max(rows, columns)
        token = first + count
    positions[:, token:] = position + np.arange(num_tokens - token)
    return positions
