"""Decodes GGUF blocks with non-uniform elements: entries of a table, or vectors of a codebook.

A codebook is a list of vectors of 4 or 8 elements, which blocks refer to by index. The vectors are points of a small
lattice, in ascending order with the last element as the most significant digit. So a codebook is stored here as a
compressed bit mask over its lattice: 2 KB for all codebooks, which take 160 KB of text in ``ggml-common.h``.

Factors are multiplied in ggml's order, so float32 results are bit-identical to ggml's.
"""

from __future__ import annotations

import zlib
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.quantized.block_bits import bit_pairs, bits_in_order, half, nibbles, scaled, shifts

__all__ = [
    "E2M1_VALUES",
    "IQ4_NL",
    "IQ4_VALUES",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
    "Q1_0",
    "TQ1_0",
    "TQ2_0",
    "TableBlocks",
    "iq1_m",
    "iq1_s",
    "iq2_s",
    "iq2_xs",
    "iq2_xxs",
    "iq3_s",
    "iq3_xxs",
]

# The non-linear 4-bit grid of IQ4_NL and IQ4_XS.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of FP4 E2M1 in the OCP microscaling formats: sign, two bits of exponent, one of mantissa.
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# TQ1_0 does not use the last.
TERNARY_VALUES = (-1, 0, 1, 2)


def _codebook(levels: Sequence[int], width: int, members: str) -> Tensor:
    """Return a codebook's vectors, float32 ``[n, width]``.

    :param levels: the values of an element, indexed by the digits of the lattice
    :param members: one bit per lattice point, compressed by deflate, in base 64
    """
    bits = np.unpackbits(np.frombuffer(zlib.decompress(b64decode(members), wbits=-15), np.uint8))
    points, places = np.flatnonzero(bits), len(levels) ** np.arange(width)
    digits = points[:, None] // places % len(levels)
    return torch.from_numpy(np.array(levels, np.float32)[digits])


# fmt: off
_IQ2_XXS_CODEBOOK: Final = _codebook(
    (8, 25, 43),
    8,
    "dVJLroQwDLOysnqKiFWPGXXFMVg+zSlfkv5gxFhUKo2d2oHPX/3waA1aDxCACioEsQMKpZ2wqlL83MuXrwIYgtL8vNYk9idVxEBV0ml6Qs03EiqH"
    "dSJVvGVXcay8ouOyKIWPcx6lXEbreLWrd+qiMnmQ5lWZbB2aUYunO1A80e0VnwbpkcEuPxDeh39h0hhGV1LDjgzabk6bQ8nFIz2qpUQf2u1R7NZR"
    "F0ep27Pcy4mWNBsl2bQ0ee6U9TX7LcM3YprjU6gs4WqQv43skHljztwese437HjGOYa7b8wZyqvqAf6oLSff03zZv0J/0/4B",
)
_IQ2_XS_CODEBOOK: Final = _codebook(
    (8, 25, 43),
    8,
    "XVFLroQwDLOyinqKiBXilFFXiFNUrFBPOfm00PeqGQhN4thO7/3qd31uPXovd+WmOC6mKlBF8dSju8BSaCoCUAU3e9mvt3MXZRBZl6cYsEBhhw3w"
    "si6agJYqKKc3eoED3soJGDeOKTNsDWKV9n3GtwCjxE/vCQgp7FPZB2arFW4VpG+1ZFIHMLhqTOGJ6TmoV2FLyaFrSMZm8qpOQDPKUt7SgrzPMKMo"
    "2uEpVR1Ta8wnzDPsDcmC9jLMXgp72e2pecEYSfuLuUEBZeg82HyehBvstMqaSY0m/SPhDPEOxRLqH6P9zRySmz7iuOUx8ik6VLjLdT+sn5C7SowR"
    "B1OJle4uYOEV4CLpRmxGg4V+BQayWVB5JbkvRD+2slzyLL11TNTXS9rnFJl7Ifw/lMPvsYLBun1Po/sD",
)
_IQ2_S_CODEBOOK: Final = _codebook(
    (8, 25, 43),
    8,
    "bVJLbgUhDIuyijgFmhXilBErxCkQK5RT1glM+6oWjeZnbGyDmQ1btmfHS1pW5i51SLJMveOxzGzXNZJZwQWIAY2SkxBvc5ao8rT8AGIiLTKFiJiq"
    "jQHlPUq1WMIKpdJanlQy+VqvoEMhWKYCAp1tZIeU6ED4l8WhDG2qY482s3aqqfE8LKGRMX/SgxS/BDsoU0ENcocNX4JoxzeFOD5xU0ru1XZ5vI15"
    "HbadPbL7MqteVKMDpfY6hICUA8FGsNAG04F8QHAHi/5ELoDftT4E6ZqPyICYEPBHMGqJJM/aEw7ZN+V2KG4jO4F0fApKYHSz4z3JLUFPLe+IGcx7"
    "9VK7NKV1zDfivi8Lu9w98vyJrA6lKw7W1JDBXV91KE8/K8vksmJTQvEcAKf802GX79iARE+vgdDHwGSc3ho6fibkhJHMXvSjNK6g8u3wV2Zg16he"
    "NfxmLXpr+gI=",
)
_IQ3_XXS_CODEBOOK: Final = _codebook(
    (4, 12, 20, 28, 36, 44, 52, 62),
    4,
    "TVFBCsMwDFNCB2GnDrZ7nuLCHpDBHmR6GnuF2anPnOU03VRKm1iW5GR7mFTg2uxuUqCb2AMLpsUmOBQzUkm4LkD1h/BCAd7wkqBZ25ICJhbFZuIr"
    "VINKRsa9qzhevoKEaqDGtrUP/fGMvovaYkmdJC/0JvrN9EruRuOOliMIxJrrT+F35j6bmVTYFdDkOyvDs6EwRpRmBvPZTrgcoQrpitXdBp0mZcTQ"
    "QZxs/3dZz6Ur8mjgOLXuDtAQr502EuEg8nsOF+lvwnBd/0KF9N6wh+9yNx33krssx6w8khFXgmm/oztmIL4=",
)
_IQ3_S_CODEBOOK: Final = _codebook(
    range(1, 16, 2),
    4,
    "LVFBSgNBEKwdVhg8TSAP6IQNrL/oyAgbTxNZ/9MJOczeNuIDRlEQ3xE/IOQJQvAV9szah4au6q6q2f35Pbn3kDaX09FbePp68nEVMDqfHmyqvMw6"
    "GhnS4tXdwTgTwCDwh86IwOWc7nHN9B155IS9rCKNtdBmXEddlHmLsNS9wjK0BlxrD4nrzJ8/t6lP1XM6Nh0pv0HY8QzdG7eBxGCNsVG4sUyVOMhL"
    "FtHLmo04AeiR+ht23NsAgSyFNKriHLeyreHcrapSBKearIGDQYkRkOqcJtJArIeLQAfnFT+wk4rEhuQzn2CrLHdVrgiqYJENDhCnEEXCQMb2xJQX"
    "hN1ed7CQCpZr10HIZKHcA0rlxbZ0rT6jGgA7HWwmLdUkYjm7aOkjFBwx+ebQBf/XGpCMWAKxxVznbq+v4eLR5Bw+fySZXGnyLn9h0gb+AA==",
)
_IQ1_CODEBOOK: Final = _codebook(
    (-1, 0, 1),
    8,
    "LVJNa1RJFL2vucW0mSj3tVUxLhrtJoFHVpGJs5Sq5FUSJdEqU2Ur+oiCktVAFmk3obUDHRRnhIjGbBTSjUJ0pX9gmAEXwmzS0jNhwCADunDlSlz5"
    "Ud3OrurCueece87TR0mTyfFb1PpNXEKrz5LDpNmXKCy3Hm1tMqkwHgRS7A/H4l1v9vhtSMH4I4pRLqAacdSXBLjtp4OMIhcmSRML40+pVR+bYGgv"
    "gxsSXtPURyLOIXBxz1FEaP6lh5nAueodXfUXju1Usl21WEyzub8Wj8sUUhQ2M0oSuNM/6NcpdjSs5Fa85ZTWg8IthWutxkiTkXwhLmBJ4UiQoZGe"
    "9CXSUVGoiBUkktIDWvK/HTXDu59aOegqZDB+C1r1ewqscrTan2wGy/y7eCnRO8Dp27bKRbbqxT5QhiRPZQkUFCJW2ev8BLaztHL+Xbt9VRwP/5Nt"
    "Wx51WCjluHXkcf9POtUfz7EDQoIEJ2LAiLW15hmL1IzJasXs+o5mHU3W8IqG1Rk5Oj9cWf7UEUvPa9d25j98+bzwe7Z8/83br58vz09v3LBp3tcW"
    "S55mxbaqfs2GNv6MDk+ODZwSZrgDwTJN+WmQypkreFfd2aM4aDgSvQRFBD9b73fllZplczL65/3Sj7MbeZVf8st869fHh8F074BUX0XlH2TpTImt"
    "RYNg9aRcScrhUI2jqpeyR+7/M9O9lDcZdWtTR8lyOoUYSNMZe7XofQRo1NT+tEHlLmrN4lZo1CVD3rkITBfVENBbOIWxMoMhAq+93duWxgUKFXnD"
    "icN6LFNW2+ZFstmr2WB5+FDV4wk+8AvrX4iMDE04MxmKJL3v+IpeZ5ooj8ymoBa/p2x6FV2/CKe9pMeQf1b+P+XNUGl19BQCQOAyGVa0BFVY4xsJ"
    "3HzV6nZDyJ7CeIhibnIUJsGy7C6sfwM=",
)
# fmt: on


def _entries(book: Tensor, numbers: Tensor) -> Tensor:
    """Look up vectors of a codebook. int ``[n, m]`` -> float32 ``[n, m * width]``."""
    return book.to(numbers.device)[numbers.int()].reshape(len(numbers), -1)


def _words(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Read bytes as little-endian integers, int32 ``[n, words]``."""
    # Copied, because a slice of a single block counts as contiguous but may be unaligned.
    words = packed.clone(memory_format=torch.contiguous_format).view(dtype).int()
    return words if dtype is torch.int32 else words & 0xFFFF


def _fields(words: Tensor, *first_bits: int) -> Tensor:
    """Shift each word right by each number of bits, without masking. int32 ``[n, w]`` -> ``[n, w * numbers]``."""
    numbers = torch.tensor(first_bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> numbers).reshape(len(words), -1)


def _signs(bits: Tensor) -> Tensor:
    """Return -1 for each set bit and 1 for each clear one, lowest bits first. uint8 ``[n, bytes]`` -> ``[n, bits]``."""
    return 1 - 2 * bits_in_order(bits).float()


def _seven_signs(numbers: Tensor) -> Tensor:
    """Return eight signs for each 7-bit number: the eighth makes the number of negative signs even."""
    parity = numbers ^ (numbers >> 4)
    parity ^= parity >> 2
    parity ^= parity >> 1
    return _signs((numbers | (parity & 1) << 7).to(torch.uint8))


def _times(values: Tensor, scales: Tensor, signs: Tensor) -> Tensor:
    """Multiply by one scale per group of elements and one sign per element."""
    return scaled(values, scales).mul_(signs)


def _quarter_scales(blocks: Tensor, numbers: Tensor, unit: float = 0.25) -> Tensor:
    return half(blocks, 0) * (0.5 + numbers.float()) * unit


def iq2_xxs(blocks: Tensor) -> Tensor:
    """Decode blocks of 256 elements in 66 bytes: vectors of 8 from a codebook of 256, one scale per 32 elements."""
    words = blocks[:, 2:].reshape(len(blocks), 8, 8)
    numbers, rest = words[:, :, :4].reshape(len(blocks), 32), _words(words[:, :, 4:].flatten(1), torch.int32)
    scales = _quarter_scales(blocks, rest >> 28 & 15)
    return _times(_entries(_IQ2_XXS_CODEBOOK, numbers), scales, _seven_signs(_fields(rest, 0, 7, 14, 21) & 127))


def iq2_xs(blocks: Tensor) -> Tensor:
    """Decode blocks of 256 elements in 74 bytes: vectors of 8 from a codebook of 512, one scale per 16 elements."""
    words = _words(blocks[:, 2:66], torch.int16)
    scales = _quarter_scales(blocks, nibbles(blocks[:, 66:], 1))
    return _times(_entries(_IQ2_XS_CODEBOOK, words & 511), scales, _seven_signs(words >> 9))


def iq2_s(blocks: Tensor) -> Tensor:
    """Decode blocks of 256 elements in 82 bytes: vectors of 8 from a codebook of 1,024, one scale per 16 elements."""
    numbers = blocks[:, 2:34].int() | bit_pairs(blocks[:, 66:74], 1).int() << 8
    scales = _quarter_scales(blocks, nibbles(blocks[:, 74:], 1))
    return _times(_entries(_IQ2_S_CODEBOOK, numbers), scales, _signs(blocks[:, 34:66]))


def iq3_xxs(blocks: Tensor) -> Tensor:
    """Decode blocks of 256 elements in 98 bytes: vectors of 4 from a codebook of 256, one scale per 32 elements."""
    rest = _words(blocks[:, 66:], torch.int32)
    scales = _quarter_scales(blocks, rest >> 28 & 15, 0.5)
    entries = _entries(_IQ3_XXS_CODEBOOK, blocks[:, 2:66])
    return _times(entries, scales, _seven_signs(_fields(rest, 0, 7, 14, 21) & 127))


def iq3_s(blocks: Tensor) -> Tensor:
    """Decode blocks of 256 elements in 110 bytes: vectors of 4 from a codebook of 512, one scale per 32 elements."""
    numbers = blocks[:, 2:66].int() | bits_in_order(blocks[:, 66:74]).int() << 8
    scales = half(blocks, 0) * (1 + 2 * nibbles(blocks[:, 106:], 1))
    return _times(_entries(_IQ3_S_CODEBOOK, numbers), scales, _signs(blocks[:, 74:106]))


def _shifted_ternary(numbers: Tensor, scales: Tensor, is_below: Tensor) -> Tensor:
    """Decode vectors of -1, 0 and 1, shifted by 1/8: downwards where ``is_below``, else upwards."""
    entries = _entries(_IQ1_CODEBOOK, numbers)
    shift = torch.where(is_below, -0.125, 0.125)
    return scaled(entries.reshape(*shift.shape, -1).add_(shift.unsqueeze(-1)).reshape(len(entries), -1), scales)


def iq1_s(blocks: Tensor) -> Tensor:
    """Decode blocks of 256 elements in 50 bytes: vectors of 8 from a codebook of 2,048, one scale per 32 elements."""
    high = _words(blocks[:, 34:], torch.int16)
    numbers = blocks[:, 2:34].int() | (_fields(high, 0, 3, 6, 9) & 7) << 8
    scales = half(blocks, 0) * (2 * (high >> 12 & 7) + 1)
    return _shifted_ternary(numbers, scales, high >> 15 == 1)


def iq1_m(blocks: Tensor) -> Tensor:
    """Decode blocks of 256 elements in 56 bytes: vectors of 8 from a codebook of 2,048, one scale per 16 elements. The
    block's scale is in the upper four bits of four words.
    """
    high, words = nibbles(blocks[:, 32:48], 1), _words(blocks[:, 48:], torch.int16)
    numbers = blocks[:, :32].int() | (high & 7).int() << 8
    bits = (words >> 12 << torch.tensor((0, 4, 8, 12), dtype=torch.int32, device=words.device)).sum(
        1, dtype=torch.int32
    )
    unit = bits.to(torch.int16).view(torch.float16).float().unsqueeze(1)
    scales = unit * (2 * (_fields(words, 0, 3, 6, 9) & 7) + 1)
    return _shifted_ternary(numbers, scales, high & 8 != 0)


def _iq4_xs_scales(blocks: Tensor) -> Tensor:
    low = nibbles(blocks[:, 4:8], 1)
    high = (blocks[:, 2:4].unsqueeze(2) >> shifts(blocks, 0, 2, 4, 6).T & 3).reshape(len(blocks), 8)
    return half(blocks, 0) * ((low | (high << 4)).to(torch.int8) - 32)


def _tq1_0_codes(blocks: Tensor) -> Tensor:
    """Unpack five ternary codes from each byte, which is a base-3 fraction."""

    def digits(packed: Tensor, count: int, group: int) -> Tensor:
        powers = torch.tensor([3**power for power in range(count)], dtype=torch.uint8, device=packed.device)
        products = packed.reshape(len(packed), -1, 1, group) * powers.unsqueeze(-1)  # modulo 256
        return products.reshape(len(packed), -1)

    parts = digits(blocks[:, :32], 5, 32), digits(blocks[:, 32:48], 5, 16), digits(blocks[:, 48:52], 4, 4)
    return (torch.cat(parts, dim=1).int() * 3 >> 8).to(torch.uint8)


def _mxfp4_scales(blocks: Tensor) -> Tensor:
    """Read power-of-two scales and halve them (the table is doubled): ``2^(e - 127) / 2``."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp_max(1), (exponent - 1) << 23)
    return bits.view(torch.float32)


def _nvfp4_scales(blocks: Tensor) -> Tensor:
    """Read FP8 E4M3 scales, ignoring the sign, and halve them (the table is doubled)."""
    code = blocks[:, :4]
    exponent, mantissa = (code >> 3 & 15).float(), (code & 7).float()
    scale = torch.where(exponent == 0, mantissa * 2**-9, (1 + mantissa / 8) * torch.exp2(exponent - 7)) * 0.5
    return torch.where(code == 0x7F, 0.0, scale)


@frozen(kw_only=True)
class TableBlocks:
    """Describes blocks whose codes index one table, and decodes them.

    :ivar levels: the table; its length is a power of two
    :ivar group_size: number of consecutive elements that share a scale
    :ivar codes: unpacks uint8 ``[blocks, bytes]`` to uint8 ``[blocks, elements]``
    :ivar scales: reads scales, float32 ``[blocks, groups]``, from uint8 ``[blocks, bytes]``
    """

    levels: tuple[int, ...]
    group_size: int
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], Tensor]

    def decode(self, blocks: Tensor) -> Tensor:
        """Decode blocks: uint8 ``[blocks, bytes]`` -> float32 ``[blocks, elements]``."""
        table = torch.tensor(self.levels, dtype=torch.float32, device=blocks.device)
        return scaled(table[self.codes(blocks).int()], self.scales(blocks))


IQ4_NL: Final = TableBlocks(
    levels=IQ4_VALUES,
    group_size=32,
    codes=lambda blocks: nibbles(blocks[:, 2:], 16),
    scales=lambda blocks: half(blocks, 0),
)
"""32 elements in 18 bytes."""

IQ4_XS: Final = TableBlocks(
    levels=IQ4_VALUES, group_size=32, codes=lambda blocks: nibbles(blocks[:, 8:], 16), scales=_iq4_xs_scales
)
"""256 elements in 136 bytes, with a 6-bit scale per 32 elements."""

TQ1_0: Final = TableBlocks(
    levels=TERNARY_VALUES, group_size=256, codes=_tq1_0_codes, scales=lambda blocks: half(blocks, 52)
)
"""256 elements in 54 bytes: -1, 0 and 1."""

TQ2_0: Final = TableBlocks(
    levels=TERNARY_VALUES,
    group_size=256,
    codes=lambda blocks: bit_pairs(blocks[:, :64], 32),
    scales=lambda blocks: half(blocks, 64),
)
"""256 elements in 66 bytes: -1, 0, 1 and 2 in two bits each."""

MXFP4: Final = TableBlocks(
    levels=E2M1_VALUES, group_size=32, codes=lambda blocks: nibbles(blocks[:, 1:], 16), scales=_mxfp4_scales
)
"""32 elements in 17 bytes; the scale is a power of two."""

NVFP4: Final = TableBlocks(
    levels=E2M1_VALUES, group_size=16, codes=lambda blocks: nibbles(blocks[:, 4:], 8), scales=_nvfp4_scales
)
"""64 elements in 36 bytes, with an 8-bit scale per 16 elements."""

Q1_0: Final = TableBlocks(
    levels=(-1, 1),
    group_size=128,
    codes=lambda blocks: bits_in_order(blocks[:, 2:]),
    scales=lambda blocks: half(blocks, 0),
)
"""128 elements in 18 bytes: one bit each, set for the scale and clear for its negative."""
