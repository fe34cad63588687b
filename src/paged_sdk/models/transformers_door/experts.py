"""Compute the experts of transformers' classes with this package's weight forms.

A class describes its experts by attributes (``transformers.integrations.use_experts_implementation``): the layout of
its tensors, biases, and a gate. What the gate computes is found by asking it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor, nn

from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, UnreadRows
from paged_sdk.models.transformers_door.renamed_source import RenamedSource
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import ExpertStack, NamedMatrix

__all__ = ["OwnExperts", "load_own_experts"]

_SAMPLED_ROWS: Final = 8
_SAMPLED_UP_TO: Final = 40.0
_ROUNDING: Final = 1e-5
"""Float32 rounds each of the gate's few operations to 1e-7 of its result."""


class OwnExperts(Protocol):
    """Computes the experts of one layer."""

    def mix(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, ``[num_tokens, hidden_size]``.

        :param hidden: ``[num_tokens, hidden_size]``
        :param indices: each token's experts, ``[num_tokens, num_selected]``
        :param weights: their weights, likewise
        """
        ...

    def of(self, module: nn.Module) -> OwnExperts:
        """Return the same experts for another module of the class, which has their biases and gate."""
        ...


def load_own_experts(
    name: str, module: nn.Module, loader: WeightLoader, source: RenamedSource, dtype: torch.dtype
) -> OwnExperts:
    """Load a layer's experts, and remove their matrices from the module.

    :param name: the module's name
    :param module: a module that follows transformers' interface for experts; what it holds beside the matrices, such as
        biases, may still be without values
    :param source: what the loader reads
    :raises CheckpointError: a tensor is missing or has another shape
    """
    layout = _Layout.of(name, module)
    up, down = (_matrices(loader, source, layout, *each) for each in (layout.up, layout.down))
    own: OwnExperts
    if layout.is_swiglu:
        made = loader.experts(ExpertStack(matrices=up), ExpertStack(matrices=down), extras=None, join=None)
        own = _Fused(made, dtype)
    else:
        own = _OneByOne(module, loader.expert_linears(up), loader.expert_linears(down), layout.biases, dtype)
    for attribute in (layout.up[0], layout.down[0]):
        loader.loaded(f"{name}.{attribute}")
        delattr(module, attribute)
    return own


@frozen
class _Layout:
    """Describes the matrices of a module's experts.

    :ivar name: the module's name
    :ivar num_experts: number of experts
    :ivar up: attribute of the experts' first matrices, their rows (two numbers if gate and up stand one after the
        other) and columns
    :ivar down: likewise, of the last matrices
    :ivar biases: attributes of the biases of both; empty: there are none
    :ivar is_transposed: whether the tensors have a row per input
    :ivar is_swiglu: whether each expert computes ``down @ (silu(gate @ x) * (up @ x))``
    """

    name: str
    num_experts: int
    up: tuple[str, tuple[int, ...], int]
    down: tuple[str, tuple[int, ...], int]
    biases: tuple[str, ...]
    is_transposed: bool
    is_swiglu: bool

    @classmethod
    def of(cls, name: str, module: Any) -> _Layout:
        up, down = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        shapes = [tuple(getattr(module, each).shape) for each in (up, down)]
        (count, rows, hidden), (_, outputs, inner) = (
            (count, rows, cols) if not module.is_transposed else (count, cols, rows) for count, rows, cols in shapes
        )
        has_parts = module.has_gate and module.is_concatenated
        is_plain = has_parts and not module.has_bias and not module.has_post_expert_norm
        return cls(
            name=name,
            num_experts=count,
            up=(up, (inner, inner) if has_parts else (rows,), hidden),
            down=(down, (outputs,), inner),
            biases=(f"{up}_bias", f"{down}_bias") if module.has_bias else (),
            is_transposed=module.is_transposed,
            is_swiglu=is_plain and _has_swiglu(module, inner),
        )


def _has_swiglu(module: Any, inner: int) -> bool:
    """Return whether a module's gate computes ``silu(gate) * up``, on numbers of all sizes."""
    count = _SAMPLED_ROWS * inner
    gate = torch.linspace(-_SAMPLED_UP_TO, _SAMPLED_UP_TO, count, dtype=torch.float32).view(_SAMPLED_ROWS, inner)
    up = _SAMPLED_UP_TO * torch.arange(count, dtype=torch.float32).sin().view_as(gate)
    expected = F.silu(gate) * up
    try:
        found: Tensor = module._apply_gate(torch.cat([gate, up], -1))
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=_ROUNDING, atol=_ROUNDING)
    except Exception:  # a class's gate may raise anything, for example without the values of its parameters
        return False


def _matrices(
    loader: WeightLoader, source: RenamedSource, layout: _Layout, attribute: str, heights: Sequence[int], cols: int
) -> list[list[NamedMatrix]]:
    """Read each expert's matrices. They have the checkpoint's names, which topologies select, if each has its own."""
    name, rows, count = f"{layout.name}.{attribute}", sum(heights), layout.num_experts
    if layout.is_transposed:
        values = loader.values(name, count, cols, rows).mT
        stored_name = source.stored_name(name)
        wholes = [NamedMatrix(stored_name, _read_by_rows(each), (number,), name) for number, each in enumerate(values)]
    else:
        wholes = loader.matrix(name, count, rows, cols).split([rows] * count)
    matrices = [each.split(heights) if len(heights) > 1 else [each] for each in wholes]
    stored = source.stored_names(name)
    if stored is None or any(len(names) != len(heights) for names in stored):
        return matrices
    return [
        [evolve(each, name=own, index=(), cut="") for each, own in zip(of_expert, names, strict=True)]
        for of_expert, names in zip(matrices, stored, strict=True)
    ]


def _read_by_rows(values: Tensor) -> DenseMatrix:
    """Return a transposed matrix whose rows are copied when they are read, so that it is never in memory twice."""
    rows, cols = values.shape

    def read(first: int, last: int) -> Tensor:
        return values[first:last].contiguous()

    return DenseMatrix(UnreadRows(shape=(rows, cols), itemsize=values.itemsize, read=read))


@frozen(eq=False)
class _Fused:
    """Computes experts that are SwiGLUs, all at once."""

    experts: Experts
    dtype: torch.dtype

    def mix(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Implement :meth:`OwnExperts.mix`."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.experts.forward(hidden.to(self.dtype).contiguous(), weights.to(wide), indices.long()).to(
            hidden.dtype
        )

    def of(self, module: nn.Module) -> _Fused:
        """Implement :meth:`OwnExperts.of`: SwiGLUs need no module."""
        return self


@frozen(eq=False)
class _OneByOne:
    """Computes experts of any kind, one expert after the other, each for all its tokens.

    :ivar module: computes the gate, and has biases and a norm of the outputs if there are any
    """

    module: Any
    up: Sequence[Linear]
    down: Sequence[Linear]
    biases: Sequence[str]
    dtype: torch.dtype

    def mix(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Implement :meth:`OwnExperts.mix`. A token's experts are added up in the order of their numbers."""
        module, rows = self.module, hidden.to(self.dtype)
        order = indices.flatten().argsort(stable=True)
        tokens = order // indices.shape[1]
        wide = torch.promote_types(self.dtype, torch.float32)
        factors = weights.flatten()[order].unsqueeze(-1).to(wide)
        counts = indices.flatten().bincount(minlength=len(self.up)).tolist()
        out = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            if not count:
                continue
            own = slice(end - count, end)
            inner = self._product(self.up, 0, expert, rows[tokens[own]])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            outputs = self._product(self.down, 1, expert, inner)
            if module.has_post_expert_norm:
                outputs = module.post_expert_norm(outputs)
            out.index_add_(0, tokens[own], outputs.to(wide) * factors[own])
        return out.to(hidden.dtype)

    def of(self, module: nn.Module) -> _OneByOne:
        """Implement :meth:`OwnExperts.of`."""
        return evolve(self, module=module)

    def _product(self, layers: Sequence[Linear], number: int, expert: int, rows: Tensor) -> Tensor:
        product = layers[expert].forward(rows.to(self.dtype), None)
        return product + getattr(self.module, self.biases[number])[expert] if self.biases else product
