"""Adds learned numbers to attention scores that depend on how far a key is from its query."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

__all__ = ["RelativeBias"]


@frozen(eq=False)
class RelativeBias:
    """Holds one number per head and bucket of distances (T5: Raffel et al., 2019, arXiv 1910.10683).

    :ivar buckets: ``[2 * reach + 1]`` int64: the bucket of each distance, key position minus query position, from
        ``-reach`` to ``reach``. Longer distances have the bucket of the longest one in their direction
    :ivar of_buckets: ``[num_heads, num_buckets]`` float32: added to the scores, which are scaled and capped already
    """

    buckets: Tensor
    of_buckets: Tensor

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return what is added to scores, ``[num_heads, num_queries, num_keys]`` float32.

        :param queries: ``[num_queries]`` int64: positions
        :param keys: ``[num_keys]`` int64: positions
        """
        reach = len(self.buckets) // 2
        distances = (keys - queries[:, None]).clamp_(-reach, reach)
        return self.of_buckets[:, self.buckets[distances + reach]]
