"""f8e4m3 codes are decoded in pairs: by the interpreter, and by instructions that are followed here one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from paged_case import PagedCase
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.triton.attention_codes import CONVERT, SHIFT, Decoder, as_pairs, split_codes
from paged_sdk.kernels.triton.attention_tile import OFFSET_UNIT, offset_columns
from paged_sdk.kernels.triton.paged_attention import paged_attention

NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def all_codes() -> Tensor:
    """Return every code as an even and as an odd element, beside another one."""
    codes = torch.arange(256, dtype=torch.uint8)
    return torch.cat((torch.stack((codes, codes.flip(0)), 1), torch.stack((codes.roll(77), codes), 1))).view(
        torch.float8_e4m3fn
    )


def halves(bits: int) -> list[float]:
    """Return the two float16 numbers of a register, the lower one first."""
    return torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.uint16).view(torch.float16).tolist()


def permute(a: int, b: int, selector: int) -> int:
    """Choose four bytes of two registers; a selector's bit 3 asks for copies of the byte's sign."""
    pool = (b << 32 | a).to_bytes(8, "little")
    chosen = [
        (0xFF if pool[nibble & 7] & 0x80 else 0) if nibble & 8 else pool[nibble & 7]
        for nibble in (selector >> 4 * place & 0xF for place in range(4))
    ]
    return int.from_bytes(chosen, "little")


def convert(pair: int) -> int:
    """Convert two codes to two float16 numbers."""
    codes = torch.tensor([pair & 0xFF, pair >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
    (both,) = codes.to(torch.float16).view(torch.int32).tolist()
    return int(both) & 0xFFFFFFFF


INSTRUCTIONS: Final = MappingProxyType[str, Callable[..., int]](
    {
        "prmt.b32": permute,
        "shl.b32": lambda a, by: a << by & 0xFFFFFFFF,
        "and.b32": lambda a, b: a & b,
        "cvt.rn.f16x2.e4m3x2": convert,
    }
)


def follow(text: str, register: int) -> tuple[int, int]:
    """Return what the instructions leave in their two results, given their operand."""
    values: dict[str, int] = {"$2": register}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in text.strip("{}").split(";"):
        opcode, _, operands = line.strip().partition(" ")
        if not opcode or opcode == ".reg":
            continue
        names = re.findall(r"[$\w]+", operands)
        if opcode == "mov.b32":  # into two halves
            low, high, source = names
            values[low], values[high] = value(source) & 0xFFFF, value(source) >> 16
        else:
            values[names[0]] = INSTRUCTIONS[opcode](*map(value, names[1:]))
    return values["$0"], values["$1"]


@pytest.mark.parametrize(("text", "factor"), [(CONVERT, 1.0), (SHIFT, 256.0)])
def test_instructions_decode_every_code(text: str, factor: float) -> None:
    codes = all_codes()
    # Two pairs to a register, as a matrix instruction has them.
    registers = codes.view(torch.uint8).view(-1, 4).contiguous().view(torch.int32).flatten().tolist()
    decoded = [follow(text, register & 0xFFFFFFFF) for register in registers]
    even, odd = (torch.tensor([halves(each[part]) for each in decoded]).flatten() * factor for part in (0, 1))
    expected = codes.float()
    # By shifts, the codes of NaN are the numbers 480 and -480: what is written to a cache has none.
    known = expected.isfinite() if factor != 1.0 else torch.ones_like(expected, dtype=torch.bool)
    for result, part in ((even, 0), (odd, 1)):
        assert torch.equal(result[known[:, part]].nan_to_num(1e4), expected[:, part][known[:, part]].nan_to_num(1e4))


@triton.jit
def split_kernel(pairs: tl.tensor, out: tl.tensor, n: tl.constexpr, decoder: tl.constexpr) -> None:
    place = tl.arange(0, n)
    even, odd = split_codes(tl.load(pairs + place), decoder)
    tl.store(out + 2 * place, even.to(tl.float32))
    tl.store(out + 2 * place + 1, odd.to(tl.float32))


@pytest.mark.parametrize(
    "decoder", [Decoder.PLAIN, *(pytest.param(each, marks=NEEDS_GPU) for each in (Decoder.INTEGER, Decoder.HARDWARE))]
)
def test_kernels_decode_every_code(decoder: Decoder, triton_device: torch.device) -> None:
    if decoder == Decoder.HARDWARE and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device converts no f8e4m3")
    codes = all_codes()
    out = torch.empty(codes.shape, device=triton_device)
    split_kernel[(1,)](as_pairs(codes.to(triton_device)), out, n=len(codes), decoder=int(decoder))
    factor = 256.0 if decoder == Decoder.INTEGER else 1.0
    known = codes.float().isfinite()
    assert torch.equal(out.cpu()[known] * factor, codes.float()[known])


def attended(case: PagedCase, device: torch.device, scale: float) -> Tensor:
    def placed(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    assert case.k_scale is not None
    assert case.v_scale is not None
    cache = LayerCache(*map(placed, (case.key_cache, case.value_cache, case.k_scale, case.v_scale)))
    rows = PagedRows(
        block_tables=placed(case.block_tables),
        context_lens=placed(case.context_lens),
        cu_seqlens_q=placed(case.cu_seqlens_q),
        max_seqlen_q=case.max_seqlen_q,
        max_context_len=case.max_context_len,
    )
    return paged_attention(placed(case.query), cache, rows, ScoreOptions(scale=scale)).cpu()


@pytest.mark.parametrize("magnitude", [2.0**100, 2.0**-100])
def test_queries_out_of_float16s_range(magnitude: float, triton_device: torch.device) -> None:
    """Each row is divided by a power of two of its own, which changes no bit, its own or its neighbors'."""
    case = PagedCase([(3, 40)], (2, 1, 32), dtype=torch.bfloat16, quantized=True)
    usual = attended(case, triton_device, 0.3)
    case.query *= magnitude
    assert torch.equal(attended(case, triton_device, 0.3 / magnitude), usual)
    case.query /= magnitude
    case.query[1] *= magnitude
    assert torch.equal(attended(case, triton_device, 0.3)[[0, 2]], usual[[0, 2]])


@pytest.mark.parametrize("factor", [2.0**60, 2.0**-60, 0.0])
def test_values_of_very_different_scales(factor: float, triton_device: torch.device) -> None:
    """Each key's weight times its value's scale stays within float16, whatever the scales are."""
    case = PagedCase([(1, 37), (2, 20)], (2, 1, 16), dtype=torch.bfloat16, quantized=True)
    assert case.v_scale is not None
    case.v_scale.flatten(0, 1)[case.slots[0][::3]] *= factor
    case._vectors[1][case.slots[0][::3]] *= factor
    expected = case.expected(scale=0.3)
    output = attended(case, triton_device, 0.3).double()
    size = expected.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(output / size, expected / size, rtol=3e-2, atol=3e-2)


@triton.jit
def offset_kernel(offset: tl.tensor, out: tl.tensor, n: tl.constexpr) -> None:
    place = tl.arange(0, n)
    even, odd = offset_columns(offset + 2 * place, place < n, tl.float16)
    tl.store(out + 2 * place, tl.sum(even.to(tl.float32), 1) / OFFSET_UNIT)
    tl.store(out + 2 * place + 1, tl.sum(odd.to(tl.float32), 1) / OFFSET_UNIT)


def test_two_columns_have_all_of_an_offset(triton_device: torch.device) -> None:
    """The size of an offset is a hundred times that of what differs between keys: float16 alone would lose that."""
    sizes = 10.0 ** torch.arange(-3.0, 5.0)
    offset = (torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * sizes).flatten()
    out = torch.empty_like(offset, device=triton_device)
    offset_kernel[(1,)](offset.to(triton_device), out, n=64)
    torch.testing.assert_close(out.cpu(), offset, rtol=2.0**-20, atol=2.0**-18)
