"""What the models ask of attention, whatever keeps the keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from attrs import frozen

from paged_sdk.kernels.step import AttentionStep

__all__ = ["AttentionBackend", "RowSpan"]


@frozen
class RowSpan:
    """The tokens that one sequence computes in a step.

    :ivar start: tokens of the sequence whose keys and values are in the cache already
    :ivar num_new_tokens: tokens computed now, at positions ``start`` and on (>= 1)
    :ivar kv_ids: where its KV lies: the block table, or ``[slot]`` when contiguous
    """

    start: int
    num_new_tokens: int
    kv_ids: Sequence[int]

    @property
    def end(self) -> int:
        """Tokens in the cache after the step."""
        return self.start + self.num_new_tokens


class AttentionBackend(ABC):
    """Keys and values of every layer, and attention over them."""

    @abstractmethod
    def prepare(self, rows: Sequence[RowSpan]) -> AttentionStep:
        """Make what one step needs on the device; no row's storage is shared with another's new tokens.

        :param rows: prefill chunks and decodes in any order, at least one
        """

    @abstractmethod
    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV within every layer.

        :param copies: source, target and number of tokens: whole blocks, or the first tokens of contiguous slots. No
            target is touched by another of them
        """

    @abstractmethod
    def release(self, kv_ids: Iterable[int]) -> None:
        """Let go of storage that will not be read again."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held now."""
