"""Normalizes rows in one native call: torch's norm takes ten operations, each of which delays a small model's step."""

from __future__ import annotations

from ctypes import byref
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import check_matrix, float_vector, pointer
from paged_sdk.kernels.native.structures import Norm

__all__ = ["NORMS", "NativeNorm"]

NORMS: Final = MappingProxyType({"rms": 0, "layer": 1})
"""Maps the kind of a norm to its number in the C interface."""

_WIDTH: Final = 16  # columns read at a time


class NativeNorm:
    """Computes an RMSNorm or a layer norm of float32 rows.

    :param workspace: sets the number of threads
    :param weight: ``[hidden_size]``, a multiple of 16
    :param bias: likewise, of a layer norm; None: no bias
    :param eps: added to the mean square or the variance
    :raises ConfigError: the sizes do not fit
    """

    def __init__(
        self,
        workspace: Workspace,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        eps: float,
        kind: Literal["rms", "layer"],
    ) -> None:
        size = len(weight)
        if size % _WIDTH:
            raise ConfigError.of("weight", f"{size} numbers", f"a multiple of {_WIDTH}")
        if bias is not None and kind == "rms":
            raise ConfigError.of("bias", "of an RMSNorm", "none")
        self._size = size
        self._workspace = workspace
        self._weight, self._bias = float_vector("weight", weight, size), float_vector("bias", bias, size)
        self._args = Norm(
            weight=pointer(self._weight),
            bias=pointer(self._bias),
            norm=NORMS[kind],
            eps=eps,
            cols=size,
            num_threads=workspace.num_threads,
        )
        self._reference = byref(self._args)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize into a new tensor. A row with NaN or Inf has NaN in its result, and affects no other row.

        :param x: float32 ``[num_rows, hidden_size]``
        :raises ConfigError: shape or dtype do not fit
        """
        x = x.contiguous()
        check_matrix("x", x, (len(x), self._size), (torch.float32,))
        out, args, library = torch.empty_like(x), self._args, self._workspace.library
        args.x, args.out, args.rows = x.data_ptr(), out.data_ptr(), len(x)
        library.functions.paged_norm(library.level, self._reference)
        return out
