"""Write weights in the formats of quantized checkpoints, as each format's own documents say, in plain numpy.

What is written comes with its values, by the format's formula: readers are judged by these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["WRITERS", "Written", "awq", "bit_stream", "gptq", "pack_checkpoint", "pack_tensors"]

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


WRITERS: Final[Mapping[str, tuple[Writer, Mapping[str, Any]]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
}
"""The formats with a quantization_config for matrices that are written by default."""


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


def pack_checkpoint(
    dense: Path, packed: Path, write: Writer, settings: Mapping[str, Any], *, section: str = "quantization_config"
) -> dict[str, Tensor]:
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
    (packed / "config.json").write_text(json.dumps(config | {section: settings}))
    return values
