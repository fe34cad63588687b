"""Hold the images of a prompt: where their tokens are, and the encoder's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:  # requests without images load no numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["ImageSpan", "PromptMedia"]


@frozen(eq=False, kw_only=True)
class ImageSpan:
    """Holds the tokens of one image in a prompt.

    :ivar first_token: the position of the first token
    :ivar num_tokens: number of tokens, including markers around and between the image's rows
    :ivar places: ``[n]`` int64, ascending: the positions in the prompt of the tokens that the encoder's vectors replace
    :ivar digest: a hash that identifies the image
    :ivar inputs: the encoder's inputs, by name
    :ivar is_bidirectional: whether the tokens attend to one another in both directions, so that all have to be computed
        in one step
    """

    first_token: int
    num_tokens: int
    places: npt.NDArray[np.int64]
    digest: bytes
    inputs: Mapping[str, npt.NDArray[np.generic]]
    is_bidirectional: bool = False

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.first_token + self.num_tokens


@frozen(eq=False, kw_only=True)
class PromptMedia:
    """Holds the images of a prompt, in the order of their tokens.

    :ivar spans: the images
    :ivar positions: ``[3, num_prompt_tokens]`` int64: the rotary positions of the prompt's tokens in time, height and
        width (Wang et al., 2024, arXiv 2409.12191); None: a token's position is its place in the sequence
    """

    spans: tuple[ImageSpan, ...]
    positions: npt.NDArray[np.int64] | None = None

    def spans_in(self, start: int, end: int) -> list[ImageSpan]:
        """Return the images that have tokens from position ``start`` to ``end`` (exclusive)."""
        return [span for span in self.spans if span.first_token < end and start < span.end]

    def chunk_end_after(self, end: int) -> int:
        """Return the first position from ``end`` on at which a step may end: not within a bidirectional image."""
        for span in self.spans:
            if span.is_bidirectional and span.places[0] < end <= span.places[-1]:
                return int(span.places[-1]) + 1
        return end

    def chunk_end_before(self, end: int) -> int:
        """Return the last position up to ``end`` at which a step may end: not within a bidirectional image."""
        for span in self.spans:
            if span.is_bidirectional and span.places[0] < end <= span.places[-1]:
                return int(span.places[0])
        return end

    def whole_spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return start and end of the bidirectional images with tokens from ``start`` to ``end``, neither of which is
        within such an image.
        """
        spans = [(int(span.places[0]), int(span.places[-1]) + 1) for span in self.spans if span.is_bidirectional]
        return [(first, last) for first, last in spans if first < end and start < last]

    def blocks_at(self, start: int, end: int, first: int) -> npt.NDArray[np.int64] | None:
        """Return for each key position from ``first`` to ``end`` the index of its bidirectional image, -1 for none; or
        None if no token from ``start`` to ``end`` is in one.
        """
        import numpy as np

        blocks = np.full(end - first, -1, np.int64)
        is_there = False
        for number, span in enumerate(self.spans):
            if span.is_bidirectional:
                blocks[max(int(span.places[0]) - first, 0) : max(int(span.places[-1]) + 1 - first, 0)] = number
                is_there = is_there or (span.places[0] < end and start <= span.places[-1])
        return blocks if is_there else None

    def positions_at(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the rotary positions of the tokens from ``start`` to ``end``, ``[3, end - start]``. Positions after
        the prompt continue from its largest one in steps of 1.
        """
        import numpy as np

        assert self.positions is not None
        own = self.positions[:, start:end]
        num_prompt_tokens = self.positions.shape[1]
        first = max(start, num_prompt_tokens)
        if end <= first:
            return own
        shift = int(self.positions.max()) + 1 - num_prompt_tokens
        return np.concatenate([own, np.tile(np.arange(first, end) + shift, (3, 1))], axis=1)
