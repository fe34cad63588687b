"""Add low-rank updates to the outputs of linear layers, with an adapter per row (LoRA, Hu et al., 2021, arXiv
2106.09685).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.kernels.placement import moved_to
from paged_sdk.kernels.transfer import to_device

__all__ = ["AdaptedRows", "Lora", "LoraPart", "LoraWeights", "add_embeddings_", "add_lora_"]


@frozen(eq=False)
class LoraPart:
    """Holds the update of one matrix of a linear layer, which may fuse several (such as query, key and value).

    :ivar rows: the layer's output columns that belong to the matrix
    :ivar ranks: the rows of :attr:`LoraWeights.down` that belong to the matrix
    :ivar up: ``[rank, rows]``: LoRA's B, transposed and scaled
    :ivar gains: ``[2, rows]`` float32: a factor and a term that are applied to these outputs before the update is added
        (DoRA; Liu et al., 2024, arXiv 2402.09353); None: outputs are not changed first
    """

    rows: slice
    ranks: slice
    up: Tensor
    gains: Tensor | None = None


@frozen(eq=False)
class LoraWeights:
    """Holds an adapter's update of one linear layer.

    :ivar down: ``[ranks of all parts, in_features]``: LoRA's A of all parts, concatenated
    """

    down: Tensor
    parts: tuple[LoraPart, ...]


@frozen(eq=False)
class Lora:
    """Holds an adapter's weights in the forms that a model computes with.

    :ivar by_layer: the updates by linear layer name, for layers that run one operation at a time
    :ivar native: the updates in the native decoder's form, by the span of layers that it fuses
    :ivar head: the update of the output projection, or None
    :ivar whole: tensors that replace those of the ranking layers, by name
    :ivar embedding: the update of the token embeddings, or None; its ``down`` has one column per vocabulary entry
    """

    by_layer: Mapping[str, LoraWeights]
    native: Mapping[range, object] = field(factory=dict)
    head: LoraWeights | None = None
    embedding: LoraWeights | None = None
    whole: Mapping[str, Tensor] = field(factory=dict)


@frozen(eq=False)
class AdaptedRows:
    """Maps the tokens of a step to their adapters.

    :ivar loras: the step's distinct adapters
    :ivar numbers: ``[num_tokens]`` int32 in CPU memory: each token's index into ``loras``; -1: no adapter
    :ivar tokens: for each adapter the indices of its tokens, int64 on the model's device
    """

    loras: tuple[Lora, ...]
    numbers: Tensor
    tokens: tuple[Tensor, ...]

    def on(self, device: torch.device) -> AdaptedRows:
        """Return the same, with ``tokens`` on the given device."""
        return AdaptedRows(self.loras, self.numbers, tuple(moved_to(tokens, device) for tokens in self.tokens))

    @classmethod
    def of(
        cls, loras: Sequence[Lora | None], lengths: Sequence[int], before: Sequence[int], device: torch.device
    ) -> AdaptedRows | None:
        """Collect the adapters of a step's rows; return None if no row has one.

        :param loras: the adapter of each row
        :param lengths: the number of tokens of each row
        :param before: the number of leading tokens of each row that use no adapter
        """
        found = {id(lora): lora for lora in loras if lora is not None}
        if not found:
            return None
        places = {key: place for place, key in enumerate(found)}
        of_row = [places.get(id(lora), -1) for lora in loras]
        parts = [[-1, number] for number in of_row]
        counts = [[first, length - first] for length, first in zip(lengths, before, strict=True)]
        numbers = torch.tensor(parts, dtype=torch.int32).flatten().repeat_interleave(torch.tensor(counts).flatten())
        return cls(tuple(found.values()), numbers, _places(numbers, len(found), device))

    def of_logits(self, tokens: Sequence[int]) -> AdaptedRows | None:
        """Return the same for the tokens whose logits are computed, or None if no adapter updates the output
        projection.
        """
        if all(lora.head is None for lora in self.loras):
            return None
        numbers = self.numbers[list(tokens)]
        return AdaptedRows(self.loras, numbers, _places(numbers, len(self.loras), self.tokens[0].device))


def _places(numbers: Tensor, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of each adapter's tokens, by one sort: for eight adapters 15 us, eight searches took 41."""
    sizes = torch.bincount(numbers + 1, minlength=count + 1).tolist()
    (order,) = to_device(device, numbers.argsort(stable=True).numpy())
    return torch.split(order, sizes)[1:]


def add_lora_(out: Tensor, x: Tensor, weights: LoraWeights, tokens: Tensor) -> None:
    """Add ``up . (down . x)`` to the given rows of a linear layer's outputs.

    :param out: ``[num_tokens, out_features]``; changed in place
    :param x: ``[num_tokens, in_features]``
    :param tokens: the indices of the rows, int64
    """
    shrunk = x.index_select(0, tokens).to(weights.down.dtype) @ weights.down.T
    for part in weights.parts:
        update = shrunk[:, part.ranks] @ part.up
        if part.gains is None:
            out[:, part.rows].index_add_(0, tokens, update.to(out.dtype))
            continue
        factors, terms = part.gains
        scaled = torch.addcmul(terms, out[tokens, part.rows].float(), factors)
        out[tokens, part.rows] = (scaled + update).to(out.dtype)


def add_embeddings_(out: Tensor, token_ids: Tensor, weights: LoraWeights, tokens: Tensor, scale: float) -> None:
    """Add an adapter's updates to the embeddings of the given tokens.

    :param out: ``[num_tokens, hidden_size]``; changed in place
    :param token_ids: ``[num_tokens]`` int64
    :param tokens: the indices of the tokens, int64
    :param scale: the model's multiplier of embeddings
    """
    (part,) = weights.parts
    shrunk = weights.down.index_select(1, token_ids.index_select(0, tokens)).T
    out.index_add_(0, tokens, (shrunk @ part.up * scale).to(out.dtype))
