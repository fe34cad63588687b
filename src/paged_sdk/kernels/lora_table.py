"""Defines the layout of the tables in which kernels look up adapters."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["TableField"]


class TableField(IntEnum):
    """Names the numbers that the table holds for an adapter's update of a matrix."""

    DOWN = 0
    """The address of the update's rows of :attr:`~paged_sdk.kernels.lora.LoraWeights.down`, contiguous."""
    UP = 1
    """The address of :attr:`~paged_sdk.kernels.lora.LoraPart.up`, contiguous."""
    GAINS = 2
    """The address of :attr:`~paged_sdk.kernels.lora.LoraPart.gains`, contiguous; 0: none."""
    RANK = 3
    """The rank; 0: the matrix is not updated."""
