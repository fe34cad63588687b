"""Changes the basis in which keys and values are stored, so that rounding them to few bits costs least.

A Hadamard transform along each head spreads outliers over all of its elements (QuaRot, Ashkboos et al., 2024, arXiv
2404.00456). Before it, each element of the keys is multiplied by a factor, and that of the queries divided by it, so
that errors fall where queries are small. Scores stay the same, up to rounding: the transform is orthonormal. It is also
its own inverse, so it turns attention's output over transformed values back.

In 4 bits, the transform lowers mean KL on SmolLM2 from 0.032 to 0.022, and the factors lower it to 0.020.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.hadamard import hadamard_transform

__all__ = ["KvBasis"]


@frozen(eq=False)
class KvBasis:
    """Describes the basis in which a layer's keys and values are stored.

    Elementwise operations do all the work, so the result for a token does not depend on the other tokens of a step.

    :ivar factors: ``[num_kv_heads, head_dim]`` float32, contiguous: multiply the elements of keys before the transform
    :raises ConfigError: shape, dtype or strides do not fit
    """

    factors: Tensor

    def __attrs_post_init__(self) -> None:
        check_tensor("factors", self.factors, ("num_kv_heads", "head_dim"), (torch.float32,), self.factors.device)
        if not self.factors.is_contiguous():
            raise ConfigError.of("factors.stride()", self.factors.stride(), "a contiguous tensor")

    def keys(self, key: Tensor) -> Tensor:
        """Return keys in this basis, in which key offsets are subtracted from them. Offsets are keys, too.

        :param key: ``[..., num_kv_heads, head_dim]``
        :returns: the same shape, in float32, or in the dtype of ``key`` if wider
        """
        return hadamard_transform(key * self.factors)

    def queries(self, query: Tensor) -> Tensor:
        """Return queries that have the same scores with keys in this basis, ``[num_tokens, num_heads, head_dim]``."""
        groups = torch.unflatten(query, 1, (len(self.factors), -1)) / self.factors[:, None]
        return hadamard_transform(groups.flatten(1, 2)).to(query.dtype)

    def values(self, value: Tensor) -> Tensor:
        """Return values in this basis; shapes and dtypes are as for :meth:`keys`."""
        return hadamard_transform(value.to(torch.promote_types(value.dtype, torch.float32)))

    def outputs(self, attended: Tensor) -> Tensor:
        """Return what attention over values in this basis gives, ``[num_tokens, num_heads, head_dim]``, in the heads'
        own basis.
        """
        return self.values(attended).to(attended.dtype)
