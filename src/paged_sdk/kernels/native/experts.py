"""Computes a layer's mixture of experts on packed weights in one native call.

The arithmetic is that of :mod:`paged_sdk.kernels.native.linear`, and a token's experts are summed in the order of their
numbers. So a token's result does not depend on other tokens, the number of threads, or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.checks import check_tensor
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import check_matrix, describe, float_vector, pointer
from paged_sdk.kernels.native.packed import PackedWeight
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.native.structures import ACTIVATIONS, DTYPES, Experts

__all__ = ["NativeExperts", "check_experts"]

_GROUP = 32
_NO_SUCH_EXPERT = 3


def check_experts(
    gate: PackedWeight | None,
    up: PackedWeight,
    down: PackedWeight,
    *,
    num_experts: int,
    widths: Tensor | None = None,
) -> None:
    """Check that the concatenated gate, up and down matrices of experts fit each other.

    :param gate: None: the experts have no gates
    :param widths: with tensor parallelism, the number of neurons per expert of each rank; None: one rank
    :raises ConfigError: shapes do not fit, a weight is for many rows or has reordered columns, or some are dense and
        others not
    """
    hidden, inner = up.cols, down.cols
    own_hidden, own_inner = hidden, inner
    if widths is not None:
        own_hidden, own_inner = (weight.rows // num_experts for weight in (down, up))
        if own_inner not in widths.tolist() or int(widths.sum()) != inner:
            raise ConfigError.of("widths", widths.tolist(), f"parts of {inner}, {own_inner} among them")
        if own_hidden > hidden:
            raise ConfigError.of("down", f"{own_hidden} rows of an expert", f"at most {hidden}")
    gates = [] if gate is None else [("gate", gate, own_inner, hidden)]
    for name, weight, rows, cols in (*gates, ("up", up, own_inner, hidden), ("down", down, own_hidden, inner)):
        if (weight.rows, weight.cols) != (num_experts * rows, cols) or rows % _GROUP:
            due = f"{num_experts} times {rows} rows, a multiple of {_GROUP}, of {cols} columns"
            raise ConfigError.of(name, f"{weight.rows} x {weight.cols}", due)
        if weight.in_hadamard:
            raise ConfigError.of(name, "weights for many rows", "weights that are multiplied as they are")
        if weight.order is not None:
            raise ConfigError.of(name, "columns in an order of their own", "columns in the order of the input")
        if weight.dense_dtype != up.dense_dtype:
            raise ConfigError.of(name, weight.format, f"a weight in the form of up's, {up.format}")


class NativeExperts:
    """Computes experts; each projection holds the packed matrices of all experts, concatenated by rows.

    :param workspace: scratch memory of the calling engine; used by one call at a time
    :param gate: ``[num_experts * inner, hidden]``, inner a multiple of 32; None: experts have no gates, and ``up`` is
        activated
    :param up: likewise
    :param down: ``[num_experts * hidden, inner]``
    :param join: with tensor parallelism, gathers the input of ``down`` from all ranks. ``gate`` and ``up`` then hold
        this rank's neurons of every expert, and ``down`` this rank's rows and all columns. None: one rank
    :param activation: of the gates, or without gates of up; unless :meth:`extend` is called
    :raises ConfigError: shapes do not fit, a weight is for many rows, or they are not all in blocks or all dense
    """

    def __init__(
        self,
        workspace: Workspace,
        gate: PackedWeight | None,
        up: PackedWeight,
        down: PackedWeight,
        *,
        num_experts: int,
        join: ColumnJoin | None = None,
        activation: KernelActivation = "silu",
    ) -> None:
        check_experts(gate, up, down, num_experts=num_experts, widths=None if join is None else join.widths)
        self.hidden_size: int = up.cols
        self.num_outputs: int = down.rows // num_experts
        self.num_experts: int = num_experts
        self._workspace = workspace
        self._kept: list[Tensor | None] = []  # biases that the C structure points to
        self._weights = {**({} if gate is None else {"gate": gate}), "up": up, "down": down}
        self._join = join
        self._args = Experts(workspace=workspace.handle, num_threads=workspace.num_threads, num_experts=num_experts)
        self._args.activation = ACTIVATIONS[activation]
        if join is not None:
            self._args.gather, self._args.group = join.shared.gather_address, join.shared.handle
            self._args.inner_widths = pointer(join.widths)
        for name, weight in self._weights.items():
            describe(getattr(self._args, name), weight, None)

    def extend(self, biases: Sequence[Tensor], *, alpha: float, limit: float) -> None:
        """Set biases of experts with gates, and switch to ``(up + 1) * gate * sigmoid(alpha * gate)`` with clamped gate
        and up (gpt-oss).

        :param biases: of gate, up and down, ``[num_experts, rows of an expert]``
        :param limit: the largest gate, and the largest magnitude of up
        :raises ConfigError: the size of a bias differs from its matrices' rows
        """
        for (name, weight), bias in zip(self._weights.items(), biases, strict=True):
            vector = float_vector(f"{name}.bias", bias.flatten(), weight.rows)
            self._kept.append(vector)
            describe(getattr(self._args, name), weight, vector)
        self._args.swiglu_alpha, self._args.swiglu_limit = alpha, limit

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all experts."""
        return sum(weight.num_bytes for weight in self._weights.values())

    def __call__(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Compute the sum of ``weight * down @ (activation(gate @ x) * (up @ x))`` over each token's experts; without
        gates, that of ``weight * down @ activation(up @ x)``.

        :param x: ``[num_tokens, hidden]`` float32, bfloat16 or float16; rows contiguous
        :param topk_weights: ``[num_tokens, num_selected]`` float32
        :param topk_ids: likewise, int64
        :returns: ``[num_tokens, num_outputs]`` of the dtype of ``x``, where ``num_outputs`` is the rows per expert of
            ``down``; a row with NaN or Inf gives NaN, and affects no other row
        :raises ConfigError: shapes, dtypes or strides do not fit, or an expert does not exist
        """
        check_matrix("x", x, (len(x), self.hidden_size))
        check_tensor("topk_ids", topk_ids, (len(x), "num_selected"), (torch.int64,), x.device)
        check_tensor("topk_weights", topk_weights, tuple(topk_ids.shape), (torch.float32,), x.device)
        topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
        out = torch.empty(len(x), self.num_outputs, dtype=x.dtype)
        args = self._args
        args.x, args.x_stride, args.dtype = x.data_ptr(), x.stride(0), DTYPES[x.dtype]
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.topk_weights, args.topk_ids = topk_weights.data_ptr(), topk_ids.data_ptr()
        args.num_tokens, args.num_selected = topk_ids.shape
        library = self._workspace.library
        match library.functions.paged_experts(library.level, byref(args)):
            case 0:
                return out
            case code if code == _NO_SUCH_EXPERT:
                raise ConfigError.of("topk_ids", topk_ids.tolist(), f"experts 0 to {self.num_experts - 1}")
            case _:
                raise MemoryError("no memory for the scratch of native experts")
