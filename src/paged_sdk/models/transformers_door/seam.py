"""Put this package's attention where transformers' classes look for theirs.

transformers has one attention function per implementation, for all models of a process. What it is to do for one of
them hangs on the model's own modules, so that two models know nothing of each other.
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

__all__ = ["IMPLEMENTATION", "SINKS", "Attend", "AttentionCall", "Mask", "Seam", "attach", "register", "whole_masks"]

IMPLEMENTATION: Final = "paged_sdk"
"""The name under which transformers finds this package's attention, masks and experts."""

SINKS: Final = "s_aux"
"""The name of the option with one more logit for each head's softmax, which has no value."""

_SEAM: Final = "paged_sdk_seam"
_MASK: Final = "paged_sdk_mask"
_TRIED: Final = "paged_sdk_tried"
_WHOLE: Final = "paged_sdk_whole"


@frozen(eq=False)
class AttentionCall:
    """Holds what an attention module asks for.

    :ivar query: ``[1, num_heads, num_tokens, head_dim]``
    :ivar key: ``[1, num_kv_heads, num_tokens, head_dim]``
    :ivar value: ``[1, num_kv_heads, num_tokens, value_dim]``
    :ivar mask: what the model says of keys that are not to be seen
    :ivar options: everything else by name
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: object
    options: Mapping[str, Any]


Attend = Callable[[AttentionCall], Tensor]
"""Computes attention: ``[1, num_tokens, num_heads, value_dim]``."""


class Seam:
    """Holds who computes a model's attention now; all modules of the model refer to it.

    :ivar attend: computes the attention of one layer
    """

    def __init__(self) -> None:
        self.attend: Attend = _nobody


@frozen
class Mask:
    """Describes the keys that a query sees.

    :ivar window: how many up to its own, which is included; None: all of them
    :ivar both_ways: whether it sees as many keys after its own
    :ivar limit: the length of texts up to which this holds; None: any
    :ivar why_not: why this is neither, in words
    """

    window: int | None = None
    both_ways: bool = False
    limit: int | None = None
    why_not: str | None = None

    @staticmethod
    def of(mask: object) -> Mask:
        """Return what is known of a mask that a module was given."""
        if mask is None:
            return Mask(why_not="an attention layer has no mask, so that its tokens would see later ones")
        known = getattr(mask, _MASK, None)
        return known if isinstance(known, Mask) else Mask(why_not="it computes its masks itself")


class _MaskFunction(Protocol):
    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor: ...


def register() -> None:
    """Make transformers know the implementation; doing so again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def attach(model: PreTrainedModel, *, describe_masks: bool = False) -> Seam:
    """Give every module of a model the same new seam.

    :param describe_masks: whether calls of attention are to tell of their masks
    """
    seam = Seam()
    for module in model.modules():
        setattr(module, _SEAM, seam)
    for config in (model.config, model.config.get_text_config()):
        setattr(config, _TRIED, describe_masks)
    return seam


@contextmanager
def whole_masks(model: PreTrainedModel) -> Iterator[None]:
    """Let calls of attention have masks that say of every key whether a query sees it."""
    configs = (model.config, model.config.get_text_config())
    for config in configs:
        setattr(config, _WHOLE, True)
    try:
        yield
    finally:
        for config in configs:
            setattr(config, _WHOLE, False)


def _nobody(call: AttentionCall) -> Tensor:
    raise AssertionError("nobody computes attention yet")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **options: Any
) -> tuple[Tensor, None]:
    """Do what transformers asks of an attention function."""
    seam = cast(Seam, getattr(module, _SEAM))
    return seam.attend(AttentionCall(module, query, key, value, attention_mask, options)), None


def _mask(*, q_length: int, mask_function: _MaskFunction, device: torch.device, config: Any = None, **_: Any) -> Tensor:
    """Do what transformers asks of a mask function: while a model is tried, masks are described or whole; in a step,
    they are there and nothing more.
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
    """Ask a mask for some of its rows: its window is what the last one sees."""
    chunk = getattr(config, "attention_chunk_size", None)
    numbers = (getattr(config, "sliding_window", None), chunk)
    # By this length of a text every difference between masks shows.
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
        return Mask(window=None if count == length else count, both_ways=True)
    others = (seen != (keys <= queries)).any(1).nonzero().flatten()
    # Masks that cut texts into chunks are causal up to the first cut.
    limit = chunk if isinstance(chunk, int) and rows[int(others[0])] >= chunk else None
    if limit is not None:
        return Mask(limit=limit)
    return Mask(why_not="its masks are neither causal nor of a sliding window")


def _experts(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Do what transformers asks of an experts function; without numbers, the result is any."""
    if hidden.is_meta:
        return torch.empty_like(hidden)
    return grouped_mm_experts_forward(module, hidden, indices, weights)
