"""Run transformers' image encoders with this package's weight forms and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import NamedMatrix, Role, WeightPolicy
from paged_sdk.vision.whole_attention import whole_attention

__all__ = ["OwnProducts", "TakenLayer", "take_matrices"]

_WIDTH: Final = 32
"""Patch vectors are padded with zeros to a multiple of this, which every weight form can multiply."""
_ARGUMENTS: Final = ("input", "weight", "bias")
"""The first arguments of torch's linear layers and convolutions."""


@frozen(eq=False)
class TakenLayer:
    """Holds a layer whose weight was taken over.

    :ivar linear: the weight and bias in one of this package's forms
    :ivar bias: the layer's parameter; None: it has no bias
    """

    linear: Linear
    bias: Tensor | None

    def forward(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply rows by the weight and add a bias.

        :param rows: ``[num_rows, in_features]``
        :param bias: the bias that the class passes, which is not always the layer's own; None: none
        :returns: ``[num_rows, out_features]``
        """
        made = self.linear.forward(rows, None)
        if bias is not self.bias:
            if self.bias is not None:
                made -= self.bias
            if bias is not None:
                made += bias
        return made


class OwnProducts(TorchFunctionMode):
    """Intercepts torch's linear layers, patch convolutions and attention in the thread that enters it.

    :param layers: layers by the ``id()`` of the parameter that they replace
    :param workspace: workspace of the native kernels, used for attention if the CPU has bfloat16 products; None: torch
        computes attention
    """

    def __init__(self, layers: Mapping[int, TakenLayer], workspace: Workspace | None) -> None:
        super().__init__()
        self._layers = layers
        self._workspace = workspace if workspace is not None and workspace.library.multiplies_pairs else None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a torch function, with this package's layers and attention where they apply."""
        if func in (F.linear, F.conv2d, F.conv3d):
            given: dict[str, Any] = {**dict(zip(_ARGUMENTS, args, strict=False)), **(kwargs or {})}
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            if (own := self._layers.get(id(weight))) is not None:
                return _product(own, x, bias) if func is F.linear else _patches(own, x, weight, bias)
        if func is F.scaled_dot_product_attention and self._workspace is not None:
            attended = self._attend(*args, **(kwargs or {}))
            if attended is not None:
                return attended
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Compute unmasked attention natively; return None if the arguments need torch."""
        assert self._workspace is not None
        if is_causal or dropout_p or query.dtype is not torch.bfloat16 or query.dim() != 4:
            return None
        if query.shape != key.shape or key.shape != value.shape or not _hides_nothing(attn_mask):
            return None
        return whole_attention(self._workspace, query, key, value, scale=scale, precision=Precision.BFLOAT16)


def _hides_nothing(mask: Tensor | None) -> bool:
    return mask is None or bool(mask.all() if mask.dtype is torch.bool else not mask.any())


def _product(layer: TakenLayer, x: Tensor, bias: Tensor | None) -> Tensor:
    linear = layer.linear
    rows = x.reshape(-1, linear.in_features)
    if not len(rows):
        return x.new_empty(*x.shape[:-1], linear.out_features)
    return layer.forward(rows, bias).view(*x.shape[:-1], linear.out_features)


def _patches(layer: TakenLayer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a convolution with non-overlapping patches as a matrix product."""
    sides = weight.shape[2:]
    for axis, side in enumerate(sides, start=2):
        x = x.unfold(axis, side, side)  # appends an axis
    count = len(sides)
    grid = x.shape[2 : 2 + count]
    rows = x.permute(0, *range(2, 2 + count), 1, *range(2 + count, 2 + 2 * count)).reshape(len(x) * prod(grid), -1)
    made = layer.forward(F.pad(rows, (0, layer.linear.in_features - rows.shape[1])), bias)
    return made.view(len(x), *grid, -1).permute(0, 1 + count, *range(1, 1 + count))


def take_matrices(
    model: nn.Module,
    policy: WeightPolicy,
    names: Mapping[int, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, TakenLayer]:
    """Take the weights out of a model's linear layers and patch convolutions, in the forms that a policy chooses.

    The parameters keep their shapes but hold only NaN, so that any use of them is noticed.

    :param names: names of the checkpoint's tensors, by ``data_ptr()``
    :returns: layers by the ``id()`` of the parameter that they replace
    """
    taken: dict[int, TakenLayer] = {}
    for name, module in model.named_modules():
        if not (type(module) is nn.Linear or (isinstance(module, nn.Conv2d | nn.Conv3d) and _is_of_patches(module))):
            continue
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        values = weight.detach().flatten(1)
        if weight.dim() > 2:
            values = F.pad(values, (0, -values.shape[1] % _WIDTH))
        named = NamedMatrix(names.get(weight.data_ptr(), f"{name}.weight"), DenseMatrix(values))
        if policy.workspace is None and not policy.is_quantized(named, Role.LINEAR):
            continue
        biases = [None if bias is None else bias.detach()]
        linear = policy.linear([named], biases, Role.LINEAR, dtype=dtype, device=device)
        taken[id(weight)] = TakenLayer(linear, bias)
        weight.data = weight.new_full((1,), torch.nan).expand(weight.shape)
    return taken


def _is_of_patches(module: nn.Conv2d | nn.Conv3d) -> bool:
    plain = module.groups == 1 and module.padding_mode == "zeros" and set(module.dilation) == {1}
    return plain and module.stride == module.kernel_size and (module.padding == "valid" or not any(module.padding))
