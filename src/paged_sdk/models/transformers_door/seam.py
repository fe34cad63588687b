"""Register this package's attention, masks and experts with transformers.

transformers has one attention function per implementation, for all models of a process. Each model's own attention is
an attribute of the model's modules, so that several models can live in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol, cast

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from paged_sdk.models.transformers_door.experts import OwnExperts

__all__ = [
    "IMPLEMENTATION",
    "POSITION_BIAS",
    "SINKS",
    "Attend",
    "AttentionCall",
    "Mask",
    "Seam",
    "attach",
    "attention",
    "register",
    "whole_masks",
]

IMPLEMENTATION: Final = "paged_sdk"
"""Name of this package's attention, masks and experts in transformers' registries."""

SINKS: Final = "s_aux"
"""Name of the option with attention sinks: an additional logit per head that has no value."""

POSITION_BIAS: Final = "position_bias"
"""Name of the option with numbers that are added to scores."""

_SEAM: Final = "paged_sdk_seam"
_MASK: Final = "paged_sdk_mask"
_TRIED: Final = "paged_sdk_tried"
_WHOLE: Final = "paged_sdk_whole"


@frozen(eq=False)
class AttentionCall:
    """Holds the arguments of one call of attention.

    :ivar module: the calling attention module
    :ivar query: ``[1, num_heads, num_tokens, head_dim]``
    :ivar key: ``[1, num_kv_heads, num_tokens, head_dim]``
    :ivar value: ``[1, num_kv_heads, num_tokens, value_dim]``
    :ivar mask: the mask that the class passes, as made by this module's mask function or by the class itself
    :ivar options: all other arguments by name
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: object
    options: Mapping[str, Any]


Attend = Callable[[AttentionCall], Tensor]
"""Computes attention and returns ``[1, num_tokens, num_heads, value_dim]``."""

Mix = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""Computes a layer's experts from its module, tokens ``[num_tokens, hidden_size]``, and their experts and weights,
``[num_tokens, num_selected]`` each."""


class Seam:
    """Holds a model's present functions; all modules of the model refer to the same seam.

    :ivar attend: computes the attention of one layer
    :ivar mix: computes the experts of one layer
    :ivar experts: the experts of layers that this package computes; transformers computes the others
    """

    def __init__(self) -> None:
        self.attend: Attend = _not_set
        self.mix: Mix = self._mix
        self.experts: dict[nn.Module, OwnExperts] = {}

    def _mix(self, module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        own = self.experts.get(module)
        if own is None:
            return grouped_mm_experts_forward(module, hidden, indices, weights)
        return own.mix(hidden, indices, weights)


@frozen
class Mask:
    """Describes the keys that a query sees.

    :ivar window: number of keys up to the query's own, which is included; None: all
    :ivar is_bidirectional: whether the query sees as many keys after its own
    :ivar limit: the sequence length up to which this holds; None: any
    :ivar why_not: why this package cannot compute the mask; None: it can
    """

    window: int | None = None
    is_bidirectional: bool = False
    limit: int | None = None
    why_not: str | None = None

    @staticmethod
    def of(mask: object) -> Mask:
        """Return the description of a mask that an attention module got."""
        if isinstance(mask, Mask):
            return mask
        if mask is None:
            return Mask(why_not="an attention layer has no mask, so that its tokens would see later ones")
        known = getattr(mask, _MASK, None)
        return known if isinstance(known, Mask) else Mask(why_not="it computes its masks itself")


class _MaskFunction(Protocol):
    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor: ...


def register() -> None:
    """Register the implementation with transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def attach(model: PreTrainedModel, *, describe_masks: bool = False) -> Seam:
    """Give all modules of a model a new seam, and return it.

    :param describe_masks: whether masks carry a :class:`Mask`
    """
    seam = Seam()
    for module in model.modules():
        setattr(module, _SEAM, seam)
    for config in _configs(model):
        setattr(config, _TRIED, describe_masks)
    return seam


@contextmanager
def whole_masks(model: PreTrainedModel) -> Iterator[None]:
    """Make masks complete within the ``with`` block: bool ``[1, 1, num_tokens, num_tokens]``."""
    configs = _configs(model)
    for config in configs:
        setattr(config, _WHOLE, True)
    try:
        yield
    finally:
        for config in configs:
            setattr(config, _WHOLE, False)


def _configs(model: PreTrainedModel) -> list[object]:
    """Return the configs from which a model's modules make masks: parts may have copies of their own (UMT5)."""
    own = (module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    return list({id(config): config for config in (model.config.get_text_config(), *own)}.values())


def _not_set(call: AttentionCall) -> Tensor:
    raise AssertionError("the model's attention function is not set yet")


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object = None, **options: Any
) -> Tensor:
    """Compute the attention of one layer; see :class:`AttentionCall`.

    :param options: as transformers gives them, except that :data:`POSITION_BIAS` must be a
        :class:`~paged_sdk.kernels.relative_bias.RelativeBias`
    :returns: ``[1, num_tokens, num_heads, value_dim]``
    """
    seam = cast(Seam, getattr(module, _SEAM))
    return seam.attend(AttentionCall(module, query, key, value, mask, options))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **options: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention function."""
    return attention(module, query, key, value, attention_mask, **options), None


def _mask(*, q_length: int, mask_function: _MaskFunction, device: torch.device, config: Any = None, **_: Any) -> Tensor:
    """Implement transformers' mask function. In trials, masks are described or complete; in a step, a mask is a dummy,
    because attention does not read it.
    """
    if getattr(config, _WHOLE, False):
        places = torch.arange(q_length, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return mask_function(zero, zero, places[:, None], places).broadcast_to(1, 1, q_length, q_length)
    if not getattr(config, _TRIED, False):
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    mask = torch.empty((1, 1, q_length, q_length), dtype=torch.bool, device=device)
    setattr(mask, _MASK, _describe(mask_function, config))
    return mask


def _describe(mask_function: _MaskFunction, config: Any) -> Mask:
    """Describe a mask from a sample of its rows; the number of keys that the last row sees is the window."""
    chunk = getattr(config, "attention_chunk_size", None)
    numbers = (getattr(config, "sliding_window", None), chunk)
    # Long enough to show every difference between kinds of masks.
    length = 2 * max((number for number in numbers if isinstance(number, int)), default=0) + 64
    rows = sorted(
        {0, 1, 2, 3, *range(length // 2 - 3, length // 2 + 3), *range(0, length, 1 + length // 61), length - 1}
    )
    queries, keys = torch.tensor(rows)[:, None], torch.arange(length)[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask_function(zero, zero, queries, keys).broadcast_to(len(rows), length)
    count = int(seen[-1].sum())
    if torch.equal(seen, (keys <= queries) & (keys > queries - count)):
        return Mask(window=None if count == length else count)
    if torch.equal(seen, (keys - queries).abs() < count):
        return Mask(window=None if count == length else count, is_bidirectional=True)
    others = (seen != (keys <= queries)).any(1).nonzero().flatten()
    # Chunked attention is causal within the first chunk.
    limit = chunk if isinstance(chunk, int) and rows[int(others[0])] >= chunk else None
    if limit is not None:
        return Mask(limit=limit)
    return Mask(why_not="its masks are neither causal nor of a sliding window")


def _experts(module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Implement transformers' experts function.

    :param hidden: ``[num_tokens, hidden_size]``
    :param indices: each token's experts, ``[num_tokens, num_selected]``
    :param weights: their weights, likewise
    :returns: ``[num_tokens, hidden_size]``
    """
    seam = cast(Seam, getattr(module, _SEAM))
    return seam.mix(module, hidden, indices, weights)
