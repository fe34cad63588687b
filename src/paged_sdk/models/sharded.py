"""Join what several ranks compute: sums of linear layers and experts, rows of embeddings, logits."""

from __future__ import annotations

from collections.abc import Sequence

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
    "JoinedExperts",
    "JoinedLinear",
    "SharedEmbedding",
    "SharedHead",
    "SummedExperts",
    "SummedLinear",
    "widths_of",
]


def widths_of(parts: Sequence[slice]) -> Tensor:
    """Return how many columns or rows every rank has, int32."""
    return torch.tensor([own.stop - own.start for own in parts], dtype=torch.int32)


class JoinedLinear(AdaptableLinear):
    """Multiplies by some rows of a weight what all ranks have columns of, and puts together what all ranks get.

    No sum is parted, so that the results are those of one process to the last bit. Rounding to 8 bits makes more of a
    last bit than its size: sums of parts changed log-probabilities of Qwen2.5-Coder-1.5B's in Q4_K_M by up to 0.2.

    :param base: multiplies by this rank's rows
    :ivar inputs: how many columns of the input each rank has, int32
    :ivar outputs: how many of the weight's rows
    """

    def __init__(
        self, base: Linear, name: str, group: Group, *, inputs: Sequence[slice], outputs: Sequence[slice]
    ) -> None:
        super().__init__(base, name)
        self._group = group
        self.inputs: Tensor = widths_of(inputs)
        self.outputs: Tensor = widths_of(outputs)

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Do what :meth:`Linear.forward` says, of the whole weight.

        :param x: this rank's columns
        """
        own = super().forward(self._group.join_columns(x, self.inputs), ctx)
        return self._group.join_columns(own, self.outputs)


class SummedLinear(AdaptableLinear):
    """Multiplies by some columns of a weight, and adds up what all ranks have.

    :param base: multiplies by this rank's columns; one rank's adds the bias
    """

    def __init__(self, base: Linear, name: str, group: Group) -> None:
        super().__init__(base, name)
        self._group = group

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Do what :meth:`Linear.forward` says, of the whole weight.

        :param x: this rank's columns
        """
        return self._group.sum_(super().forward(x, ctx))


class _RankExperts(Experts):
    """Holds what one rank has of a layer's experts.

    :ivar base: computes this rank's part
    """

    def __init__(self, base: Experts, group: Group) -> None:
        self.base = base
        self._group = group

    @property
    def num_bytes(self) -> int:
        """Return how many bytes this rank's weights take."""
        return self.base.num_bytes

    @property
    def native_weights(self) -> NativeExpertWeights | None:
        """Return this rank's weights as a native call multiplies them."""
        return self.base.native_weights


class JoinedExperts(_RankExperts):
    """Computes some neurons of every expert, then some outputs of all neurons, and puts together what all ranks get.

    As with :class:`JoinedLinear`, no sum is parted.

    :param base: has this rank's rows of every matrix, and joins neurons by itself
    :ivar inputs: how many neurons of each expert every rank has, int32
    :ivar outputs: how many of the outputs, likewise
    """

    def __init__(self, base: Experts, group: Group, *, inputs: Tensor, outputs: Tensor) -> None:
        super().__init__(base, group)
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Do what :meth:`Experts.forward` says, of all neurons and outputs."""
        return self._group.join_columns(self.base.forward(x, topk_weights, topk_ids), self.outputs)


class SummedExperts(_RankExperts):
    """Computes some neurons of every expert, and adds up what all ranks have.

    :param base: has this rank's neurons
    """

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Do what :meth:`Experts.forward` says, of all neurons."""
        return self._group.sum_(self.base.forward(x, topk_weights, topk_ids))


class SharedEmbedding(Embedding):
    """Looks up tokens of which each rank has some.

    :param base: has this rank's rows
    :param tokens: which they are
    :param dtype: see :class:`Embedding`
    """

    def __init__(self, base: Embedding, tokens: slice, group: Group, *, dtype: torch.dtype) -> None:
        super().__init__(dtype=dtype, scale=None)  # the base's rows are scaled
        self._base = base
        self._tokens = tokens
        self._group = group

    @property
    def scale(self) -> float:
        """Return what the rows are multiplied by."""
        return self._base.scale

    def _rows(self, token_ids: Tensor) -> Tensor:
        first, last = self._tokens.start, self._tokens.stop
        rows = self._base.forward(token_ids.clamp(first, last - 1) - first)
        elsewhere = (token_ids < first) | (token_ids >= last)
        return self._group.sum_(rows.masked_fill_(elsewhere[:, None], 0))


class SharedHead(Linear):
    """Computes logits on the first rank, of tokens of which each rank has some.

    :param base: computes this rank's
    :param tokens: which tokens each of the ranks has
    """

    def __init__(self, base: Linear, tokens: Sequence[slice], group: Group) -> None:
        self._widths = [int(own.stop - own.start) for own in tokens]
        super().__init__(in_features=base.in_features, out_features=sum(self._widths), num_bytes=base.num_bytes)
        self._base = base
        self._group = group

    @property
    def native_weights(self) -> NativeWeights | None:
        """Return this rank's weights as a native call multiplies them."""
        return self._base.native_weights

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Do what :meth:`Linear.forward` says, on the first rank, which has the others help; on all, if they run the
        same code.
        """
        if self._group.is_on_devices:
            if not self._group.is_in_lockstep:
                self._group.tell((LOGITS, len(x), str(x.dtype).removeprefix("torch.")))
                self._group.pass_on(x.contiguous())
            return self._group.gather(self._base.forward(x, ctx), self._widths)
        self._group.tell(logits_message(x))
        own = self._base.forward(x, ctx)
        if (gathered := self._gathered(own)) is not None:
            return gathered
        parts = [own]
        for rank, width in enumerate(self._widths[1:], 1):
            parts.append(self._group.receive(own.new_empty(len(own), width), rank))
        return torch.cat(parts, -1)

    def help_on_device(self, num_rows: int, dtype: str, device: torch.device) -> None:
        """Compute this rank's logits of hidden states that the first rank passes on."""
        x = torch.empty(num_rows, self.in_features, dtype=getattr(torch, dtype), device=device)
        self._group.pass_on(x)
        self._group.gather(self._base.forward(x, None), self._widths)

    def help(self, x: Tensor) -> None:
        """Compute this rank's logits and send them to the first rank."""
        own = self._base.forward(x, None)
        if self._group.shared is None or own.dtype is torch.float64:
            self._group.send(own, 0)
        else:
            self._gathered(own)

    def _gathered(self, own: Tensor) -> Tensor | None:
        """Return all ranks' logits where they come through shared memory, on the first rank: in float32, which they
        become anyway.
        """
        if self._group.shared is None or own.dtype is torch.float64:
            return None
        gathered = self._group.shared.gather(own.float(), self._widths)
        self._group.check_shared()
        return gathered
