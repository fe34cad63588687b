"""Matrices of quantized safetensors: each format's values, and what is wrong with files that are damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paged_sdk.errors import CheckpointError, ModelLoadError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.packed_codes import unpacked
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.quantized.format import find_formats
from paged_sdk.weights.source import WeightSource
from quantized_writers import (
    WRITERS,
    Written,
    awq,
    bit_stream,
    bitsandbytes,
    compressed_fp8,
    compressed_integers,
    compressed_settings,
    fp8,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    section_of,
    torchao,
)

CPU = torch.device("cpu")


def weight(rows: int = 64, cols: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def opened(directory: Path, tensors: Mapping[str, Tensor], settings: object) -> WeightSource:
    """Write a checkpoint of one matrix "m", and open it."""
    save_file({f"m{suffix}": tensor for suffix, tensor in tensors.items()}, directory / "model.safetensors")
    section = section_of(settings) if isinstance(settings, dict) and "group_size" in settings else "quantization_config"
    (directory / "config.json").write_text(json.dumps({section: settings}))
    return open_checkpoint(directory).source


def read_matrix(directory: Path, tensors: Mapping[str, Tensor], settings: object) -> Tensor:
    """Read a matrix as a model does: its shape first."""
    source = opened(directory, tensors, settings)
    source.shape("m.weight")
    return source.matrix("m.weight").decoded()


def check_values(source: WeightSource, written: Written, name: str = "m.weight") -> None:
    """Compare the matrix, any of its rows, and the tensor with the writer's values."""
    assert list(source.names()) == [name]
    shape = tuple(written.values.shape)
    assert source.shape(name) == shape
    matrix, values = source.matrix(name), written.values
    assert matrix.shape == shape
    torch.testing.assert_close(matrix.decoded(), values, rtol=1e-6, atol=1e-6)
    for rows in (slice(1), slice(3, 21), slice(shape[0] - 5, shape[0])):
        torch.testing.assert_close(matrix.rows(rows).decoded(), values[rows], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(source.tensor(name, torch.float32, CPU), values, rtol=1e-6, atol=1e-6)
    source.close()


@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_streams(bits: int) -> None:
    codes = torch.randint(1 << bits, (5, 64), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpacked(bit_stream(codes.numpy(), bits), bits), codes.to(torch.uint8))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, act_order: bool, symmetric: bool, version: int, tmp_path: Path) -> None:
    written = gptq(weight(), bits=bits, act_order=act_order, symmetric=symmetric, version=version)
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": ("gptq", "gptq_v2")[version - 1],
    }
    source = opened(tmp_path, written.tensors, settings)
    assert not source.matrix("m.weight").is_dense
    check_values(source, written)


def test_gptq_with_one_group_for_a_row_and_without_names_of_groups(tmp_path: Path) -> None:
    written = gptq(weight(), group_size=-1)
    del written.tensors[".g_idx"]
    check_values(opened(tmp_path, written.tensors, {"quant_method": "gptq", "bits": 4, "group_size": -1}), written)


def test_gptq_with_groups_of_different_sizes_is_decoded(tmp_path: Path) -> None:
    written = gptq(weight(), version=2, symmetric=True)
    groups = written.tensors[".g_idx"].clone()
    groups[:7] = 2
    scales = written.tensors[".scales"].float()
    codes = unpacked(written.tensors[".qweight"].t(), 4).float()
    values = (codes - 8) * scales[groups.long()].t()
    source = opened(
        tmp_path,
        written.tensors | {".g_idx": groups},
        {**WRITERS["gptq"][1], "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
    )
    assert source.matrix("m.weight").is_dense
    check_values(source, Written({}, values))


def test_gptqs_first_version_borrows_for_a_zero_point_of_0(tmp_path: Path) -> None:
    """GPTQModel takes 1 from every zero point of a word at once."""
    written = gptq(weight().abs() + 1, version=2)
    zeros = written.tensors[".qzeros"]
    assert 0 in unpacked(zeros, 4)
    source = opened(tmp_path, written.tensors | {".qzeros": zeros - 0x11111111}, WRITERS["gptq"][1])
    check_values(source, written)


def test_gptq_with_exceptions_has_what_its_tensors_say(tmp_path: Path) -> None:
    settings = {**WRITERS["gptq"][1], "dynamic": {"+:.*down.*": {"bits": 8, "group_size": 16}, "-:.*gate.*": {}}}
    for bits, group_size in [(4, 32), (8, 16)]:
        written = gptq(weight(), bits=bits, group_size=group_size)
        check_values(opened(tmp_path, written.tensors, settings), written)


@pytest.mark.parametrize("group_size", [32, -1])
def test_awq(group_size: int, tmp_path: Path) -> None:
    written = awq(weight(), group_size=group_size)
    check_values(opened(tmp_path, written.tensors, {**WRITERS["awq"][1], "group_size": group_size}), written)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized by 'aqlm': supported are awq, .*gptq"),
        ({"bits": 4}, "'an unnamed method'"),
        ({"quant_method": ["gptq"]}, "'an unnamed method'"),
        ({"quant_method": "gptq", "bits": 5}, r"config\.json: quantization_config\.bits = 5: supported are 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin': supported are gptq, gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv': supported are gemm"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3: supported are 4"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point = False"),
    ],
)
def test_formats_that_are_not_supported(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedQuantizationError, match=message) as caught:
        opened(tmp_path, {".weight": torch.zeros(1)}, settings)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.path == tmp_path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (7, r"config\.json: quantization_config = 7: expected an object"),
        ({"quant_method": "gptq"}, r"quantization_config\.bits is missing"),
        ({"quant_method": "gptq", "bits": "4"}, "bits = '4': expected a whole number"),
        ({"quant_method": "gptq", "bits": True}, "bits = True: expected a whole number"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0: expected a whole number of at least 1"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 10**400}, "group_size = .*: expected a whole number"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": 1}, "dynamic = 1: expected an object"),
        ({"quant_method": "awq", "bits": 4, "zero_point": 1}, "zero_point = 1: expected true or false"),
        ({"quant_method": "awq", "bits": 4, "version": 1}, "version = 1: expected a string"),
    ],
)
def test_settings_that_are_malformed(settings: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, {".weight": torch.zeros(1)}, settings)


@pytest.mark.parametrize("name", WRITERS)
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    write, settings = WRITERS[name]
    written = write(weight())
    for suffix in written.tensors.keys() - {".g_idx", ".weight_format", "._weight_zero_point"}:
        rest = {each: tensor for each, tensor in written.tensors.items() if each != suffix}
        with pytest.raises(ModelLoadError, match=r"tensor 'm\.") as caught:
            opened(tmp_path, rest, settings).shape("m.weight")
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_a_tensor_of_another_shape_or_type_is_named(name: str, tmp_path: Path) -> None:
    """Whichever of them is cut by a row, or has more dimensions or numbers of another kind; or the matrix has another
    shape then, which no model takes, or its values all the same, where bytes count alone.
    """
    write, settings = WRITERS[name]
    written = write(weight())
    matrix = read_matrix(tmp_path, written.tensors, settings)
    for suffix, tensor in written.tensors.items():
        others = [tensor.double() if tensor.dtype.itemsize < 8 else tensor.float(), tensor[None, None].contiguous()]
        for other in [*others, tensor[:-1].clone()] if tensor.ndim else others:
            try:
                values = read_matrix(tmp_path, written.tensors | {suffix: other}, settings)
            except ModelLoadError as error:
                assert str(tmp_path / "model.safetensors") in str(error)
                assert "tensor 'm." in str(error)
            else:
                assert values.shape != written.values.shape or torch.equal(values, matrix)


def test_bits_and_groups_that_the_config_does_not_name(tmp_path: Path) -> None:
    settings = WRITERS["gptq"][1]
    for bits, group_size in [(8, 32), (2, 32), (4, 48), (4, -1)]:
        written = gptq(weight(), bits=bits, group_size=group_size)
        with pytest.raises(CheckpointError, match=r"'m\.qweight' .* codes of 4 bits in groups of 32 columns"):
            opened(tmp_path, written.tensors, settings).shape("m.weight")
    with pytest.raises(CheckpointError, match=r"'m\.scales' has shape \[2, 64\]: expected \[3, 64\]"):
        opened(tmp_path, awq(weight(), group_size=48).tensors, WRITERS["awq"][1]).shape("m.weight")


def test_groups_that_are_not_there(tmp_path: Path) -> None:
    written = gptq(weight())
    for wrong in (-1, 3):
        groups = written.tensors[".g_idx"].clone()
        groups[5] = wrong
        source = opened(tmp_path, written.tensors | {".g_idx": groups}, WRITERS["gptq"][1])
        with pytest.raises(CheckpointError, match=r"'m\.g_idx' names groups outside of the 3 there are"):
            source.matrix("m.weight")


def test_modules_that_are_not_packed_are_read_as_they_are(tmp_path: Path) -> None:
    write, settings = WRITERS["gptq"]
    plain = {
        ".norm.weight": torch.randn(8).bfloat16(),
        ".head.weight": torch.randn(8, 8).half(),
        ".bias": torch.ones(8),
        ".position_ids": torch.arange(8)[None],
    }
    source = opened(tmp_path, write(weight()).tensors | plain, {**settings, "modules_to_not_convert": ["head"]})
    assert set(source.names()) == {"m.weight", "m.norm.weight", "m.head.weight", "m.bias", "m.position_ids"}
    assert "m.qweight" not in source
    assert source.matrix("m.head.weight").is_dense
    for suffix, tensor in plain.items():
        assert torch.equal(source.tensor(f"m{suffix}", torch.float32, CPU), tensor.float())
    for name in ("m.qweight", "m.nothing"):
        with pytest.raises(CheckpointError, match=name):
            source.matrix(name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_codes_of_nobody_knows_what_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    source = opened(tmp_path, {".weight": torch.zeros(8, 8).to(dtype)}, WRITERS["gptq"][1])
    for read in (source.shape, source.matrix):
        with pytest.raises(CheckpointError, match=r"'m\.weight' has elements of .* nothing beside it says"):
            read("m.weight")


def test_every_format_has_a_writer_here() -> None:
    methods = {settings.get("quant_method", "mlx") for _, settings in WRITERS.values()}
    for each in find_formats():
        assert methods & set(each.methods), each


def test_uqff_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "q4k-0.uqff").write_bytes(bytes(64))
    save_file({"a": torch.zeros(1)}, tmp_path / "residual.safetensors")
    for path in (tmp_path, tmp_path / "q4k-0.uqff"):
        with pytest.raises(UnsupportedQuantizationError, match=r"q4k-0\.uqff is a UQFF file") as caught:
            open_checkpoint(path)
        assert caught.value.quantization == "uqff"


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 32), (4, 48), (4, -1), (5, 32), (6, -1), (8, 32)])
def test_integers_of_compressed_tensors(bits: int, group_size: int, symmetric: bool, tmp_path: Path) -> None:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    settings = compressed_settings("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy)
    written = compressed_integers(weight(), bits=bits, group_size=group_size, symmetric=symmetric)
    check_values(opened(tmp_path, written.tensors, settings), written)


@pytest.mark.parametrize(("group_size", "symmetric"), [(-1, False), (32, True), (32, False)])
def test_int8_of_compressed_tensors(group_size: int, symmetric: bool, tmp_path: Path) -> None:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    settings = compressed_settings("int-quantized", num_bits=8, symmetric=symmetric, **strategy)
    written = compressed_integers(weight(), bits=8, group_size=group_size, symmetric=symmetric, packed=False)
    check_values(opened(tmp_path, written.tensors, settings), written)


def test_compressed_tensors_in_the_order_of_activations(tmp_path: Path) -> None:
    written = compressed_integers(weight(), act_order=True, symmetric=False)
    settings = WRITERS["compressed-tensors int4"][1]
    check_values(opened(tmp_path, written.tensors, settings), written)
    groups = written.tensors[".weight_g_idx"].clone()
    codes = unpacked(written.tensors[".weight_packed"], 4).float()
    zeros = unpacked(written.tensors[".weight_zero_point"].t(), 4).t().float()
    groups[:9] = 1  # groups of different sizes
    of_columns = groups.long()
    values = (codes - zeros[:, of_columns]) * written.tensors[".weight_scale"].float()[:, of_columns]
    source = opened(tmp_path, written.tensors | {".weight_g_idx": groups}, settings)
    assert source.matrix("m.weight").is_dense
    check_values(source, Written({}, values))


def test_compressed_tensors_of_several_groups_have_what_their_tensors_say(tmp_path: Path) -> None:
    settings = compressed_settings("mixed-precision", num_bits=4, strategy="group", group_size=32)
    settings["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "strategy": "channel"}, "targets": ["re:(a+)+"]}
    for written in (
        compressed_integers(weight()),
        compressed_integers(weight(), bits=8, group_size=-1),
        compressed_fp8(weight(), block=(1, 96)),
    ):
        check_values(opened(tmp_path, written.tensors, settings), written)
    with pytest.raises(CheckpointError, match=r"'m\.weight_packed' of shape \[64, 9\] does not have \[64, 96\] codes"):
        opened(tmp_path, compressed_integers(weight(), bits=3).tensors, settings).shape("m.weight")


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("pack-quantized", "transform_config", {"config_groups": {"R1": {}}}),
        ("pack-quantized", "sparsity_config", {"format": "sparse-24-bitmask"}),
        ("marlin-24", "format", "marlin-24"),
    ],
)
def test_compressed_tensors_that_are_more_than_quantized(form: str, key: str, value: object, tmp_path: Path) -> None:
    settings = compressed_settings(form, num_bits=4) | {key: value}
    with pytest.raises(UnsupportedQuantizationError, match=f"quantization_config\\.{key} = .*: supported are"):
        opened(tmp_path, compressed_integers(weight()).tensors, settings)


@pytest.mark.parametrize("block", [(128, 128), (48, 32), (1, 96), (64, 96)])
@pytest.mark.parametrize("name", ["fp8", "compressed-tensors"])
def test_float8_with_scales_for_blocks_rows_or_all(name: str, block: tuple[int, int], tmp_path: Path) -> None:
    if name == "fp8":
        settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": list(block)}
        written = fp8(weight(), block=block)
    else:
        settings = compressed_settings("float-quantized", num_bits=8, strategy="block", block_structure=list(block))
        written = compressed_fp8(weight(), block=block)
    check_values(opened(tmp_path, written.tensors, settings), written)


def test_float8_of_one_scale_beside_one_of_activations(tmp_path: Path) -> None:
    written = fp8(weight(), block=(64, 96))
    scale = written.tensors.pop(".weight_scale_inv").view(())
    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    source = opened(tmp_path, {**written.tensors, ".weight_scale": scale, ".input_scale": torch.ones(())}, settings)
    assert set(source.names()) == {"m.weight", "m.input_scale"}
    torch.testing.assert_close(source.matrix("m.weight").decoded(), written.values)


def test_stacked_experts_in_float8(tmp_path: Path) -> None:
    """Each expert's blocks begin anew, wherever its rows end."""
    written = [fp8(weight(40, 96, seed), block=(16, 32)) for seed in range(3)]
    tensors = {
        f".gate_up_proj{suffix}": torch.stack([each.tensors[f".weight{suffix}"] for each in written])
        for suffix in ("", "_scale_inv")
    }
    source = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 32]})
    assert source.shape("m.gate_up_proj") == (3, 40, 96)
    values = torch.stack([each.values for each in written])
    torch.testing.assert_close(source.tensor("m.gate_up_proj", torch.float32, CPU), values)
    torch.testing.assert_close(
        source.matrix("m.gate_up_proj").rows(slice(30, 90)).decoded(), values.flatten(0, 1)[30:90]
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(bits: int, tmp_path: Path) -> None:
    written = mlx(weight(), bits=bits)
    check_values(opened(tmp_path, written.tensors, {"group_size": 32, "bits": bits}), written)


def test_mlx_with_settings_of_a_modules_own(tmp_path: Path) -> None:
    settings = {"group_size": 32, "bits": 4, "m": {"group_size": 48, "bits": 6}, "lm_head": False}
    written = mlx(weight(), bits=6, group_size=48)
    check_values(opened(tmp_path, written.tensors, settings), written)
    with pytest.raises(CheckpointError, match=r"'m\.weight' has 18 words in a row: expected whole groups of 32 codes"):
        opened(tmp_path, written.tensors, {"group_size": 32, "bits": 4}).shape("m.weight")
    with pytest.raises(UnsupportedQuantizationError, match=r"mode = 'nvfp4': supported are affine"):
        opened(tmp_path, written.tensors, {"group_size": 32, "bits": 4, "mode": "nvfp4"})


def test_what_transformers_writes_for_metal(tmp_path: Path) -> None:
    written = mlx(weight(), minima=".qbiases")
    check_values(opened(tmp_path, written.tensors, {"quant_method": "metal", "bits": 4, "group_size": 32}), written)


def test_stacked_experts_in_mxfp4(tmp_path: Path) -> None:
    written = [mxfp4(weight(40, 96, seed)) for seed in range(3)]
    tensors = {
        f".gate_up_proj{suffix}": torch.stack([each.tensors[f".weight{suffix}"] for each in written])
        for suffix in ("_blocks", "_scales")
    }
    source = opened(tmp_path, tensors, {"quant_method": "mxfp4"})
    assert source.shape("m.gate_up_proj") == (3, 40, 96)
    values = torch.stack([each.values for each in written])
    assert torch.equal(source.tensor("m.gate_up_proj", torch.float32, CPU), values)
    assert torch.equal(source.matrix("m.gate_up_proj").rows(slice(30, 90)).decoded(), values.flatten(0, 1)[30:90])


def test_model_optimizers_fp8_and_its_file_of_settings(tmp_path: Path) -> None:
    written = modelopt(weight(), algorithm="FP8")
    check_values(opened(tmp_path, written.tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}), written)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    check_values(open_checkpoint(tmp_path).source, written)
    with pytest.raises(UnsupportedQuantizationError, match="quant_algo = 'W4A16_AWQ': supported are FP8, NVFP4"):
        opened(tmp_path, written.tensors, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"})
    scaled = {**written.tensors, ".pre_quant_scale": torch.ones(96)}
    with pytest.raises(CheckpointError, match=r"'m\.pre_quant_scale' scales activations"):
        opened(tmp_path, scaled, {"quant_method": "modelopt", "quant_algo": "FP8"}).shape("m.weight")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [32, 64, 96])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind: str, block: int, nested: bool, tmp_path: Path) -> None:
    """Blocks of 64 go on from one row of 96 to the next."""
    written = bitsandbytes(weight(), kind=kind, block=block, nested=nested)
    source = opened(tmp_path, written.tensors, {"quant_method": "bitsandbytes"})
    assert source.matrix("m.weight").is_dense == (block == 64)
    check_values(source, written)


def test_bitsandbytes_in_elements_of_another_type(tmp_path: Path) -> None:
    written = bitsandbytes(weight(), storage=torch.bfloat16)
    check_values(opened(tmp_path, written.tensors, {"quant_method": "bitsandbytes"}), written)


def test_bitsandbytes_rows_of_odd_length(tmp_path: Path) -> None:
    written = bitsandbytes(weight(64, 33), nested=False)
    check_values(opened(tmp_path, written.tensors, {"quant_method": "bitsandbytes"}), written)


@pytest.mark.parametrize(
    "state",
    [
        b"{", b"[" * 5000, b"7", b"\xff", b'{"blocksize": 32}', b'{"blocksize": 31, "shape": [64, 96]}',
        b'{"blocksize": 32, "shape": [64, 96, 1]}', b'{"blocksize": 32, "shape": [64, -96]}',
        b'{"blocksize": 32, "shape": [64, 96], "nested_blocksize": 0, "nested_offset": 1.0}',
    ],
)  # fmt: skip
def test_bitsandbytes_states_that_say_nothing(state: bytes, tmp_path: Path) -> None:
    written = bitsandbytes(weight(), nested=False)
    written.tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    source = opened(tmp_path, written.tensors, {"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match=r"'m\.weight\.quant_state\.bitsandbytes__nf4' (is not|does not)"):
        source.shape("m.weight")


def test_bitsandbytes_int8_in_a_gpus_order_is_refused(tmp_path: Path) -> None:
    write, settings = WRITERS["bitsandbytes int8"]
    tensors = {**write(weight()).tensors, ".weight_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"'m\.weight_format' names an order"):
        opened(tmp_path, tensors, settings).shape("m.weight")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq(bits: int, axis: int, tmp_path: Path) -> None:
    written = hqq(weight(), bits=bits, axis=axis)
    source = opened(tmp_path, written.tensors, {"quant_method": "hqq"})
    assert source.matrix("m.weight").is_dense == (axis == 0)
    check_values(source, written)


def test_hqq_whose_groups_cross_rows(tmp_path: Path) -> None:
    written = hqq(weight(), group_size=64)
    source = opened(tmp_path, written.tensors, {"quant_method": "hqq"})
    assert source.matrix("m.weight").is_dense
    check_values(source, written)


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        (".nbits", 5, "has 5 bits along axis 1"),
        (".axis", 2, "has 4 bits along axis 2"),
        (".group_size", 0, "is 0 for a matrix"),
        (".group_size", 36, r"is 36 for a matrix of \[64, 96\]"),
        (".quant_zero", 1, "zero points are quantized"),
        (".nbits", 8, r"'m\.W_q' has 3072 bytes: expected 6144"),
    ],
)
def test_hqq_that_does_not_fit_itself(suffix: str, value: int, message: str, tmp_path: Path) -> None:
    tensors = {**hqq(weight()).tensors, suffix: torch.tensor(value, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors, {"quant_method": "hqq"}).shape("m.weight")


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(0, -1), (4, 32), (8, -1)])
def test_torchao(bits: int, group_size: int, symmetric: bool, tmp_path: Path) -> None:
    written = torchao(weight(), bits=bits, group_size=group_size, symmetric=symmetric)
    check_values(opened(tmp_path, written.tensors, {"quant_method": "torchao"}), written)


def test_torchao_that_is_packed_for_one_kernel_is_refused(tmp_path: Path) -> None:
    tensors = torchao(weight()).tensors
    for more, message in (
        ({"._weight_qdata": torch.zeros(64, 12, dtype=torch.int32)}, r"'m\._weight_qdata' has elements of torch.int32"),
        ({"._weight_act_pre_scale": torch.ones(96)}, r"'m\._weight_act_pre_scale' scales activations"),
    ):
        with pytest.raises(CheckpointError, match=message):
            opened(tmp_path, {**tensors, **more}, {"quant_method": "torchao"}).shape("m.weight")
