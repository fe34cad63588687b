"""Define what a form of weight makes of stored matrices, and find the forms there are."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from attrs import frozen
from torch import Tensor

import paged_sdk.quant.forms
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.own_pages import own_pages
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts
from paged_sdk.quant.linear import Linear

__all__ = ["Form", "Place", "find_forms"]


@frozen(kw_only=True)
class Place:
    """Says where weights will be, and what can compute with them there.

    :ivar device: the device that holds the weights
    :ivar dtype: the dtype of activations, and of weights that are decoded
    :ivar workspace: the native kernels' workspace; None: they are absent, or the device is not the CPU
    :ivar one_form: whether weights are multiplied with any number of rows as they are with few
    :ivar memory: returns so many bytes for weights that are packed
    """

    device: torch.device
    dtype: torch.dtype
    workspace: Workspace | None
    one_form: bool
    memory: Callable[[int], Tensor] = own_pages

    def decoded(self, matrix: StoredMatrix) -> Tensor:
        """Return the values of a matrix on the device; whichever takes fewer bytes, stored or decoded, travels
        there.
        """
        if matrix.is_dense:
            return matrix.decoded(self.dtype).to(self.device)
        return matrix.to(self.device).decoded(self.dtype)


class Form:
    """Holds and multiplies weights in one way. It returns None for what it cannot serve; no two forms serve the same
    matrices in the same place.
    """

    def linear(
        self,
        matrices: Sequence[StoredMatrix],
        biases: Sequence[Tensor | None],
        place: Place,
        *,
        is_head: bool,
    ) -> Linear | None:
        """Make one linear layer from matrices that share an input.

        :param matrices: in the order of their outputs, at least one
        :param biases: one per matrix, in the model's dtype, or None where it has none
        :param is_head: whether it is the output projection, which multiplies one row per sequence of a step and not per
            token
        """
        return None

    def experts(
        self,
        gate: Sequence[StoredMatrix],
        up: Sequence[StoredMatrix],
        down: Sequence[StoredMatrix],
        place: Place,
        *,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
    ) -> Experts | None:
        """Make a layer's experts.

        :param gate: one matrix per expert; ``up`` and ``down`` likewise
        :param extras: None: experts are SwiGLU without biases
        :param join: puts together what the ranks have of each expert's neurons before ``down``, which has some rows and
            all columns; None: all neurons are here, or ``down`` has the columns of those that are
        """
        return None

    def embedding(
        self,
        matrix: StoredMatrix,
        place: Place,
        *,
        scale: float | None,
    ) -> Embedding | None:
        """Make the token embeddings.

        :param scale: see :class:`~paged_sdk.quant.embedding.Embedding`
        """
        return None

    def tied_head(self, embedding: Embedding, place: Place) -> Linear | None:
        """Make the output projection that shares the memory of this form's own embedding."""
        return None


def find_forms() -> tuple[Form, ...]:
    """Return every form: each module of :mod:`paged_sdk.quant.forms` holds one, as ``FORM``."""
    package = paged_sdk.quant.forms
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(import_module(f"{package.__name__}.{name}").FORM for name in names)
