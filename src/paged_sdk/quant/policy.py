"""Decide in which form each matrix of a model is stored. No other module makes this decision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from itertools import accumulate
from re import Pattern

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.own_pages import own_pages
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.grouped_matrix import UnreadGroupedMatrix
from paged_sdk.kernels.quantized.reordered_matrix import ReorderedColumns
from paged_sdk.kernels.quantized.stored_matrix import DecodedMatrix, StoredMatrix
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.embedding import DenseEmbedding, Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts, Projections
from paged_sdk.quant.form import Form, Place, find_forms
from paged_sdk.quant.isq import blocks_for, blocks_of, can_be_quantized, for_head, quantize_stored
from paged_sdk.quant.linear import Linear, concatenated_biases
from paged_sdk.quant.reordered_input import ReorderedInputLinear
from paged_sdk.quant.side_by_side import SideBySideLinear

__all__ = ["DENSE", "ExpertStack", "NamedMatrix", "Role", "WeightPolicy"]


class Role(Enum):
    """Names the role of a matrix in a model."""

    LINEAR = "linear"
    HEAD = "head"
    EXPERTS = "experts"
    EMBEDDING = "embedding"


@frozen
class NamedMatrix:
    """Holds a stored matrix and its name in the checkpoint.

    :ivar name: Hugging Face's name, such as ``model.layers.0.mlp.down_proj.weight``
    :ivar index: the matrix's index if the tensor of this name stacks several: ``(expert,)``, ``(expert, 0)`` for a gate
        and ``(expert, 1)`` for up, or the number of a part made by :meth:`split`
    :ivar cut: text that identifies the rows and columns taken from that matrix; empty: all
    :ivar cols: the columns taken; None: all
    """

    name: str
    matrix: StoredMatrix
    index: tuple[int, ...] = ()
    cut: str = ""
    cols: slice | None = None

    def part(self, rows: slice | None, cols: slice | None) -> NamedMatrix:
        """Return some rows and columns of the matrix.

        :param rows: None: all
        :param cols: None: all
        :raises UnsupportedQuantizationError: if the columns cut a block of elements that share a scale
        """
        matrix = self.matrix if rows is None else self.matrix.rows(rows)
        matrix = matrix if cols is None else matrix.cols(cols)
        return NamedMatrix(self.name, matrix, self.index, f"{rows} {cols}", cols)

    def split(self, heights: Sequence[int]) -> list[NamedMatrix]:
        """Split the matrix into parts of the given numbers of rows. All parts keep the name."""
        ends = list(accumulate(heights))
        parts = [self.matrix.rows(slice(end - height, end)) for end, height in zip(ends, heights, strict=True)]
        return [evolve(self, matrix=part, index=(*self.index, number)) for number, part in enumerate(parts)]


@frozen(kw_only=True)
class ExpertStack:
    """Holds the matrices of all experts of a layer that share an input.

    :ivar matrices: per expert its matrices, in the order of their outputs
    :ivar whole: all matrices concatenated along the rows, if the checkpoint stores them as one tensor
    """

    matrices: Sequence[Sequence[NamedMatrix]]
    whole: StoredMatrix | None = None

    def projection(self, index: int) -> list[NamedMatrix]:
        """Return each expert's matrix with this index."""
        return [of_expert[index] for of_expert in self.matrices]


@frozen(kw_only=True)
class WeightPolicy:
    """Decides for each matrix whether it stays as stored, is quantized now, or is decoded; and which form serves it.

    :ivar keep_blocks: whether matrices that a checkpoint stores quantized stay so if a form can serve them; False: they
        are decoded
    :ivar decoded_on: devices on which ``keep_blocks`` does not apply
    :ivar workspace: the native kernels' workspace; None: no native kernels
    :ivar isq: the type to quantize every matrix to, however it is stored; embeddings and the output projection get a
        wider type
    :ivar isq_by_name: patterns with types: the first pattern found in a tensor's name overrides ``isq``; with None as
        its type the matrix is not quantized in situ
    :ivar importance: maps a matrix's name and index to the weights of its columns' squared errors, float32
        ``[columns]``; None: all 1. Types with grouped codes ignore it
    :ivar cached: given a key that identifies a matrix, and the matrix as it will be quantized in situ, returns the same
        matrix, whose rows may be read from the ISQ cache
    :ivar one_form: whether packed weights are multiplied the same way for any number of rows, so that results do not
        depend on the batch
    :ivar forms: the forms to choose from, by default :func:`~paged_sdk.quant.form.find_forms`; a matrix that no form
        serves is decoded and multiplied by torch
    :ivar memory: allocates the given number of bytes for packed weights
    """

    keep_blocks: bool = False
    decoded_on: Collection[torch.device] = ()
    workspace: Workspace | None = None
    isq: IsqType | None = None
    isq_by_name: Sequence[tuple[Pattern[str], IsqType | None]] = ()
    importance: Callable[[str, tuple[int, ...]], Tensor | None] | None = None
    cached: Callable[[str, BlockMatrix | UnreadGroupedMatrix], BlockMatrix | UnreadGroupedMatrix] | None = None
    one_form: bool = False
    forms: Sequence[Form] = field(factory=find_forms)
    memory: Callable[[int], Tensor] = own_pages

    def linear(
        self,
        matrices: Sequence[NamedMatrix],
        biases: Sequence[Tensor | None],
        role: Role,
        *,
        dtype: torch.dtype,
        device: torch.device,
        whole: StoredMatrix | None = None,
    ) -> Linear:
        """Make one linear layer from matrices that share an input.

        :param matrices: in the order of their outputs, at least one
        :param biases: one per matrix, in the model's dtype, or None where it has none
        :param dtype: the dtype of activations
        :param device: the device for the weights
        :param whole: the matrices concatenated along the rows, if the checkpoint stores them as one tensor
        """
        # An expert multiplies few rows, too. Their number depends on other tokens, and must not change results.
        place, is_head = self._place(dtype, device), role in (Role.HEAD, Role.EXPERTS)
        # Each matrix is stored as decided if one form serves all, or if a name pattern treats them differently.
        # Otherwise all are decoded.
        held = [self._held(each, role, place) for each in matrices]
        decoded = [DecodedMatrix(each.matrix) for each in matrices]
        return (
            self._linear(held, biases, place, is_head=is_head)
            or self._side_by_side(matrices, held, biases, place, is_head=is_head)
            or self._linear(decoded, biases, place, is_head=is_head)
            or DenseLinear(
                _merged(decoded if whole is None else [whole], place),
                concatenated_biases(biases, [matrix.shape[0] for matrix in decoded]),
            )
        )

    def experts(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        *,
        dtype: torch.dtype,
        device: torch.device,
        extras: ExpertExtras | None = None,
        join: ColumnJoin | None = None,
        activation: KernelActivation = "silu",
    ) -> Experts:
        """Make a layer's experts.

        :param gate_up: two matrices per expert, or up alone of experts without gates
        :param down: one matrix per expert
        :param extras: see :meth:`Form.experts`; ``join`` and ``activation`` likewise
        """
        place = self._place(dtype, device)
        is_gated = len(gate_up.matrices[0]) > 1
        named = Projections(gate_up.projection(0) if is_gated else None, gate_up.projection(-1), down.projection(0))
        held: Projections[Sequence[StoredMatrix]] = named.map(
            lambda matrices: [self._held(each, Role.EXPERTS, place) for each in matrices]
        )
        for form in self.forms:
            if (made := form.experts(held, place, extras=extras, join=join, activation=activation)) is not None:
                return made
        stacks = _decoded_stack(gate_up, place), _decoded_stack(down, place)
        return DenseExperts(*stacks, extras, join, activation=activation, is_gated=is_gated)

    def embedding(
        self, table: NamedMatrix, *, scale: float | None, dtype: torch.dtype, device: torch.device
    ) -> Embedding:
        """Make the token embeddings.

        :param scale: see :class:`~paged_sdk.quant.embedding.Embedding`
        """
        place = self._place(dtype, device)
        matrix = self._held(table, Role.EMBEDDING, place)
        for form in self.forms:
            if (embedding := form.embedding(matrix, place, scale=scale)) is not None:
                return embedding
        return DenseEmbedding(place.decoded(matrix), scale=scale)

    def tied_head(self, name: str, embedding: Embedding, *, dtype: torch.dtype, device: torch.device) -> Linear:
        """Make the output projection of a model with tied embeddings. Quantized embeddings are used as they are.

        :param name: the name that the projection would have in the checkpoint
        """
        place = self._place(dtype, device)
        for form in self.forms:
            if (head := form.tied_head(embedding, place)) is not None:
                return head
        table = embedding.stored
        assert table is not None, "a form without a stored table makes the tied head itself"
        if table.is_dense:
            return self.linear([NamedMatrix(name, table)], [None], Role.HEAD, dtype=dtype, device=device)
        head = self._linear([table], [None], place, is_head=True)
        assert head is not None, "what serves the embeddings as they are stored serves the head"
        return head

    def makes_quantized(self, is_stored_quantized: bool) -> bool:
        """Return whether the model will have quantized matrices.

        :param is_stored_quantized: whether the checkpoint stores quantized matrices
        """
        by_name = any(isq is not None for _, isq in self.isq_by_name)
        return self.isq is not None or by_name or (self.keep_blocks and is_stored_quantized)

    def is_quantized(self, named: NamedMatrix, role: Role) -> bool:
        """Return whether a matrix will be stored in fewer bits than the model's dtype."""
        return self.isq_of(named, role) is not None or (self.keep_blocks and not named.matrix.is_dense)

    def narrow(self, named: NamedMatrix, role: Role) -> tuple[IsqType, str] | None:
        """Return a matrix's ISQ type, and ggml's name of the fallback blocks that are used because its rows do not fit
        the type's own; None: no fallback is needed, or the matrix is not quantized in situ.
        """
        isq = self.isq_of(named, role)
        taken = None if isq is None else blocks_for(isq, named.matrix.shape[1])
        return None if isq is None or taken is None or taken == blocks_of(isq) else (isq, taken)

    def _held(self, named: NamedMatrix, role: Role, place: Place) -> StoredMatrix:
        """Return the matrix that is given to forms: as stored, quantized in situ, or to be decoded."""
        isq = self.isq_of(named, role)
        if isq is not None:
            library = None if self.workspace is None else self.workspace.library
            importance = None if self.importance is None else self.importance(named.name, named.index)
            if importance is not None and named.cols is not None:
                importance = importance[named.cols]
            # On all threads, although other layers are loaded concurrently: the output projection's many rows take
            # longest.
            threads = None if self.workspace is None else self.workspace.num_threads
            made = quantize_stored(named.matrix, isq, library, place.device, importance, num_threads=threads)
            if self.cached is None or place.device.type != "cpu":
                return made
            return self.cached(f"{named.name} {named.index} {isq.value} {named.cut}".rstrip(), made)
        if named.matrix.is_dense or (self.keep_blocks and place.device not in self.decoded_on):
            return named.matrix
        return DecodedMatrix(named.matrix)

    def isq_of(self, named: NamedMatrix, role: Role) -> IsqType | None:
        """Return the type that a matrix is quantized to in situ; None: not quantized, or its rows fit no format."""
        isq = for_head(self.isq) if self.isq is not None and role in (Role.HEAD, Role.EMBEDDING) else self.isq
        isq = next((chosen for pattern, chosen in self.isq_by_name if pattern.search(named.name)), isq)
        return isq if isq is not None and can_be_quantized(isq, named.matrix.shape[1]) else None

    def _linear(
        self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], place: Place, *, is_head: bool
    ) -> Linear | None:
        if len(matrices) == 1 and isinstance(matrices[0], ReorderedColumns):
            stored, order, width = matrices[0].stored, matrices[0].order, matrices[0].width
            base = self._linear([stored], biases, place, is_head=is_head)
            return None if base is None else ReorderedInputLinear(base, order.to(place.device), width)
        for form in self.forms:
            if (linear := form.linear(matrices, biases, place, is_head=is_head)) is not None:
                return linear
        return None

    def _side_by_side(
        self,
        matrices: Sequence[NamedMatrix],
        held: Sequence[StoredMatrix],
        biases: Sequence[Tensor | None],
        place: Place,
        *,
        is_head: bool,
    ) -> Linear | None:
        """Make a layer of several parts if a name pattern gives some of its matrices another format than others."""
        by_name = any(pattern.search(each.name) for pattern, _ in self.isq_by_name for each in matrices)
        if not by_name or len({type(matrix) for matrix in held}) < 2:
            return None
        parts = [
            self._linear([matrix], [bias], place, is_head=is_head) or DenseLinear(place.decoded(matrix), bias)
            for matrix, bias in zip(held, biases, strict=True)
        ]
        return SideBySideLinear(parts)

    def _place(self, dtype: torch.dtype, device: torch.device) -> Place:
        workspace = self.workspace if device.type == "cpu" else None
        return Place(device=device, dtype=dtype, workspace=workspace, one_form=self.one_form, memory=self.memory)


def _merged(matrices: Sequence[StoredMatrix], place: Place) -> Tensor:
    """Concatenate the values of matrices along the rows, decoding one matrix at a time."""
    first, *others = matrices
    values = place.decoded(first)
    if not others:
        return values
    merged = values.new_empty(sum(matrix.shape[0] for matrix in matrices), first.shape[1])
    merged[: len(values)] = values
    row = len(values)
    for matrix in others:
        values = place.decoded(matrix)
        merged[row : row + len(values)] = values
        row += len(values)
    return merged


def _decoded_stack(stack: ExpertStack, place: Place) -> Tensor:
    """Return the experts' values, ``[num_experts, rows of an expert, columns]``."""
    merged = (
        _merged([each.matrix for of_expert in stack.matrices for each in of_expert], place)
        if stack.whole is None
        else place.decoded(stack.whole)
    )
    return merged.view(len(stack.matrices), -1, merged.shape[1])


DENSE = WeightPolicy()
"""Holds every matrix in the model's dtype."""
