"""Computes on plain tensors: every operation has a reference in torch, and most also have native kernels.

To use paged attention in a model of your own, use :class:`PagedAttention` and :class:`InputMetadata`, which are loaded
on first use, and the functions of :mod:`paged_sdk.kernels.ops`. docs/kernels.md shows how they work together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_sdk.kernels.input_metadata import InputMetadata as InputMetadata
    from paged_sdk.kernels.paged_attention_layer import PagedAttention as PagedAttention

_MODULE_OF = {"InputMetadata": "input_metadata", "PagedAttention": "paged_attention_layer"}

__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # a type checker that saw it would let any name pass

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
