"""Compute a layer's gated MLP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import BranchScales, DecoderConfig
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.activation import KERNEL_ACTIVATIONS, activation_function
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear

__all__ = ["GatedMlp", "load_gated_mlp"]


class GatedMlp:
    """Computes ``down(activation(gate(x)) * up(x))``.

    :param gate_up: gate and up as one layer, with outputs in this order
    :param gate_scale: multiplies the gate before the activation
    :param output_scale: multiplies the output
    """

    def __init__(
        self,
        *,
        gate_up: Linear,
        down: Linear,
        activation: Activation,
        gate_scale: float = 1.0,
        output_scale: float = 1.0,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._gate_scale = gate_scale
        self._output_scale = output_scale
        # Activations without a kernel are computed one operation at a time.
        self._kernel = KERNEL_ACTIVATIONS.get(activation) if gate_scale == 1.0 else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return the linear layers, in the order in which they are applied."""
        return self.gate_up, self.down

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Apply the MLP to ``[num_tokens, hidden_size]``, the tokens of a step."""
        output = self.down.forward(self._inner(x, ctx), ctx)
        return output if self._output_scale == 1.0 else output * self._output_scale

    def _inner(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        if self._kernel is not None:
            return self.gate_up.forward_gated(x, self._kernel, ctx)
        gate, up = self.gate_up.forward(x, ctx).chunk(2, dim=-1)
        if self._gate_scale != 1.0:
            gate = gate * self._gate_scale
        return activation_function(self.activation)(gate) * up


def load_gated_mlp(
    loader: WeightLoader, config: DecoderConfig, gate_up: Sequence[str], down: str, *, size: int, bias: bool
) -> GatedMlp:
    """Load one gated MLP.

    :param gate_up: names of the gate's and the up projection's matrices, or of one that holds both
    :param down: name of the down projection's matrix
    :param size: intermediate size
    :param bias: whether the projections have biases
    :raises CheckpointError: a tensor is missing or has another shape
    """
    own, scales = loader.shard.neurons(size), config.branch_scales or BranchScales()
    return GatedMlp(
        gate_up=loader.linear(
            gate_up,
            in_features=config.hidden_size,
            out_features=(size, size),
            bias=bias,
            rows=(own, own),
        ),
        down=loader.linear(
            [down],
            in_features=size,
            out_features=(config.hidden_size,),
            bias=bias,
            cols=lambda shard: shard.neurons(size),
        ),
        activation=config.activation,
        gate_scale=scales.gate,
        output_scale=scales.mlp_output,
    )
