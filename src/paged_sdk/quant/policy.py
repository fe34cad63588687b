"""Decide which form each matrix of a model takes; nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from itertools import accumulate
from re import Pattern

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.own_pages import own_pages
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.grouped_matrix import UnreadGroupedMatrix
from paged_sdk.kernels.quantized.stored_matrix import DecodedMatrix, StoredMatrix
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.embedding import DenseEmbedding, Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts
from paged_sdk.quant.form import Form, Place, find_forms
from paged_sdk.quant.isq import blocks_for, blocks_of, can_be_quantized, for_head, quantize_stored
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.side_by_side import SideBySideLinear

__all__ = ["DENSE", "ExpertStack", "NamedMatrix", "Role", "WeightPolicy"]


class Role(Enum):
    """Says what a matrix is for."""

    LINEAR = "linear"
    HEAD = "head"
    EXPERTS = "experts"
    EMBEDDING = "embedding"


@frozen
class NamedMatrix:
    """Holds a stored matrix and the name that the checkpoint gives it.

    :ivar name: Hugging Face's name, such as ``model.layers.0.mlp.down_proj.weight``
    :ivar index: the matrix's place where the tensor of this name is a stack of several: ``(expert,)``, ``(expert, 0)``
        for a gate and ``(expert, 1)`` for up, or the number of its part
    :ivar cut: which rows and columns of that matrix it is, as a text; empty: all
    :ivar cols: which columns; None: all
    """

    name: str
    matrix: StoredMatrix
    index: tuple[int, ...] = ()
    cut: str = ""
    cols: slice | None = None

    def part(self, rows: slice | None, cols: slice | None) -> NamedMatrix:
        """Return some of its rows, all of them if None, and of these some columns, likewise.

        :raises UnsupportedQuantizationError: the columns cut a block of elements that share a scale
        """
        matrix = self.matrix if rows is None else self.matrix.rows(rows)
        matrix = matrix if cols is None else matrix.cols(cols)
        return NamedMatrix(self.name, matrix, self.index, f"{rows} {cols}", cols)

    def split(self, heights: Sequence[int]) -> list[NamedMatrix]:
        """Split it into parts of the given numbers of rows, all under the one name."""
        ends = list(accumulate(heights))
        parts = [self.matrix.rows(slice(end - height, end)) for end, height in zip(ends, heights, strict=True)]
        return [NamedMatrix(self.name, part, (*self.index, number)) for number, part in enumerate(parts)]


@frozen(kw_only=True)
class ExpertStack:
    """Holds the matrices of all experts of a layer that share an input.

    :ivar matrices: for each expert its matrices, in the order of their outputs
    :ivar whole: all of them one below the other, where the checkpoint has them as one tensor
    """

    matrices: Sequence[Sequence[NamedMatrix]]
    whole: StoredMatrix | None = None

    def projection(self, index: int) -> list[NamedMatrix]:
        """Return one matrix of each expert."""
        return [of_expert[index] for of_expert in self.matrices]


@frozen(kw_only=True)
class WeightPolicy:
    """Decides how each matrix is held: as it is stored, quantized now, or decoded; and in which form.

    :ivar keep_blocks: True: matrices that a checkpoint stores quantized stay so where a form can serve them; False:
        every matrix is decoded
    :ivar decoded_on: devices on which every matrix is decoded all the same
    :ivar workspace: the native kernels' workspace; None: they are absent
    :ivar isq: the type to quantize every matrix to, whatever it is stored as; embeddings and the output projection take
        a wider one
    :ivar isq_by_name: patterns with types: the first that is found in a tensor's name decides instead of ``isq``; with
        None as its type the matrix is not quantized in situ
    :ivar importance: returns how much an error in each column of a matrix of some name and index counts, float32
        ``[columns]``; None: all alike. Types of groups have no use for it
    :ivar kept: given what tells a matrix apart and the matrix as it is quantized in situ, returns the same matrix,
        whose rows may come from elsewhere
    :ivar one_form: True: packed weights are multiplied in one way whatever the number of rows, which makes a text
        independent of its batch
    :ivar forms: the forms to choose from, those of :func:`~paged_sdk.quant.form.find_forms` by default; a matrix that
        none of them serves is decoded and multiplied by torch
    :ivar memory: returns so many bytes for weights that are packed
    """

    keep_blocks: bool = False
    decoded_on: Collection[torch.device] = ()
    workspace: Workspace | None = None
    isq: IsqType | None = None
    isq_by_name: Sequence[tuple[Pattern[str], IsqType | None]] = ()
    importance: Callable[[str, tuple[int, ...]], Tensor | None] | None = None
    kept: Callable[[str, BlockMatrix | UnreadGroupedMatrix], BlockMatrix | UnreadGroupedMatrix] | None = None
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
        :param device: the device for the weights; in the other methods likewise
        :param whole: the matrices one below the other, where the checkpoint has them as one tensor
        """
        place, is_head = self._place(dtype, device), role is Role.HEAD
        # Each is held as decided where one form serves all of them, or a rule for single names wants it; else all are
        # decoded together.
        held = [self._held(each, role, place) for each in matrices]
        decoded = [DecodedMatrix(each.matrix) for each in matrices]
        return (
            self._linear(held, biases, place, is_head=is_head)
            or self._side_by_side(matrices, held, biases, place, is_head=is_head)
            or self._linear(decoded, biases, place, is_head=is_head)
            or DenseLinear(_merged(decoded if whole is None else [whole], place), _merged_biases(decoded, biases))
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
    ) -> Experts:
        """Make a layer's experts.

        :param gate_up: two matrices for each expert
        :param down: one for each
        :param extras: None: experts are SwiGLU without biases
        :param join: see :meth:`Form.experts`
        """
        place = self._place(dtype, device)
        gate, up, down_ = (
            [self._held(each, Role.EXPERTS, place) for each in matrices]
            for matrices in (gate_up.projection(0), gate_up.projection(1), down.projection(0))
        )
        for form in self.forms:
            if (experts := form.experts(gate, up, down_, place, extras=extras, join=join)) is not None:
                return experts
        return DenseExperts(_decoded_stack(gate_up, place), _decoded_stack(down, place), extras, join)

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
        """Make the output projection of a model that uses its embeddings for it. Embeddings that are quantized already
        serve as they are.

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
        """Return whether matrices are multiplied as quantized ones, of a checkpoint that stores some so, or none."""
        by_name = any(isq is not None for _, isq in self.isq_by_name)
        return self.isq is not None or by_name or (self.keep_blocks and is_stored_quantized)

    def is_quantized(self, named: NamedMatrix, role: Role) -> bool:
        """Return whether a matrix will be held in fewer bits than the model's dtype has."""
        return self.isq_of(named, role) is not None or (self.keep_blocks and not named.matrix.is_dense)

    def narrow(self, named: NamedMatrix, role: Role) -> tuple[IsqType, str] | None:
        """Return the type that a matrix is to be quantized to, and ggml's name of the blocks that it takes instead, as
        its rows do not fit the type's own; None: they do, or it is not quantized.
        """
        isq = self.isq_of(named, role)
        taken = None if isq is None else blocks_for(isq, named.matrix.shape[1])
        return None if isq is None or taken is None or taken == blocks_of(isq) else (isq, taken)

    def _held(self, named: NamedMatrix, role: Role, place: Place) -> StoredMatrix:
        """Return the matrix that forms are made from: as it is stored, quantized now, or to be decoded."""
        isq = self.isq_of(named, role)
        if isq is not None:
            library = None if self.workspace is None else self.workspace.library
            importance = None if self.importance is None else self.importance(named.name, named.index)
            if importance is not None and named.cols is not None:
                importance = importance[named.cols]
            # On all threads, though other layers are loaded on the others: a head of many rows takes longest.
            threads = None if self.workspace is None else self.workspace.num_threads
            made = quantize_stored(named.matrix, isq, library, place.device, importance, num_threads=threads)
            if self.kept is None or place.device.type != "cpu":
                return made
            return self.kept(f"{named.name} {named.index} {isq.value} {named.cut}".rstrip(), made)
        if named.matrix.is_dense or (self.keep_blocks and place.device not in self.decoded_on):
            return named.matrix
        return DecodedMatrix(named.matrix)

    def isq_of(self, named: NamedMatrix, role: Role) -> IsqType | None:
        """Return the type that a matrix is quantized to in situ; None: it is not quantized, or its rows fit no format's
        blocks.
        """
        isq = for_head(self.isq) if self.isq is not None and role in (Role.HEAD, Role.EMBEDDING) else self.isq
        isq = next((chosen for pattern, chosen in self.isq_by_name if pattern.search(named.name)), isq)
        return isq if isq is not None and can_be_quantized(isq, named.matrix.shape[1]) else None

    def _linear(
        self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], place: Place, *, is_head: bool
    ) -> Linear | None:
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
        """Make a layer of parts where a rule for single names gives some matrices another form than the others."""
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
    """Return the values of matrices one below the other; each is decoded by itself, into its place."""
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


def _merged_biases(matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Return the biases as one, zero where a matrix has none; None: none has any."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    pairs = zip(matrices, biases, strict=True)
    return torch.cat([like.new_zeros(matrix.shape[0]) if bias is None else bias for matrix, bias in pairs])


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
