"""Multiply weights in the native kernels' layout, at the file's own bits per weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PackedWeight, decode_rows
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import DecodedRows, Linear, NativeWeights, decoded_matrices
from paged_sdk.quant.native_embedding import NativeEmbedding

__all__ = ["FEW_ROWS", "NativeBlockLinear", "PackedBlockEmbedding"]

FEW_ROWS = 20
"""Packed weights are multiplied directly for the generated tokens of up to this many sequences. For more, int8 codes of
the weights are made first, which takes as long as multiplying 14 rows. With 12 instead of 20, 16 sequences of SmolLM2
ran at 0.86 of the speed (AMD Zen 4)."""


class NativeBlockLinear(Linear):
    """Multiplies packed matrices that share an input, and concatenates their outputs.

    :param workspace: the calling engine's workspace
    :param weights: the packed matrices, in the order of their outputs
    :param biases: one per weight, or None
    :param hadamard_for_many: whether many rows are multiplied by codes of the weights' Hadamard transform, which is
        faster for more than ``few_rows`` rows. In a step, this applies to prompt tokens, and to generated tokens if
        more than ``few_rows`` sequences generate; without a step, the number of rows decides
    :param few_rows: see ``hadamard_for_many``
    """

    def __init__(
        self,
        workspace: Workspace,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor | None],
        *,
        hadamard_for_many: bool = False,
        few_rows: int = FEW_ROWS,
    ) -> None:
        few = tuple(weights)
        many = tuple(weight.hadamard_form() for weight in few) if hadamard_for_many else few
        self._library = workspace.library
        self._native = NativeWeights(few=few, many=many, biases=tuple(biases))
        self._few_rows = few_rows
        self._few = NativeLinear(workspace, few, biases=biases)
        self._many = NativeLinear(workspace, many, biases=biases) if hadamard_for_many else self._few
        # Both forms share one copy of the weights.
        super().__init__(
            in_features=self._few.in_features, out_features=self._few.out_features, num_bytes=self._few.num_bytes
        )

    @property
    def native_weights(self) -> NativeWeights:
        """Implement :attr:`Linear.native_weights`."""
        return self._native

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`, in float32, bfloat16 or float16."""
        if self._many is self._few:
            return self._few(x)
        rows = None if ctx is None else ctx.attention.native_rows
        if rows is None:
            return self._few(x) if len(x) <= self._few_rows else self._many(x)
        if not rows.use_few(self._few_rows):
            return self._many(x)
        if rows.batch.in_chunks is None:
            return self._few(x)
        out, prompts = x.new_empty(len(x), self.out_features), rows.of_prompts()
        out[prompts], out[~prompts] = self._many(x[prompts]), self._few(x[~prompts])
        return out

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Implement :meth:`Linear.decoded`: yield the values of the blocks."""
        return decoded_matrices(self._native, partial(decode_rows, self._library, num_threads=1))


class PackedBlockEmbedding(NativeEmbedding):
    """Looks up rows packed from blocks. A tied output projection multiplies by the same memory."""
