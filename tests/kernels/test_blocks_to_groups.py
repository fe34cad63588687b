"""Blocks whose codes name entries of a table, as groups and as the native kernels hold them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_weights import library, needs_library
from paged_sdk.kernels.native.grouped import pack_grouped
from paged_sdk.kernels.native.packed import decode_rows
from paged_sdk.kernels.quantized.blocks_to_groups import as_groups
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.groups_to_blocks import as_blocks
from paged_sdk.kernels.quantized.stored_matrix import UnreadRows

ROWS = 35
#: By type: bytes of a block that hold float16 scales, or those that hold scales of eight bits with the least and the
#: most of them; and the bits of a weight as it is packed.
TABLES: dict[str, tuple[slice, tuple[int, int] | None, float]] = {
    "IQ4_NL": (slice(0, 2), None, 4.5),
    "IQ4_XS": (slice(0, 2), None, 4.5),
    "MXFP4": (slice(0, 1), (112, 127), 4.5),
    "NVFP4": (slice(0, 4), (0, 127), 5.0),
    "Q1_0": (slice(0, 2), None, 2.25),
    "TQ1_0": (slice(52, 54), None, 2.125),
    "TQ2_0": (slice(64, 66), None, 2.125),
}
every_table = pytest.mark.parametrize("name", TABLES)


def blocks(name: str, cols: int = 512) -> Tensor:
    """Return random codes with scales as files have them, ``[rows, bytes of a row]``."""
    form, (where, bounds, _) = BLOCK_FORMATS[tensor_type_of(name)], TABLES[name]
    generator = torch.Generator().manual_seed(len(name))
    shape = (ROWS, cols // form.elements, form.num_bytes)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    part = raw[:, :, where]
    if bounds is None:
        part.copy_((torch.randn(*shape[:2], 1, generator=generator) * 0.01).half().view(torch.uint8))
    else:
        part.copy_(torch.randint(*bounds, part.shape, generator=generator, dtype=torch.uint8))
    return raw.flatten(1)


@every_table
def test_groups_have_the_numbers_of_the_blocks(name: str) -> None:
    raw = blocks(name)
    read: list[tuple[int, int]] = []

    def rows(first: int, last: int) -> Tensor:
        read.append((first, last))
        return raw[first:last]

    stored = BlockMatrix(tensor_type_of(name), UnreadRows(shape=(ROWS, raw.shape[1]), itemsize=1, read=rows))
    grouped = as_groups(stored)
    assert grouped is not None
    assert read == []  # until rows are asked for
    assert torch.equal(grouped.decoded(), BlockMatrix(tensor_type_of(name), raw).decoded())
    (part, *others) = grouped.parts(16)
    assert (read[1:], len(others)) == ([(0, 16), (16, 32), (32, 35)], 2)
    assert part.bits == (1 if name == "Q1_0" else 2 if name.startswith("TQ") else 4)


@needs_library
@every_table
def test_they_are_packed_at_their_own_bits(name: str) -> None:
    stored = BlockMatrix(tensor_type_of(name), blocks(name))
    grouped = as_groups(stored)
    assert grouped is not None
    packed = pack_grouped(library(), [grouped], num_threads=1)
    assert packed.num_bytes == -(-ROWS // 16) * 16 * (512 * TABLES[name][2] / 8 + 8)  # two units for each row
    got, expected = decode_rows(library(), packed, torch.arange(ROWS), num_threads=1), stored.decoded()
    # IQ4_XS's scales are products of 17 bits, which float16 rounds.
    torch.testing.assert_close(got, expected, rtol=2**-11 if name == "IQ4_XS" else 1e-6, atol=0)


@every_table
def test_as_the_blocks_that_gpus_multiply(name: str) -> None:
    stored = BlockMatrix(tensor_type_of(name), blocks(name))
    grouped = as_groups(stored)
    assert grouped is not None
    found = as_blocks(grouped.matrix())
    if name == "NVFP4":  # a block has a scale for 32
        assert found is None
        return
    assert found is not None
    assert BLOCK_FORMATS[found.tensor_type].name == ("Q8_0" if name in ("IQ4_NL", "IQ4_XS", "MXFP4") else "Q4_1")
    got, expected = found.decoded(), stored.decoded()
    if name in ("IQ4_XS", "MXFP4"):  # whose scales float16 rounds
        torch.testing.assert_close(got, expected, rtol=2**-9, atol=2**-11 * float(expected.abs().max()))
    else:
        assert torch.equal(got, expected)


def test_other_blocks_have_no_table() -> None:
    assert [form.name for form in BLOCK_FORMATS.values() if form.table is not None] == sorted(
        TABLES, key=tensor_type_of
    )
    assert as_groups(BlockMatrix(tensor_type_of("Q4_0"), torch.zeros(2, 18, dtype=torch.uint8))) is None
