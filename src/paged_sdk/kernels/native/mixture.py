"""Describes the experts of a decoder layer, and the router that chooses some of them for each token."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.experts import check_experts
from paged_sdk.kernels.native.linear import check_matrix, float_vector, pointer
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.routing import ExpertChoice, describe_choice
from paged_sdk.kernels.native.structures import ACTIVATIONS, DTYPES
from paged_sdk.kernels.native.structures import Mixture as Structure

__all__ = ["Mixture"]


@frozen(eq=False, kw_only=True)
class Mixture:
    """Describes a layer's experts. Beside an MLP, both outputs are added, each normalized or gated before if it says
    so.

    :ivar router: [num_experts, hidden] float32, bfloat16 or float16, contiguous
    :ivar router_bias: [num_experts], added to the router's scores; None: no bias
    :ivar router_norm: [hidden], weight of an RMSNorm of the residual stream, which the router reads; None: it reads
        what the experts read
    :ivar choice: how experts are chosen
    :ivar gate: [num_experts * inner, hidden]: all experts' matrices, concatenated by rows; None: experts have no gates,
        and compute ``activation(up)``
    :ivar up: [num_experts * inner, hidden]
    :ivar down: [num_experts * hidden, inner]
    :ivar activation: of the gates, or without gates of up; not with ``swiglu``
    :ivar swiglu: alpha and limit of experts that compute ``(up + 1) * gate * sigmoid(alpha * gate)`` with clamped gate
        and up; None: experts compute ``up * activation(gate)``
    :ivar input_norm: [hidden], weight of an RMSNorm of the residual stream, which the experts read; None: they read
        what an MLP reads
    :ivar output_norm: beside an MLP: [hidden], weight of an RMSNorm of the experts' output; None: no norm
    :ivar dense_output_norm: beside an MLP: [hidden], weight of an RMSNorm of the MLP's output; None: no norm
    :ivar mlp_gate: beside an MLP: [hidden]; the MLP's output is multiplied by the sigmoid of its product with what the
        experts read; None: it is not
    :ivar inner_widths: with tensor parallelism, the number of neurons per expert of each rank, int32; None: one rank,
        or ranks sum their results
    """

    router: Tensor
    router_bias: Tensor | None = None
    router_norm: Tensor | None = None
    choice: ExpertChoice
    gate: Projection | None
    up: Projection
    down: Projection
    activation: KernelActivation = "silu"
    swiglu: tuple[float, float] | None = None
    input_norm: Tensor | None = None
    output_norm: Tensor | None = None
    dense_output_norm: Tensor | None = None
    mlp_gate: Tensor | None = None
    inner_widths: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        check_matrix("router", self.router, (self.choice.num_experts, self.hidden_size))
        if not self.router.is_contiguous():
            raise ConfigError.of("router.stride()", self.router.stride(), "a contiguous tensor")
        gate = None if self.gate is None else self.gate.weight
        count, widths = self.choice.num_experts, self.inner_widths
        check_experts(gate, self.up.weight, self.down.weight, num_experts=count, widths=widths)

    @property
    def hidden_size(self) -> int:
        """Return the number of columns that experts read."""
        return self.up.weight.cols

    @property
    def needs_mlp(self) -> bool:
        """Return whether a setting has a meaning beside an MLP alone."""
        return any(each is not None for each in (self.output_norm, self.dense_output_norm, self.mlp_gate))

    def describe(self, target: Structure) -> Iterator[Tensor | None]:
        """Fill the C structure, and return the tensors that must outlive it besides this object's.

        :raises ConfigError: the size of a vector does not fit
        """
        yield from describe_choice(target.choice, self.choice)
        for name in ("gate", "up", "down"):
            if (projection := getattr(self, name)) is not None:
                yield projection.describe(getattr(target, name))
        hidden = self.hidden_size
        for name, size in (
            ("router_bias", self.choice.num_experts),
            ("router_norm", hidden),
            ("input_norm", hidden),
            ("output_norm", hidden),
            ("dense_output_norm", hidden),
            ("mlp_gate", hidden),
        ):
            vector = float_vector(name, getattr(self, name), size)
            setattr(target, name, pointer(vector))
            yield vector
        target.router, target.router_dtype = self.router.data_ptr(), DTYPES[self.router.dtype]
        target.activation = ACTIVATIONS[self.activation]
        target.swiglu_alpha, target.swiglu_limit = self.swiglu or (0.0, 0.0)
        target.inner_widths = pointer(self.inner_widths)
