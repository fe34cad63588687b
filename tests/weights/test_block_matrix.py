"""Matrices as a checkpoint stores them: the blocks of a GGUF file in Hugging Face's order, nothing of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import save_file

import tiny
from native_weights import TYPES, random_matrix
from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS, BlockMatrix
from paged_sdk.weights.gguf_file import GgufFile
from paged_sdk.weights.gguf_source import GgufSource
from paged_sdk.weights.safetensors_source import SafetensorsSource

CPU = torch.device("cpu")


@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_matrix_and_nothing_else_has_blocks(family: str, quantization: str, tmp_path: Path) -> None:
    """Not the norms, nor biases, nor routers, which nobody quantizes; of llama's queries and keys the values are in
    Hugging Face's order, and so these."""
    source = GgufSource(tiny.make_gguf(tmp_path, family=family, quantization=quantization))
    for name in source.names():
        values = source.tensor(name, torch.float32, CPU)
        matrix = source.block_matrix(name)
        assert (matrix is None) == (values.ndim == 1 or name.endswith(".gate.weight")), name
        if matrix is not None:
            assert matrix.shape == values.shape
            assert matrix.tensor_type == gguf.GGMLQuantizationType[quantization].value
            assert matrix.blocks.is_contiguous()
            assert torch.equal(matrix.decoded(), values)
            assert torch.equal(matrix.decoded(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("overrides", [{}, {"num_key_value_heads": 1}, {"head_dim": 32}])
def test_rows_of_queries_and_keys_are_in_hugging_faces_order(overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.build_gguf_model("llama", **overrides)
    source = GgufSource(tiny.make_gguf(tmp_path, quantization="Q8_0", **overrides))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        matrix = source.block_matrix(name)
        assert matrix is not None
        torch.testing.assert_close(matrix.decoded(), model.state_dict()[name], rtol=0, atol=0.01)


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16"])
def test_plain_numbers_have_no_blocks(quantization: str, tmp_path: Path) -> None:
    source = GgufSource(tiny.make_gguf(tmp_path, quantization=quantization))
    assert [name for name in source.names() if source.block_matrix(name) is not None] == []


def test_blocks_share_the_map_and_outlive_the_source(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", quantization="Q8_0")
    source = GgufSource(path)
    name = "model.layers.0.mlp.up_proj.weight"
    first, again = source.block_matrix(name), source.block_matrix(name)
    assert first is not None
    assert again is not None
    assert first.blocks.data_ptr() == again.blocks.data_ptr()
    source.close()
    assert torch.equal(first.blocks, GgufFile(path).tensors["blk.0.ffn_up.weight"].blocks())
    with pytest.raises(CheckpointError, match="is closed"):
        source.block_matrix(name)


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"no tensor for 'lm_head\.weight'"):
        source.block_matrix("lm_head.weight")


def test_safetensors_have_no_blocks(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.block_matrix("lm_head.weight") is None
    assert source.block_matrix("model.norm.weight") is None
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.embed_tokens\.weight'"):
        source.block_matrix("model.embed_tokens.weight")


@pytest.mark.parametrize("tensor_type", TYPES)
def test_parts_share_the_blocks(tensor_type: int) -> None:
    matrix = random_matrix(tensor_type, 12, 512, torch.Generator().manual_seed(0))
    parts = matrix.split([7, 1, 4])
    assert [part.shape for part in parts] == [(7, 512), (1, 512), (4, 512)]
    assert torch.equal(torch.cat([part.decoded() for part in parts]), matrix.decoded())
    assert all(part.blocks.untyped_storage().data_ptr() == matrix.blocks.data_ptr() for part in parts)
    assert matrix.blocks.shape[1] == 512 // BLOCK_FORMATS[tensor_type].elements * BLOCK_FORMATS[tensor_type].num_bytes


def test_a_type_that_nobody_knows_has_no_shape() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="type 99 cannot be read"):
        _ = BlockMatrix(99, torch.zeros(1, 18, dtype=torch.uint8)).shape
