"""Runs the few instructions of PTX that kernels have in their text, on whole tensors: no device and no assembler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["run"]

_WORD: Final = 0xFFFFFFFF


def run(text: str, num_outputs: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a text, and return its outputs.

    :param inputs: int64, bits of registers without a sign; operands ``$n`` after those of the outputs
    """
    registers: dict[str, Tensor] = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}
    for line in re.findall(r"[^;{}\n]*(?:\{[^{}\n]*\}[^;{}\n]*)*;", text):
        if not line.startswith("."):
            _step(line.rstrip(";"), registers, inputs[0])
    return [registers[f"${i}"] for i in range(num_outputs)]


def _step(line: str, registers: dict[str, Tensor], like: Tensor) -> None:
    name, rest = line.split(maxsplit=1)
    operands = re.findall(r"\{[^}]*\}|[^\s,{}]+", rest)
    if name == "mov.b32" and operands[0].startswith("{"):
        low, high = operands[0].strip("{}").replace(" ", "").split(",")
        value = _read(operands[1], registers, like)
        registers[low], registers[high] = value & 0xFFFF, value >> 16
        return
    values = [_read(operand, registers, like) for operand in operands[1:]]
    registers[operands[0]] = _INSTRUCTIONS[name](*values)


def _read(operand: str, registers: Mapping[str, Tensor], like: Tensor) -> Tensor:
    if operand.startswith("{"):
        low, high = operand.strip("{}").replace(" ", "").split(",")
        return registers[low] | registers[high] << 16
    return registers[operand] if operand in registers else torch.full_like(like, int(operand, 0))


def _permuted(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
    both = low | high << 32
    found = torch.zeros_like(low)
    for i in range(4):
        byte = int(selector.flatten()[0]) >> 4 * i & 7
        found |= (both >> 8 * byte & 0xFF) << 8 * i
    return found


def _logic(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    found = torch.zeros_like(a)
    for case in range(8):
        if int(table.flatten()[0]) >> case & 1:
            one, two, three = (value if case & bit else ~value for value, bit in ((a, 4), (b, 2), (c, 1)))
            found |= one & two & three
    return found & _WORD


def _halves(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low, high = (half.to(torch.uint16).view(dtype).double() for half in (bits & 0xFFFF, bits >> 16))
    return low, high


def _packed(low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    bits = [number.to(dtype).view(torch.uint16).long() for number in (low, high)]
    return bits[0] | bits[1] << 16


def _fused(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def multiply_and_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        triples = zip(*(_halves(value, dtype) for value in (a, b, c)), strict=True)
        low, high = (one * two + three for one, two, three in triples)
        return _packed(low, high, dtype)

    return multiply_and_add


def _product(a: Tensor, b: Tensor) -> Tensor:
    (low, high), (other_low, other_high) = _halves(a, torch.float16), _halves(b, torch.float16)
    return _packed(low * other_low, high * other_high, torch.float16)


def _widened(half: Tensor) -> Tensor:
    return half.to(torch.uint16).view(torch.float16).float().view(torch.int32).long() & _WORD


def _number(bits: Tensor) -> Tensor:
    return bits.to(torch.uint32).view(torch.float32)


_INSTRUCTIONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "prmt.b32": _permuted,
    "lop3.b32": _logic,
    "shr.u32": lambda value, by: value >> by,
    "shl.b32": lambda value, by: (value << by) & _WORD,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda value: value,
    "fma.rn.bf16x2": _fused(torch.bfloat16),
    "fma.rn.f16x2": _fused(torch.float16),
    "mul.rn.f16x2": _product,
    "cvt.f32.f16": _widened,
    "cvt.rn.bf16x2.f32": lambda high, low: _packed(_number(low), _number(high), torch.bfloat16),
}
