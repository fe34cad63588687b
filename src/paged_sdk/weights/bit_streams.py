"""Take codes of a few bits out of bytes, where they follow one another from each byte's lowest bit on."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["unpacked"]


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of a bit stream per row, whose words are little-endian.

    :param packed: of any integer type, ``[rows, words]``; a row's bits are a multiple of 8 codes, or what is left over
        is no code
    :param bits: of a code, 1 to 8
    :returns: uint8 ``[rows, codes]``
    """
    stream = packed.contiguous().view(torch.uint8)
    rows, num_bytes = stream.shape
    if bits == 8:
        return stream
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        return torch.stack([stream >> shift & mask for shift in range(0, 8, bits)], dim=2).view(rows, -1)
    # As many bytes as a code has bits hold 8 codes, of which some lie across two bytes.
    units = stream[:, : num_bytes // bits * bits].reshape(rows, -1, bits)
    codes = torch.empty(rows, units.shape[1], 8, dtype=torch.uint8)
    wide = units.short()
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        value = wide[:, :, byte] >> shift
        if shift + bits > 8:
            value = value | wide[:, :, byte + 1] << 8 - shift
        codes[:, :, index] = value & (1 << bits) - 1
    return codes.view(rows, -1)
