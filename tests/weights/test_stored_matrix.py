"""Matrices as a checkpoint stores them: the blocks of a GGUF file in Hugging Face's order, the numbers of safetensors;
and parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from gguf_files import write_gguf
from native_weights import random_blocks, random_matrix
from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, stacked
from paged_sdk.kernels.quantized.stored_matrix import DecodedMatrix, DenseMatrix, StoredMatrix
from paged_sdk.weights.gguf.file import GgufFile
from paged_sdk.weights.gguf.source import GgufSource
from paged_sdk.weights.safetensors.source import SafetensorsSource

CPU = torch.device("cpu")


@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_matrix_and_nothing_else_has_blocks(family: str, quantization: str, tmp_path: Path) -> None:
    """Not the norms, nor biases, nor routers, which nobody quantizes; of llama's queries and keys the values are in
    Hugging Face's order, and so these."""
    source = GgufSource(tiny.make_gguf(tmp_path, family=family, quantization=quantization))
    for name in source.names():
        values = source.tensor(name, torch.float32, CPU)
        assert source.shape(name) == values.shape
        if values.ndim == 1:
            continue
        matrix = source.matrix(name)
        assert matrix.shape == values.shape
        assert matrix.is_dense == name.endswith(".gate.weight"), name
        assert torch.equal(matrix.decoded(), values)
        if isinstance(matrix, BlockMatrix):
            assert matrix.tensor_type == gguf.GGMLQuantizationType[quantization].value
            assert matrix.blocks.is_contiguous()
            assert torch.equal(matrix.decoded(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("overrides", [{}, {"num_key_value_heads": 1}, {"head_dim": 32}])
def test_rows_of_queries_and_keys_are_in_hugging_faces_order(overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.build_gguf_model("llama", **overrides)
    source = GgufSource(tiny.make_gguf(tmp_path, quantization="Q8_0", **overrides))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        torch.testing.assert_close(source.matrix(name).decoded(), model.state_dict()[name], rtol=0, atol=0.01)


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16"])
def test_plain_numbers_are_as_they_are_stored(quantization: str, tmp_path: Path) -> None:
    source = GgufSource(tiny.make_gguf(tmp_path, quantization=quantization))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[quantization]
    for name in source.names():
        if len(source.shape(name)) == 2:
            matrix = source.matrix(name)
            assert isinstance(matrix, DenseMatrix)
            assert matrix.weight.dtype is dtype
            assert torch.equal(matrix.decoded(), source.tensor(name, torch.float32, CPU))


def test_blocks_are_read_when_they_are_asked_for_until_the_source_is_closed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", quantization="Q8_0")
    source = GgufSource(path)
    matrix = source.matrix("model.layers.0.mlp.up_proj.weight")
    assert isinstance(matrix, BlockMatrix)
    first, again, kept = matrix.blocks, matrix.blocks, matrix.to(CPU)
    assert first.data_ptr() != again.data_ptr()
    part = matrix.rows(slice(16, 32))
    assert torch.equal(part.blocks, first[16:32])
    assert torch.equal(part.rows(slice(3, 5)).blocks, first[19:21])
    assert [len(each.blocks) for each in part.parts(6)] == [6, 6, 4]
    source.close()
    for unread in (matrix, part):
        with pytest.raises(CheckpointError, match="is closed"):
            _ = unread.blocks
    assert torch.equal(first, GgufFile(path).tensors["blk.0.ffn_up.weight"].blocks())
    assert torch.equal(kept.blocks, first)


def test_some_rows_of_queries_and_keys(tmp_path: Path) -> None:
    """Parts begin and end within heads, whose rows a file has in another order."""
    source = GgufSource(tiny.make_gguf(tmp_path, quantization="Q8_0"))
    matrix = source.matrix("model.layers.0.self_attn.q_proj.weight")
    whole = matrix.decoded()
    for first, last in [(0, 1), (3, 21), (15, 17), (0, len(whole))]:
        assert torch.equal(matrix.rows(slice(first, last)).decoded(), whole[first:last])


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"no tensor for 'lm_head\.weight'"):
        source.matrix("lm_head.weight")


def test_safetensors_hold_numbers(tmp_path: Path) -> None:
    stack = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"model.norm.weight": torch.ones(4), "experts.gate_up_proj": stack}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.shape("model.norm.weight") == (4,)
    assert source.shape("experts.gate_up_proj") == (3, 4, 6)
    matrix = source.matrix("experts.gate_up_proj")
    assert isinstance(matrix, DenseMatrix)
    assert matrix.is_dense
    assert matrix.shape == (12, 6)
    assert matrix.num_bytes == stack.nbytes
    assert torch.equal(matrix.weight, stack.flatten(0, 1))
    for ask in (source.matrix, source.shape):
        with pytest.raises(CheckpointError, match=r"no tensor 'model\.embed_tokens\.weight'"):
            ask("model.embed_tokens.weight")


def matrices() -> Iterator[tuple[str, StoredMatrix, int]]:
    """Return every format, with the columns that share a block."""
    generator = torch.Generator().manual_seed(0)
    for tensor_type, form in BLOCK_FORMATS.items():
        if form.elements > 1:
            blocks = torch.randint(
                256, (12, 1024 // form.elements, form.num_bytes), dtype=torch.uint8, generator=generator
            )
            yield form.name, BlockMatrix(tensor_type, blocks.flatten(1)), form.elements
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        dense = DenseMatrix(torch.randn(12, 1024, generator=generator).to(dtype))
        yield str(dtype), dense, 1
    yield "decoded", DecodedMatrix(BlockMatrix(8, random_blocks(8, 12, 1024, generator))), 32


ALL_FORMATS: Final = {name: (matrix, block) for name, matrix, block in matrices()}


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_slices_are_those_of_the_decoded_matrix(name: str) -> None:
    matrix, block = ALL_FORMATS[name]
    whole = matrix.decoded()
    assert matrix.shape == whole.shape
    for rows in (slice(7), slice(7, 8), slice(8, None), slice(3, 3), slice(-2, None), slice(None), slice(10, 99)):
        part = matrix.rows(rows)
        assert part.shape == whole[rows].shape
        assert part.num_bytes * 12 == matrix.num_bytes * len(whole[rows])
        same(part.decoded(), whole[rows])
    step = max(block, 64)
    for cols in (slice(step), slice(step, 3 * step), slice(-step, None), slice(step, step), slice(None)):
        part = matrix.cols(cols)
        assert part.shape == whole[:, cols].shape
        assert part.num_bytes * 1024 == matrix.num_bytes * whole[:, cols].shape[1]
        same(part.decoded(), whole[:, cols])
        both = part.rows(slice(2, 5))
        same(both.decoded(), whole[2:5, cols])


@pytest.mark.parametrize("name", [name for name, (_, block) in ALL_FORMATS.items() if block > 1])
def test_columns_that_cut_a_block_are_refused(name: str) -> None:
    matrix, block = ALL_FORMATS[name]
    for cols in (slice(1, None), slice(block // 2), slice(block, 2 * block + 8)):
        with pytest.raises(UnsupportedQuantizationError, match=f"cut a block of {block} elements"):
            matrix.cols(cols)


def test_rows_share_the_memory() -> None:
    for matrix, _ in ALL_FORMATS.values():
        part = matrix.rows(slice(4, 8))
        if isinstance(matrix, BlockMatrix):
            assert isinstance(part, BlockMatrix)
            assert part.blocks.untyped_storage().data_ptr() == matrix.blocks.untyped_storage().data_ptr()
        if isinstance(matrix, DenseMatrix):
            assert isinstance(part, DenseMatrix)
            assert part.weight.untyped_storage().data_ptr() == matrix.weight.untyped_storage().data_ptr()


def test_matrices_of_one_type_are_stacked() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [random_matrix(12, rows, 512, generator) for rows in (3, 1, 4)]
    whole = stacked(parts)
    assert whole is not None
    assert torch.equal(whole.decoded(), torch.cat([part.decoded() for part in parts]))
    assert stacked([*parts, random_matrix(14, 3, 512, generator)]) is None


def same(got: Tensor, expected: Tensor) -> None:
    """Compare random blocks, whose scales may be NaN, which equals nothing."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_a_type_that_nobody_knows_has_no_shape() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="type 99 cannot be read"):
        _ = BlockMatrix(99, torch.zeros(1, 18, dtype=torch.uint8)).shape
