"""Write weights in the formats of quantized checkpoints, as each format's own documents say, in plain numpy.

What is written comes with its values, by the format's formula: readers are judged by these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "WRITERS",
    "Written",
    "awq",
    "bit_stream",
    "bitsandbytes",
    "compressed_fp4",
    "compressed_fp8",
    "compressed_integers",
    "compressed_settings",
    "fp8",
    "gptq",
    "hqq",
    "mlx",
    "modelopt",
    "mxfp4",
    "pack_checkpoint",
    "pack_tensors",
    "section_of",
    "torchao",
]

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@frozen
class Written:
    """Holds a matrix in a format.

    :ivar tensors: by what their names end in
    :ivar values: float32, the values that these stand for
    """

    tensors: dict[str, Tensor]
    values: Tensor


Writer = Callable[[Tensor], Written]


def bit_stream(codes: _Ints, bits: int) -> Tensor:
    """Return rows of codes as int32 words, filled from the lowest bit on; the last word is filled up with zeros."""
    each = (codes[:, :, None] >> np.arange(bits)) & 1
    stream = each.reshape(len(codes), -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def _affine(
    weight: _Floats, group_of: _Ints, bits: int, *, symmetric: bool
) -> tuple[_Ints, npt.NDArray[np.float32], _Ints]:
    """Quantize to whole numbers.

    :param group_of: the group of each column
    :returns: codes, ``[rows, cols]``; scales, rounded to float16, and zero points, ``[rows, groups]``
    """
    top, groups = 2**bits - 1, int(group_of.max()) + 1
    scales = np.empty((len(weight), groups), np.float32)
    zeros = np.empty((len(weight), groups), np.int64)
    for group in range(groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = np.maximum((high - low) / top, 1e-6)
        scales[:, group] = scale.astype(np.float16)
        zeros[:, group] = (top + 1) // 2 if symmetric else np.clip(np.round(-low / scale), 0, top)
    codes = np.clip(np.round(weight / scales[:, group_of]) + zeros[:, group_of], 0, top).astype(np.int64)
    return codes, scales, zeros


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    act_order: bool = False,
    symmetric: bool = False,
    version: int = 1,
) -> Written:
    """Write a matrix as AutoGPTQ does."""
    values, cols = weight.double().numpy(), weight.shape[1]
    size = cols if group_size == -1 else group_size
    group_of = np.arange(cols) // size
    if act_order:
        group_of = group_of[np.random.default_rng(cols).permutation(cols)]
    codes, scales, zeros = _affine(values, group_of, bits, symmetric=symmetric)
    # Zero points of 0 cannot be written in the first version for all bits.
    stored = zeros if version == 2 else np.maximum(zeros, 1) - 1
    zeros = stored if version == 2 else stored + 1
    return Written(
        {
            ".qweight": bit_stream(codes, bits).t().contiguous(),
            ".qzeros": bit_stream(stored.T, bits),
            ".scales": torch.from_numpy(scales.T.copy()).half(),
            ".g_idx": torch.from_numpy(group_of.astype(np.int32)),
        },
        torch.from_numpy((codes - zeros[:, group_of]) * scales[:, group_of]).float(),
    )


def awq(weight: Tensor, *, group_size: int = 32) -> Written:
    """Write a matrix as AutoAWQ does for its "gemm" version."""
    values, (rows, cols) = weight.double().numpy(), weight.shape
    group_of = np.arange(cols) // (cols if group_size == -1 else group_size)
    codes, scales, zeros = _affine(values, group_of, 4, symmetric=False)

    def words(of_inputs: _Ints) -> Tensor:
        packed = np.zeros((len(of_inputs), rows // 8), np.int64)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed |= of_inputs[:, output::8] << 4 * place
        return torch.from_numpy(packed.astype(np.uint32).view(np.int32))

    return Written(
        {".qweight": words(codes.T), ".qzeros": words(zeros.T), ".scales": torch.from_numpy(scales.T.copy()).half()},
        torch.from_numpy((codes - zeros[:, group_of]) * scales[:, group_of]).float(),
    )


def fp8(weight: Tensor, *, block: tuple[int, int] = (128, 128)) -> Written:
    """Write a matrix in e4m3 with one scale for each block, as DeepSeek's and Qwen's checkpoints have it."""
    codes, values, scales = _float8(weight, *block)
    return Written({".weight": codes, ".weight_scale_inv": scales}, values)


def _float8(weight: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to e4m3.

    :returns: codes, values, and one scale for each block, float32
    """
    rows, cols = weight.shape
    scales = torch.empty(-(-rows // high), -(-cols // wide))
    of_each = torch.empty_like(weight)
    for row in range(len(scales)):
        for col in range(scales.shape[1]):
            part = slice(row * high, row * high + high), slice(col * wide, col * wide + wide)
            scales[row, col] = of_each[part] = weight[part].abs().max() / 448
    codes = (weight / of_each).to(torch.float8_e4m3fn)
    return codes, codes.float() * of_each, scales


def mlx(weight: Tensor, *, bits: int = 4, group_size: int = 32, minima: str = ".biases") -> Written:
    """Write a matrix as MLX does in its affine mode."""
    values, cols = weight.double().numpy(), weight.shape[1]
    groups = values.reshape(len(values), -1, group_size)
    low = groups.min(2).astype(np.float16).astype(np.float64)
    scales = ((groups.max(2) - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    codes = np.clip(np.round((groups - low[:, :, None]) / scales[:, :, None]), 0, 2**bits - 1).astype(np.int64)
    return Written(
        {
            ".weight": bit_stream(codes.reshape(-1, cols), bits).view(torch.uint32),
            ".scales": torch.from_numpy(scales).half(),
            minima: torch.from_numpy(low).half(),
        },
        torch.from_numpy((codes * scales[:, :, None] + low[:, :, None]).reshape(-1, cols)).float(),
    )


_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e2m1(scaled: _Floats) -> tuple[Tensor, _Floats]:
    """Round rows to 4-bit floating point numbers.

    :returns: two in a byte, and their values
    """
    codes = np.abs(scaled[:, :, None] - _E2M1).argmin(2).astype(np.uint8)
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), _E2M1[codes]


def _mx_exponents(weight: Tensor) -> npt.NDArray[np.int64]:
    """Return, for each 32 columns, the exponent by which the largest is at most 6."""
    largest = weight.double().abs().view(len(weight), -1, 32).amax(2)
    exponents: _Ints = torch.log2(largest / 6).ceil().long().numpy()
    return exponents


def mxfp4(weight: Tensor) -> Written:
    """Write a matrix as gpt-oss has its experts'."""
    exponents = _mx_exponents(weight)
    of_each = np.repeat(2.0**exponents, 32, axis=1)
    codes, values = _e2m1(weight.double().numpy() / of_each)
    return Written(
        {
            ".weight_blocks": codes.view(len(codes), -1, 16),
            ".weight_scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
        },
        torch.from_numpy(values * of_each).float(),
    )


def _nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, float, Tensor]:
    """Write a matrix in NVFP4.

    :returns: codes, scales, by what they are to be multiplied, values
    """
    groups = weight.view(len(weight), -1, 16)
    largest = groups.abs().amax(2)
    factor = float(np.float32(largest.max() / 6 / 448))
    scales = (largest / 6 / factor).to(torch.float8_e4m3fn)
    of_each = (scales.double() * factor).repeat_interleave(16, 1).numpy()
    codes, values = _e2m1(weight.double().numpy() / of_each)
    return codes, scales, factor, torch.from_numpy(values * of_each).float()


def modelopt(weight: Tensor, *, algorithm: str = "NVFP4") -> Written:
    """Write a matrix as Model Optimizer does."""
    if algorithm == "FP8":
        codes, values, scales = _float8(weight, *weight.shape)
        return Written({".weight": codes, ".weight_scale": scales.view(())}, values)
    codes, of_groups, factor, values = _nvfp4(weight)
    return Written(
        {".weight": codes, ".weight_scale": of_groups, ".weight_scale_2": torch.tensor(factor)},
        values,
    )


def compressed_fp4(weight: Tensor, *, mx: bool) -> Written:
    """Write a matrix as compressed-tensors does for its formats of 4-bit floating point numbers."""
    if mx:
        written = mxfp4(weight)
        tensors = {
            ".weight_packed": written.tensors[".weight_blocks"].flatten(1),
            ".weight_scale": written.tensors[".weight_scales"],
        }
        return Written(tensors, written.values)
    codes, scales, factor, values = _nvfp4(weight)
    tensors = {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": torch.tensor([1 / factor])}
    return Written(tensors, values)


def compressed_fp8(weight: Tensor, *, block: tuple[int, int]) -> Written:
    """Write a matrix as compressed-tensors does for "float-quantized"."""
    codes, values, scales = _float8(weight, *block)
    return Written({".weight": codes, ".weight_scale": scales}, values)


def compressed_integers(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    packed: bool = True,
    act_order: bool = False,
) -> Written:
    """Write a matrix as compressed-tensors does for "pack-quantized" and "int-quantized".

    :param group_size: -1: one group for a row
    """
    values, (rows, cols) = weight.double().numpy(), weight.shape
    group_of = np.arange(cols) // (cols if group_size == -1 else group_size)
    if act_order:
        group_of = group_of[np.random.default_rng(cols).permutation(cols)]
    codes, scales, zeros = _affine(values, group_of, bits, symmetric=symmetric)
    tensors = {".weight_scale": torch.from_numpy(scales).half()}
    middle = 2 ** (bits - 1)
    if packed:
        tensors |= {".weight_packed": bit_stream(codes, bits), ".weight_shape": torch.tensor([rows, cols])}
        if not symmetric:
            tensors[".weight_zero_point"] = bit_stream(zeros.T, bits).t().contiguous()
    else:
        tensors[".weight"] = torch.from_numpy(codes - middle).to(torch.int8)
        if not symmetric:
            tensors[".weight_zero_point"] = torch.from_numpy(zeros - middle).to(torch.int8)
    if act_order:
        tensors[".weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return Written(tensors, torch.from_numpy((codes - zeros[:, group_of]) * scales[:, group_of]).float())


def compressed_settings(form: str, **weights: object) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group.

    :param weights: what it says of weights
    """
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "quantization_status": "compressed",
    }


# Quantiles of the normal distribution, as QLoRA's authors have them; and 4-bit floating point in bitsandbytes' order.
_NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_MAP: Final = tuple(sign * each / 12 for sign in (1, -1) for each in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def bitsandbytes(
    weight: Tensor, *, kind: str = "nf4", block: int = 32, nested: bool = True, storage: torch.dtype = torch.uint8
) -> Written:
    """Write a matrix as bitsandbytes does: kind "nf4", "fp4" or "int8"."""
    values = weight.double().numpy()
    if kind == "int8":
        largest = np.abs(values).max(1).astype(np.float32)
        rounded = np.round(values / largest[:, None] * 127)
        tensors = {
            ".weight": torch.from_numpy(rounded).to(torch.int8),
            ".SCB": torch.from_numpy(largest),
            ".weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return Written(tensors, torch.from_numpy(rounded * largest[:, None] / 127).float())
    flat = values.reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    absmax = np.abs(blocks).max(1).astype(np.float32)
    levels = np.array(_NF4 if kind == "nf4" else _FP4_MAP, np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    parts: dict[str, Tensor] = {".weight.quant_map": torch.from_numpy(levels)}
    if nested:
        table, offset = np.linspace(-1, 1, 256, dtype=np.float32), float(absmax.mean())
        groups = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
        in_turn = np.abs(groups).max(1).astype(np.float32)
        codes = np.abs((groups / in_turn[:, None])[:, :, None] - table).argmin(2)
        parts |= {
            ".weight.absmax": torch.from_numpy(codes.reshape(-1)[: len(absmax)].astype(np.uint8)),
            ".weight.nested_absmax": torch.from_numpy(in_turn),
            ".weight.nested_quant_map": torch.from_numpy(table),
        }
        absmax = (table[codes] * in_turn[:, None]).reshape(-1)[: len(absmax)] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        parts[".weight.absmax"] = torch.from_numpy(absmax)
    chosen = np.abs((blocks / absmax[:, None])[:, :, None] - levels).argmin(2)
    in_order = chosen.reshape(-1)[: len(flat)].astype(np.uint8)
    packed = torch.from_numpy(in_order[0::2] << 4 | in_order[1::2])
    parts[".weight"] = packed.view(storage)[:, None]
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    decoded = (levels[chosen] * absmax[:, None]).reshape(-1)[: len(flat)].reshape(weight.shape)
    return Written(parts, torch.from_numpy(decoded).float())


def hqq(weight: Tensor, *, bits: int = 4, group_size: int = 32, axis: int = 1) -> Written:
    """Write a matrix as hqq does for safetensors."""
    values = weight.double().numpy()
    groups = values.reshape(-1, group_size) if axis == 1 else values.reshape(group_size, -1)
    low, high = groups.min(axis, keepdims=True), groups.max(axis, keepdims=True)
    scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    zero = (-low / scale).astype(np.float16).astype(np.float64)
    codes = np.clip(np.round(groups / scale + zero), 0, 2**bits - 1).astype(np.int64)
    per = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}[bits]
    padded = np.pad(codes, ((0, -len(codes) % per), (0, 0)))
    packed = np.zeros((len(padded) // per, codes.shape[1]), np.int64)
    for part in np.split(padded, per):
        packed = packed << bits | part
    tensors = {
        ".W_q": torch.from_numpy(packed.astype(np.int32 if bits == 3 else np.uint8)),
        ".scale": torch.from_numpy(scale).half(),
        ".zero": torch.from_numpy(zero).half(),
        ".shape": torch.tensor(weight.shape),
        ".nbits": torch.tensor(bits, dtype=torch.int32),
        ".group_size": torch.tensor(group_size, dtype=torch.int32),
        ".axis": torch.tensor(axis, dtype=torch.int32),
    }
    return Written(tensors, torch.from_numpy(((codes - zero) * scale).reshape(weight.shape)).float())


def torchao(weight: Tensor, *, bits: int = 8, group_size: int = -1, symmetric: bool = True) -> Written:
    """Write a matrix as torchao does to safetensors: integers in bytes, or with 0 bits FP8."""
    if not bits:
        codes, values, scales = _float8(weight, 1, weight.shape[1])
        return Written({"._weight_qdata": codes, "._weight_scale": scales}, values)
    written = compressed_integers(weight, bits=bits, group_size=group_size, symmetric=symmetric, packed=False)
    names = {".weight": "qdata", ".weight_scale": "scale", ".weight_zero_point": "zero_point"}
    return Written({f"._weight_{names[suffix]}": each for suffix, each in written.tensors.items()}, written.values)


_FP4: Final = {"num_bits": 4, "type": "float", "symmetric": True}

WRITERS: Final[Mapping[str, tuple[Writer, Mapping[str, Any]]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}),
    "compressed-tensors int8": (
        partial(compressed_integers, bits=8, group_size=-1, packed=False),
        compressed_settings("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    ),
    "compressed-tensors int4": (
        partial(compressed_integers, symmetric=False),
        compressed_settings("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
    ),
    "compressed-tensors fp8": (
        partial(compressed_fp8, block=(1, 2**16)),
        compressed_settings("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
    ),
    "compressed-tensors nvfp4": (
        partial(compressed_fp4, mx=False),
        compressed_settings("nvfp4-pack-quantized", **_FP4, strategy="tensor_group", group_size=16),
    ),
    "compressed-tensors mxfp4": (
        partial(compressed_fp4, mx=True),
        compressed_settings("mxfp4-pack-quantized", **_FP4, strategy="group", group_size=32),
    ),
    "bitsandbytes nf4": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes int8": (
        partial(bitsandbytes, kind="int8"),
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "torchao": (partial(torchao, symmetric=False), {"quant_method": "torchao", "quant_type": {"default": {}}}),
    "hqq": (hqq, {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}),
    "fp8": (
        fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
    "mlx": (mlx, {"group_size": 32, "bits": 4}),
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
}
"""The formats with a quantization_config for matrices that are written by default."""


def section_of(settings: Mapping[str, Any]) -> str:
    """Return where config.json has settings: MLX's section has a name of its own."""
    return "quantization_config" if "quant_method" in settings else "quantization"


def pack_tensors(dense: Mapping[str, Tensor], write: Writer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pack every projection of a layer.

    :returns: what a file holds then, and the values of all tensors, by their names in the dense checkpoint
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        if name.endswith("_proj.weight"):
            written = write(tensor)
            values[name] = written.values
            tensors |= {name.removesuffix(".weight") + suffix: part for suffix, part in written.tensors.items()}
        else:
            values[name] = tensors[name] = tensor
    return tensors, values


def pack_checkpoint(dense: Path, packed: Path, write: Writer, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Write a checkpoint whose every projection of a layer is packed.

    :param dense: the checkpoint to start from
    :param packed: the directory to write into
    :param settings: the quantization_config
    :returns: the values of all tensors, by their names in the dense checkpoint
    """
    tensors, values = pack_tensors(load_file(dense / "model.safetensors"), write)
    packed.mkdir(parents=True, exist_ok=True)
    save_file(tensors, packed / "model.safetensors")
    for file in dense.iterdir():
        if file.name != "model.safetensors":
            (packed / file.name).write_bytes(file.read_bytes())
    config = json.loads((dense / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {section_of(settings): settings}))
    return values
