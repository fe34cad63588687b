"""Combine the partial results of tensor-parallel ranks: of linear layers, experts, embeddings and logits.

Layers are column-parallel or row-parallel as in Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053), which multiplies
by the transposed weight: its columns are the outputs, its rows the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_sdk.kernels.step import StepContext
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import LOGITS, logits_message
from paged_sdk.quant.adapted import AdaptableLinear
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.experts import Experts, NativeExpertWeights
from paged_sdk.quant.linear import Linear, NativeWeights

__all__ = [
    "ColumnParallelExperts",
    "ColumnParallelLinear",
    "RowParallelExperts",
    "RowParallelLinear",
    "SharedEmbedding",
    "SharedHead",
    "widths_of",
]


def widths_of(parts: Sequence[slice]) -> Tensor:
    """Return each rank's number of columns or rows, int32."""
    return torch.tensor([own.stop - own.start for own in parts], dtype=torch.int32)


class ColumnParallelLinear(AdaptableLinear):
    """Gathers the input's columns, multiplies them by this rank's rows of the weight, and gathers the output's columns.

    No sum is divided among ranks, so results equal those of one process bit by bit. Otherwise, rounding activations to
    8 bits amplifies differences in the last bit: partial sums changed log-probabilities of Qwen2.5-Coder-1.5B in Q4_K_M
    by up to 0.2.

    :param base: multiplies by this rank's rows
    :ivar inputs: each rank's number of input columns, int32
    :ivar outputs: each rank's number of the weight's rows, int32
    """

    def __init__(
        self, base: Linear, name: str, group: Group, *, inputs: Sequence[slice], outputs: Sequence[slice]
    ) -> None:
        super().__init__(base, name)
        self._group = group
        self.inputs: Tensor = widths_of(inputs)
        self.outputs: Tensor = widths_of(outputs)

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the undivided layer, like :meth:`Linear.forward`.

        :param x: this rank's columns of the input
        """
        own = super().forward(self._group.join_columns(x, self.inputs), ctx)
        return self._group.join_columns(own, self.outputs)


class RowParallelLinear(AdaptableLinear):
    """Multiplies by this rank's columns of a weight, and sums the ranks' partial results.

    :param base: multiplies by this rank's columns; rank 0 adds the bias
    """

    def __init__(self, base: Linear, name: str, group: Group) -> None:
        super().__init__(base, name)
        self._group = group

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the undivided layer, like :meth:`Linear.forward`.

        :param x: this rank's columns of the input
        """
        return self._group.sum_(super().forward(x, ctx))


class _RankExperts(Experts):
    """Holds one rank's part of a layer's experts.

    :ivar base: computes this rank's part
    """

    def __init__(self, base: Experts, group: Group) -> None:
        self.base = base
        self._group = group

    @property
    def num_bytes(self) -> int:
        """Return the size of this rank's weights in bytes."""
        return self.base.num_bytes

    @property
    def native_weights(self) -> NativeExpertWeights | None:
        """Return this rank's weights in the form for native calls."""
        return self.base.native_weights


class ColumnParallelExperts(_RankExperts):
    """Computes this rank's neurons of every expert, gathers all neurons, and gathers the ranks' outputs.

    The down projections are column-parallel: as with :class:`ColumnParallelLinear`, no sum is divided among ranks.

    :param base: has this rank's rows of every matrix, and gathers the neurons itself
    :ivar inputs: each rank's number of neurons of an expert, int32
    :ivar outputs: each rank's number of outputs, int32
    """

    def __init__(self, base: Experts, group: Group, *, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__(base, group)
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Apply the undivided experts, like :meth:`Experts.forward`."""
        return self._group.join_columns(self.base.forward(x, topk_weights, topk_ids), self.outputs)


class RowParallelExperts(_RankExperts):
    """Computes this rank's neurons of every expert, and sums the ranks' partial results: the down projections are
    row-parallel.

    :param base: has this rank's neurons
    """

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Apply the undivided experts, like :meth:`Experts.forward`."""
        return self._group.sum_(self.base.forward(x, topk_weights, topk_ids))


class SharedEmbedding(Embedding):
    """Looks up embeddings of a vocabulary that is divided among ranks.

    :param base: has this rank's rows
    :param tokens: this rank's slice of the vocabulary
    :param dtype: see :class:`Embedding`
    """

    def __init__(self, base: Embedding, tokens: slice, group: Group, *, dtype: torch.dtype) -> None:
        super().__init__(dtype=dtype, scale=None)  # the base's rows are scaled
        self._base = base
        self._tokens = tokens
        self._group = group

    @property
    def scale(self) -> float:
        """Return the factor of the embeddings."""
        return self._base.scale

    def in_float32(self, token_ids: Tensor) -> Tensor:
        """Look up the embeddings as a model that is not divided does."""
        return self._of_all_ranks(self._base.in_float32, token_ids)

    def _rows(self, token_ids: Tensor) -> Tensor:
        return self._of_all_ranks(self._base.forward, token_ids)

    def _of_all_ranks(self, look_up: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        first, last = self._tokens.start, self._tokens.stop
        rows = look_up(token_ids.clamp(first, last - 1) - first)
        elsewhere = (token_ids < first) | (token_ids >= last)
        return self._group.sum_(rows.masked_fill_(elsewhere[:, None], 0))


class SharedHead(Linear):
    """Computes logits of a vocabulary that is divided among ranks.

    :param base: computes this rank's logits
    :param tokens: each rank's slice of the vocabulary
    """

    def __init__(self, base: Linear, tokens: Sequence[slice], group: Group) -> None:
        self._widths = [int(own.stop - own.start) for own in tokens]
        super().__init__(in_features=base.in_features, out_features=sum(self._widths), num_bytes=base.num_bytes)
        self._base = base
        self._group = group

    @property
    def native_weights(self) -> NativeWeights | None:
        """Return this rank's weights in the form for native calls."""
        return self._base.native_weights

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Compute the logits of all tokens on rank 0, which asks the other ranks for theirs; if ranks run in lockstep,
        all call this.
        """
        if self._group.is_on_devices:
            if not self._group.is_in_lockstep:
                self._group.send_message((LOGITS, len(x), str(x.dtype).removeprefix("torch.")))
                self._group.broadcast(x.contiguous())
            return self._group.gather(self._base.forward(x, ctx), self._widths)
        self._group.send_message(logits_message(x))
        own = self._base.forward(x, ctx)
        if (gathered := self._gathered(own)) is not None:
            return gathered
        parts = [own]
        for rank, width in enumerate(self._widths[1:], 1):
            parts.append(self._group.receive(own.new_empty(len(own), width), rank))
        return torch.cat(parts, -1)

    def help_on_device(self, num_rows: int, dtype: str, device: torch.device) -> None:
        """Compute this rank's logits of hidden states that rank 0 broadcasts, on a GPU."""
        x = torch.empty(num_rows, self.in_features, dtype=getattr(torch, dtype), device=device)
        self._group.broadcast(x)
        self._group.gather(self._base.forward(x, None), self._widths)

    def help(self, x: Tensor) -> None:
        """Compute this rank's logits and send them to rank 0, on the CPU."""
        own = self._base.forward(x, None)
        if self._group.shared is None or own.dtype is torch.float64:
            self._group.send(own, 0)
        else:
            self._gathered(own)

    def _gathered(self, own: Tensor) -> Tensor | None:
        """Gather all ranks' logits on rank 0 through shared memory, in float32, to which they are converted anyway;
        return None without shared memory, for float64, and on other ranks.
        """
        if self._group.shared is None or own.dtype is torch.float64:
            return None
        gathered = self._group.shared.gather(own.float(), self._widths)
        self._group.check_shared()
        return gathered
