"""What the models ask of attention, whatever keeps the keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.rotary import Rotation

__all__ = ["AttentionBackend", "AttentionStep", "RowSpan"]


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


class AttentionStep(ABC):
    """Attention of all layers in one step: the indices are made once, each layer uses them."""

    @abstractmethod
    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the new keys and values to the cache, then attend.

        :param query: ``[num_tokens, num_heads, head_dim]``, the tokens of all rows in the order of the rows
        :param key: ``[num_tokens, num_kv_heads, head_dim]``, position already applied; ``value`` likewise
        :returns: ``[num_tokens, num_heads, head_dim]``, contiguous
        """

    def rotate_and_forward(self, layer: int, query_key: Tensor, value: Tensor, rotation: Rotation) -> Tensor:
        """:meth:`forward` of queries and keys to which their positions are yet to be applied.

        :param query_key: ``[num_tokens, num_heads + num_kv_heads, head_dim]``, changed in place
        :param rotation: of the tokens' positions
        """
        rotation.rotate_(query_key)
        num_heads = query_key.shape[1] - value.shape[1]
        return self.forward(layer, query_key[:, :num_heads], query_key[:, num_heads:], value)


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
