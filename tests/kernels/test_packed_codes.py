"""Check that codes come out of every form as they went in, by torch and by the native library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from native_weights import library, needs_library
from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.native.grouped import decode_grouped, pack_grouped
from paged_sdk.kernels.native.packed import decode_rows
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.packed_codes import CodeForm, PackedCodes
from quantized_writers import bit_stream

ROWS, COLS, GROUP = 48, 160, 64


def stream(bits: int, codes: Tensor) -> Tensor:
    return bit_stream(codes.long().numpy(), bits)


def columns(bits: int, codes: Tensor) -> Tensor:
    return stream(bits, codes).t().contiguous()


def eight_rows(codes: Tensor) -> Tensor:
    """Put rows 0 2 4 6 1 3 5 7 into a word from its lowest bits on."""
    of_words = codes.t().reshape(COLS, ROWS // 8, 8).long()
    places = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])
    words = (of_words << places).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


#: It maps a form and bits to what puts codes into it.
FORMS: dict[tuple[CodeForm, int], Callable[[Tensor], Tensor]] = {
    **{(CodeForm.STREAM, bits): partial(stream, bits) for bits in range(1, 9)},
    **{(CodeForm.COLUMNS, bits): partial(columns, bits) for bits in (2, 3, 4, 8)},
    (CodeForm.HIGH_FIRST, 4): lambda codes: codes[:, 0::2] << 4 | codes[:, 1::2],
    (CodeForm.SIGNED, 8): lambda codes: (codes.int() - 128).to(torch.int8),
    (CodeForm.OF_EIGHT_ROWS, 4): eight_rows,
}
every_form = pytest.mark.parametrize(("form", "bits"), FORMS, ids=lambda each: getattr(each, "value", str(each)))


def written(form: CodeForm, bits: int) -> tuple[PackedCodes, Tensor]:
    codes = torch.randint(0, 1 << bits, (ROWS, COLS), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    words = FORMS[form, bits](codes)
    return PackedCodes(words=words, form=form, shape=(ROWS, COLS), bits=bits), codes


@every_form
def test_codes_come_out(form: CodeForm, bits: int) -> None:
    packed, codes = written(form, bits)
    assert torch.equal(packed.bytes(), codes)
    for part in (slice(0, 16), slice(16, 40), slice(3, 21)):
        rows = packed.rows(part)
        assert torch.equal(rows if isinstance(rows, Tensor) else rows.bytes(), codes[part])


@every_form
def test_codes_come_out_where_the_words_are(form: CodeForm, bits: int) -> None:
    packed, codes = written(form, bits)
    with torch.device("meta"):  # an operation that names no device makes its tensor there
        assert torch.equal(packed.bytes(), codes)


@needs_library
@every_form
@pytest.mark.parametrize("with_levels", [False, True], ids=["numbers", "levels"])
def test_the_library_reads_them_in_place(form: CodeForm, bits: int, with_levels: bool) -> None:
    packed, codes = written(form, bits)
    generator = torch.Generator().manual_seed(1)
    scales = torch.randn(ROWS, -(-COLS // GROUP), generator=generator).half().float()
    minima = None if with_levels else -3 * scales
    levels = torch.randn(1 << bits, generator=generator) if with_levels else None
    in_file, in_bytes = (
        GroupedMatrix(codes=each, scales=scales, minima=minima, group_size=GROUP, levels=levels, bits=bits)
        for each in (packed, codes)
    )
    for part in (slice(0, ROWS), slice(16, 32)):
        decoded = decode_grouped(library(), in_file.rows(part), num_threads=1)
        assert torch.equal(decoded, in_bytes.rows(part).decoded())
    if with_levels and bits > 4:
        return
    of_file, of_bytes = (pack_grouped(library(), [each], num_threads=1) for each in (in_file, in_bytes))
    assert torch.equal(of_file.data, of_bytes.data)
    if not with_levels:
        torch.testing.assert_close(decode_rows(library(), of_file, torch.arange(ROWS)), in_bytes.decoded())


@every_form
def test_words_that_are_too_few_are_an_error(form: CodeForm, bits: int) -> None:
    packed, _ = written(form, bits)
    for words in (packed.words[:-1], packed.words[:, :-1]):
        with pytest.raises(CheckpointError, match=f"{bits} bits"):
            PackedCodes(words=words, form=form, shape=(ROWS, COLS), bits=bits)
