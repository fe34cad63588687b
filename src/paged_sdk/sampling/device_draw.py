"""Draws the next tokens of a batch on the device, without copying them to the host."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paged_sdk.kernels.draw_settings import DrawSettings
from paged_sdk.kernels.native.structures_sampling import DRAW_SETTINGS
from paged_sdk.kernels.sampling import argmax, draw
from paged_sdk.sampling.sequence_settings import SequenceSettings

__all__ = ["DeviceDraw"]

_DTYPES: Final = MappingProxyType(
    {
        "positions": torch.int64,
        "streams": torch.int64,
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
    }
)
# Triton recompiles kernels for pointers that are not 16-byte aligned: 16 bytes are 4 numbers of 4 bytes.
_ROWS_PER_UNIT: Final = 4


class DeviceDraw:
    """Draws tokens on the device: by temperature, top-k, top-p and min-p, in this order, or by argmax.

    A token depends on its own row alone, as with :class:`~paged_sdk.sampling.sampler.Sampler`. Both classes draw from
    the same distribution. Without top-k and top-p they draw the same token; with them the tokens may differ, since this
    class keeps all tokens that tie with the last one kept. So the choice between the two must depend on the row alone.

    While the batch has the same rows as in the last step, each with one more token, nothing is copied to the device.

    :param device: the device of the logits
    :param vocab_size: columns of the logits
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._rows: list[SequenceSettings] = []
        self._all_greedy = True
        self._settings: DrawSettings | None = None
        self._next_positions: list[int] = []

    def draw(self, logits: Tensor, rows: list[SequenceSettings], num_output_tokens: list[int]) -> Tensor:
        """Draw one token per row by launching kernels, without waiting for the device.

        :param logits: float32 ``[len(rows), vocab_size]``, last dimension contiguous
        :param rows: the sampling settings of each row
        :param num_output_tokens: the number of output tokens of each row's sequence
        :returns: ``[len(rows)]`` int64 on the device; :data:`~paged_sdk.kernels.sampling.NOT_DRAWN` where every logit
            is -inf, or one is NaN or +inf
        """
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows), self._vocab_size)
        with torch.inference_mode():
            if rows != self._rows:
                self._rows = list(rows)
                self._all_greedy = all(row.is_greedy for row in rows)
                self._settings = None
            if self._all_greedy:
                return argmax(logits)
            return draw(logits, self._settings_at(num_output_tokens))

    def _settings_at(self, positions: list[int]) -> DrawSettings:
        if self._settings is not None and positions == self._next_positions:
            self._settings.positions.add_(1)
        else:
            self._settings = _upload(self._rows, positions, self._device)
        self._next_positions = [position + 1 for position in positions]
        return self._settings


def _upload(rows: Sequence[SequenceSettings], positions: Sequence[int], device: torch.device) -> DrawSettings:
    """Copy settings to the device by one asynchronous copy; torch keeps the pinned memory until the copy is done."""
    num_slots = -(-len(rows) // _ROWS_PER_UNIT) * _ROWS_PER_UNIT
    sizes = [num_slots * dtype.itemsize for dtype in _DTYPES.values()]
    # No variable refers to the pinned tensor, so that it is released at once: see HostCopies.
    sent = _on_host(rows, positions, sizes, is_pinned=device.type == "cuda").to(device, non_blocking=True)
    parts = torch.split(sent, sizes)
    return DrawSettings(
        **{name: part.view(dtype)[: len(rows)] for part, (name, dtype) in zip(parts, _DTYPES.items(), strict=True)}
    )


def _on_host(
    rows: Sequence[SequenceSettings], positions: Sequence[int], sizes: list[int], *, is_pinned: bool
) -> Tensor:
    """Pack settings into one host tensor.

    :param sizes: bytes reserved for each of :data:`_DTYPES`
    """
    records = np.frombuffer(b"".join([row.record for row in rows]), DRAW_SETTINGS)
    columns = {"positions": np.array(positions), "streams": records["stream"]}
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)
    for part, name in zip(torch.split(host, sizes), _DTYPES, strict=True):
        part.view(_DTYPES[name]).numpy()[: len(rows)] = columns[name] if name in columns else records[name]
    return host
