"""Adds learned numbers to attention scores that depend on how far a key is from its query."""

from __future__ import annotations

from attrs import evolve, frozen
from torch import Tensor

__all__ = ["RelativeBias"]


@frozen(eq=False)
class RelativeBias:
    """Holds numbers by bucket of distances: one per head (T5: Raffel et al., 2019, arXiv 1910.10683), and one per head
    and query or key (disentangled attention: He et al., 2020, arXiv 2006.03654). All are added to the scores, which are
    scaled and capped already.

    :ivar buckets: ``[2 * reach + 1]`` int64: the bucket of each distance, key position minus query position, from
        ``-reach`` to ``reach``. Longer distances have the bucket of the longest one in their direction
    :ivar of_buckets: ``[num_heads, num_buckets]`` float32; None: zeros
    :ivar of_queries: ``[num_tokens, num_heads, num_buckets]``, of the tokens whose queries attend; None: zeros
    :ivar of_keys: likewise, of the tokens whose keys they see, which must be the same
    """

    buckets: Tensor
    of_buckets: Tensor | None = None
    of_queries: Tensor | None = None
    of_keys: Tensor | None = None

    def of_tokens(self, first: int, last: int) -> RelativeBias:
        """Return the numbers of some of the tokens, ``first`` to ``last`` (exclusive)."""
        queries, keys = (None if each is None else each[first:last] for each in (self.of_queries, self.of_keys))
        return evolve(self, of_queries=queries, of_keys=keys)

    def between(self, queries: Tensor, keys: Tensor, start: int) -> Tensor:
        """Return what is added to scores, ``[num_heads, num_queries, num_keys]`` float32.

        :param queries: ``[num_queries]`` int64: positions
        :param keys: ``[num_keys]`` int64: positions
        :param start: the position of the first of the tokens
        """
        reach = len(self.buckets) // 2
        buckets = self.buckets[(keys - queries[:, None]).clamp_(-reach, reach) + reach]
        found = [] if self.of_buckets is None else [self.of_buckets[:, buckets]]
        if self.of_queries is not None:
            found.append(_taken(self.of_queries[queries - start], buckets))
        if self.of_keys is not None:
            found.append(_taken(self.of_keys[keys - start], buckets.T).mT)
        total = found[0]
        for each in found[1:]:
            total = total + each
        return total


def _taken(rows: Tensor, buckets: Tensor) -> Tensor:
    """Return the rows' numbers of these buckets, ``[num_heads, num_rows, n]`` float32.

    :param rows: ``[num_rows, num_heads, num_buckets]``
    :param buckets: ``[num_rows, n]``
    """
    return rows.transpose(0, 1).gather(2, buckets.expand(rows.shape[1], -1, -1)).float()
