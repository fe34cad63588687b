"""Define the interface of a form of weight, and discover the forms."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from attrs import frozen
from torch import Tensor

import paged_sdk.quant.forms
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.own_pages import own_pages
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts, Projections
from paged_sdk.quant.linear import Linear

__all__ = ["Form", "Place", "find_forms"]


@frozen(kw_only=True)
class Place:
    """Describes where weights will be stored, and which kernels are available there.

    :ivar device: the device that holds the weights
    :ivar dtype: the dtype of activations, and of weights that are decoded
    :ivar workspace: the native kernels' workspace; None: no native kernels, or the device is not the CPU
    :ivar one_form: whether products with many rows use the same arithmetic as with few (batch invariance)
    :ivar memory: allocates the given number of bytes for packed weights
    """

    device: torch.device
    dtype: torch.dtype
    workspace: Workspace | None
    one_form: bool
    memory: Callable[[int], Tensor] = own_pages

    def decoded(self, matrix: StoredMatrix) -> Tensor:
        """Return the values of a matrix on the device. A quantized matrix is copied there before it is decoded, a dense
        one after it is converted.
        """
        if matrix.is_dense:
            return matrix.decoded(self.dtype).to(self.device)
        return matrix.to(self.device).decoded(self.dtype)


class Form:
    """Stores and multiplies weights in one way. Methods return None for matrices that the form cannot serve. No two
    forms serve the same matrices in the same place.
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
        :param is_head: whether this is the output projection, which multiplies one row per sequence of a step, not one
            per token, or a matrix of one expert, which multiplies few rows, too
        """
        return None

    def experts(
        self,
        matrices: Projections[Sequence[StoredMatrix]],
        place: Place,
        *,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
        activation: KernelActivation,
    ) -> Experts | None:
        """Make a layer's experts.

        :param matrices: of each projection, one matrix per expert
        :param extras: None: no biases, and ``activation``
        :param join: gathers the inner activations of all ranks before ``down``, which has some rows and all columns;
            None: this rank has all neurons, or ``down`` has the columns of its neurons only
        :param activation: of the gates, or without gates of up
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
        """Make a tied output projection that shares the memory of this form's embedding."""
        return None


def find_forms() -> tuple[Form, ...]:
    """Return all forms: each module of :mod:`paged_sdk.quant.forms` defines one as ``FORM``."""
    package = paged_sdk.quant.forms
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(import_module(f"{package.__name__}.{name}").FORM for name in names)
