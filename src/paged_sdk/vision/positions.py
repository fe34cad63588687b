"""Compute rotary positions in time, height and width for prompts with images (M-RoPE; Wang et al., 2024, arXiv
2409.12191).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paged_sdk.types.media import ImageSpan

__all__ = ["grid_positions"]


def grid_positions(
    num_tokens: int, spans: Sequence[ImageSpan], grids: Sequence[npt.NDArray[np.generic]], merge: int
) -> npt.NDArray[np.int64]:
    """Return the positions of a prompt's tokens in time, height and width, ``[3, num_tokens]``.

    Text tokens count up by one in all three. An image's tokens all have the same time; their height and width are that
    time plus row and column. The text after an image continues one above the largest of its positions.

    :param spans: the prompt's images, in order
    :param grids: for each image, the number of patches in time, height and width
    :param merge: number of patches per token in height, and in width
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
