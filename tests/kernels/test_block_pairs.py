"""What is decoded two weights at a time, by the text of the kernels' own instructions."""

from __future__ import annotations

import ptx
import pytest
import torch
from torch import Tensor

from native_weights import every_triton_type, random_matrix
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockFormat, TritonBlockMatrix

pytest.importorskip("triton")

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of each element, without a sign, in int64."""
    width = 8 * tensor.element_size()
    kinds = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
    return tensor.view(kinds[width]).long() & ((1 << width) - 1)


def twice(half: Tensor) -> Tensor:
    return half * 0x10001


def fields(
    form: TritonBlockFormat, words: Tensor, high: Tensor | None, scales: list[Tensor], dtype: torch.dtype
) -> Tensor:
    """Decode words ``[rows, chunks, words]`` as the kernels do: two neighbors at a time, each half by its own text.

    :param scales: each group's, and then each negative minimum, ``[rows, chunks, 1]``, bits of two halves
    :returns: ``[rows, chunks, fields, words]`` float64
    """
    from paged_sdk.kernels.triton.block_pairs import fields_assembly

    groups = 64 // form.group
    found: list[Tensor] = []
    for half in (0, 1):
        text, _ = fields_assembly(half, form.bits, form.offset, form.has_minima, dtype == torch.bfloat16)
        number = form.fields // 2
        for i in range(number):
            group = (half * number + i) * groups // form.fields
            inputs = [words[..., 0::2], words[..., 1::2]]
            if high is not None:
                inputs.append(high[..., 0::2] | high[..., 1::2] << 16)
            inputs += [scales[j].expand_as(inputs[0]) for j in (group, *((groups + group,) if form.has_minima else ()))]
            decoded = ptx.run(text, number, inputs)[i]
            pair = [(decoded >> 16 * j & 0xFFFF).to(torch.uint16).view(dtype).double() for j in (0, 1)]
            found.append(torch.stack(pair, -1).flatten(-2))
    return torch.stack(found, -2)


def chunked(matrix: TritonBlockMatrix) -> tuple[Tensor, Tensor | None]:
    shape = (matrix.rows, matrix.chunks, matrix.format.words)
    high = None if matrix.high is None else bits_of(matrix.high).view(shape)
    return bits_of(matrix.quants).view(shape), high


def scales_of(matrix: TritonBlockMatrix, dtype: torch.dtype) -> list[Tensor]:
    """Return each group's scale, and then each negative minimum, ``[rows, chunks, 1]``, bits of two halves."""
    from paged_sdk.kernels.triton.block_pairs import scales_assembly

    form = matrix.format
    text, _ = scales_assembly(form.has_minima, form.has_supers, dtype == torch.bfloat16)
    inputs = [bits_of(matrix.scales)]
    if matrix.supers is not None:
        inputs.append(bits_of(matrix.supers).repeat_interleave(4, 1))
    elif matrix.minima is not None:
        inputs.append(bits_of(matrix.minima))
    found = ptx.run(text, 4 if form.has_minima or form.group == 16 else 2, inputs)
    return [twice(half).unsqueeze(-1) for half in found]


@every_triton_type
@halves
def test_weights_are_the_files_rounded_to_halves(tensor_type: int, dtype: torch.dtype) -> None:
    matrix = repack(random_matrix(tensor_type, 5, 512, torch.Generator().manual_seed(0)))
    decoded = fields(matrix.format, *chunked(matrix), scales_of(matrix, dtype), dtype).flatten(1)
    exact = matrix.decoded(torch.float64)
    # Rounding once makes 0.21 of it. Scale and minimum are rounded as well, and where they nearly cancel it counts.
    assert (decoded - exact).norm() <= 0.45 * torch.finfo(dtype).eps * exact.norm()


@every_triton_type
@halves
def test_every_code_is_exact(tensor_type: int, dtype: torch.dtype) -> None:
    form = repack(random_matrix(tensor_type, 1, 256, torch.Generator().manual_seed(0))).format
    codes = torch.arange(1 << form.bits)
    field = codes[:, None].expand(-1, form.fields)  # every field of a word with the same code
    low = ((field & (255 if form.bits == 8 else 15)) << torch.arange(form.fields) * (32 // form.fields)).sum(-1)
    high: Tensor | None = None
    if form.high_positions:
        high = ((field >> 4) << torch.tensor(form.high_positions)).sum(-1)[:, None, None].expand(-1, 1, form.words)
    words = low[:, None, None].expand(-1, 1, form.words)
    one = twice(bits_of(torch.ones(1, 1, 1, dtype=dtype)))
    none = twice(bits_of(torch.zeros(1, 1, 1, dtype=dtype)))
    groups = 64 // form.group
    decoded = fields(form, words, high, [one] * groups + [none] * groups, dtype)
    assert torch.equal(decoded, (codes - form.offset).double()[:, None, None, None].expand_as(decoded))
