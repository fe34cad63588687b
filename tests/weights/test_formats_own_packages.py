"""Matrices that a format's own package has written, judged by what the same package decodes.

The packages are no part of the project's environments: each test runs where its package is installed, with
``python -m pytest -m long -W default``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paged_sdk.weights.checkpoint import open_checkpoint
from quantized_writers import compressed_settings, section_of

pytestmark = pytest.mark.long


def weight(cols: int = 96) -> Tensor:
    return torch.randn(64, cols, generator=torch.Generator().manual_seed(0))


def read(directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], **options: Any) -> Tensor:
    """Write a checkpoint of one matrix "m", and read its values."""
    named = {f"m{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors", **options)
    (directory / "config.json").write_text(json.dumps({section_of(settings): settings}))
    source = open_checkpoint(directory).source
    matrix = source.matrix("m.weight")
    assert source.shape("m.weight") == matrix.shape
    return matrix.decoded()


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        *(
            ("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
             | {"group_size": 32})
            for bits in (2, 3, 4, 5, 8) for symmetric in (True, False)
        ),
        ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block"}
         | {"block_structure": [32, 32]}),
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
         | {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group"}
         | {"group_size": 32}),
    ],
)  # fmt: skip
def test_compressed_tensors(form: str, weights: dict[str, Any], tmp_path: Path) -> None:
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    from_range = pytest.importorskip("compressed_tensors.quantization.utils").calculate_qparams
    args = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, format=form)
    values = weight()
    state: dict[str, Tensor] = {"weight": values}
    if form == "nvfp4-pack-quantized":
        largest = values.view(64, -1, 16).abs().amax(2)
        factor = (448 * 6 / largest.max()).reshape(1)
        state |= {"weight_scale": (largest / 6 * factor).to(torch.float8_e4m3fn).float(), "weight_global_scale": factor}
    elif form == "mxfp4-pack-quantized":
        largest = values.view(64, -1, 32).abs().amax(2)
        state["weight_scale"] = 2.0 ** torch.ceil(torch.log2(largest / 6))
    elif weights["strategy"] == "block":
        blocks = values.view(2, 32, 3, 32).abs().amax((1, 3))
        state["weight_scale"] = blocks / 448
    else:
        groups = values.view(64, -1, weights.get("group_size", 96))
        scale, zero = from_range(groups.amin(2), groups.amax(2), args)
        state |= {"weight_scale": scale.float(), "weight_zero_point": zero.to(torch.int8)}
        if weights["type"] == "float":
            del state["weight_zero_point"]
    compressor = pytest.importorskip("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(packed), scheme)["weight"].float()
    found = read(tmp_path, {f".{name}": each for name, each in packed.items()}, compressed_settings(form, **weights))
    exact = form not in ("nvfp4-pack-quantized", "mxfp4-pack-quantized")  # which are decoded to bfloat16 there
    torch.testing.assert_close(found, expected, rtol=1e-6 if exact else 1e-2, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(bits: int, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    parts = mx.quantize(mx.array(weight().numpy()), group_size=32, bits=bits)
    expected = torch.from_numpy(np.array(mx.dequantize(*parts, group_size=32, bits=bits)))
    codes, scales, biases = (torch.from_numpy(np.array(each)) for each in parts)
    found = read(tmp_path, {".weight": codes, ".scales": scales, ".biases": biases}, {"group_size": 32, "bits": bits})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_of_4_bits(kind: str, block: int, nested: bool, tmp_path: Path) -> None:
    # Not 96 columns: of blocks that go on from one row to the next, 0.50.2 itself decodes other values on the CPU.
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(
        weight(128), blocksize=block, quant_type=kind, compress_statistics=nested, quant_storage=torch.uint8
    )
    expected = functional.dequantize_4bit(packed, state)
    tensors = {".weight": packed} | {f".weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    found = read(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_bitsandbytes_of_8_bits(tmp_path: Path) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    codes, largest, _ = functional.int8_vectorwise_quant(weight().half())
    expected = functional.int8_vectorwise_dequant(codes, largest)
    found = read(tmp_path, {".weight": codes, ".SCB": largest.view(-1)}, {"quant_method": "bitsandbytes"})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq(bits: int, axis: int, tmp_path: Path) -> None:
    quantize: Any = pytest.importorskip("hqq.core.quantize")
    settings = quantize.BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
    linear = torch.nn.Linear(96, 64, bias=False)
    linear.weight.data = weight()
    layer = quantize.HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
    found = read(
        tmp_path,
        {f".{name}": each for name, each in layer.state_dict().items()},
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits}}},
    )
    torch.testing.assert_close(found, layer.dequantize(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
def test_torchao(kind: str, tmp_path: Path) -> None:
    api: Any = pytest.importorskip("torchao.quantization")
    form: Any = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    types: Any = torch
    settings = {
        "int8": lambda: api.Int8WeightOnlyConfig(version=2),
        "int4": lambda: api.IntxWeightOnlyConfig(weight_dtype=types.int4, granularity=api.PerGroup(32)),
        "float8": api.Float8WeightOnlyConfig,
    }
    linear = torch.nn.Linear(96, 64, bias=False)
    linear.weight.data = weight()
    model = torch.nn.Sequential(linear)
    api.quantize_(model, settings[kind]())
    packed: Any = model[0].weight.data
    tensors, metadata = form.flatten_tensor_state_dict({"m.weight": packed})
    found = read(
        tmp_path,
        {name.removeprefix("m"): each for name, each in tensors.items()},
        {"quant_method": "torchao", "quant_type": {"default": {}}},
        metadata=metadata,
    )
    # A code times its scale, less 128 scales: float32 rounds the product, a hundred thousand times finer than a step.
    torch.testing.assert_close(found, packed.dequantize().float(), rtol=1e-6, atol=1e-5)
