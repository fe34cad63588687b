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
from paged_sdk.weights.bit_streams import unpacked
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.quantized_format import find_formats
from paged_sdk.weights.source import WeightSource
from quantized_writers import WRITERS, Written, awq, bit_stream, gptq

CPU = torch.device("cpu")


def weight(rows: int = 64, cols: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def opened(
    directory: Path, tensors: Mapping[str, Tensor], settings: object, section: str = "quantization_config"
) -> WeightSource:
    """Write a checkpoint of one matrix "m", and open it."""
    save_file({f"m{suffix}": tensor for suffix, tensor in tensors.items()}, directory / "model.safetensors")
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
    for suffix in written.tensors.keys() - {".g_idx"}:
        rest = {each: tensor for each, tensor in written.tensors.items() if each != suffix}
        with pytest.raises(ModelLoadError, match=r"tensor 'm\.") as caught:
            opened(tmp_path, rest, settings).shape("m.weight")
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_a_tensor_of_another_shape_or_type_is_named(name: str, tmp_path: Path) -> None:
    """Whichever of them is cut by a row or has numbers of another kind."""
    write, settings = WRITERS[name]
    written = write(weight())
    for suffix, tensor in written.tensors.items():
        for other in (tensor[:-1], tensor.double() if tensor.dtype.itemsize < 8 else tensor.float(), tensor[None]):
            with pytest.raises(ModelLoadError, match=r"tensor 'm\.") as caught:
                read_matrix(tmp_path, written.tensors | {suffix: other.contiguous()}, settings)
            assert str(tmp_path / "model.safetensors") in str(caught.value)


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
    }
    source = opened(tmp_path, write(weight()).tensors | plain, {**settings, "modules_to_not_convert": ["head"]})
    assert set(source.names()) == {"m.weight", "m.norm.weight", "m.head.weight", "m.bias"}
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
    methods = {settings.get("quant_method") for _, settings in WRITERS.values()}
    for each in find_formats():
        assert methods & set(each.methods), each


def test_uqff_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "q4k-0.uqff").write_bytes(bytes(64))
    save_file({"a": torch.zeros(1)}, tmp_path / "residual.safetensors")
    for path in (tmp_path, tmp_path / "q4k-0.uqff"):
        with pytest.raises(UnsupportedQuantizationError, match=r"q4k-0\.uqff is a UQFF file") as caught:
            open_checkpoint(path)
        assert caught.value.quantization == "uqff"
