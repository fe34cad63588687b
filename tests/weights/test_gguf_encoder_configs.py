"""What GGUF files of encoders leave out, have otherwise, or ask for in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gguf_encoder_files import word_piece_metadata, write_encoder
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.embedding_recipe import read_recipe
from paged_sdk.weights.gguf.mixtures import is_quantizable
from paged_sdk.weights.gguf.source import GgufSource
from tiny_encoder import make_encoder, make_ranker, word_pieces

CPU = torch.device("cpu")
HIDDEN = 64


def write(directory: Path, quantization: str = "F32", **own: Any) -> Path:
    tokenizer = word_piece_metadata(word_pieces(), 256)
    path = directory / f"{quantization}.gguf"
    return write_encoder(directory, path, quantization=quantization, tokenizer=tokenizer, **own)


def rewrite(path: Path, add: dict[str, Any], without: tuple[str, ...] = (), **metadata: Any) -> Path:
    """Write a file again with other tensors.

    :param add: tensors by name
    :param without: what the names of those begin with that are left out
    """
    reader = gguf.GGUFReader(path)
    field: Any = reader.fields["general.architecture"]
    name = str(field.contents())
    writer = gguf.GGUFWriter(path.with_name("rewritten.gguf"), name)
    for key, each in reader.fields.items():
        if key.startswith(("GGUF.", "general.architecture")) or key in metadata:
            continue
        value: Any = each
        kinds = value.types
        writer.add_key_value(key, value.contents(), kinds[0], sub_type=kinds[1] if len(kinds) > 1 else None)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    for tensor in reader.tensors:
        if not tensor.name.startswith(without or ("-",)):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for tensor_name, array in add.items():
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("rewritten.gguf")


@pytest.mark.parametrize(
    ("model_type", "own", "message"),
    [
        ("bert", {"attention__causal": True}, r"bert\.attention\.causal = true"),
        (
            "bert",
            {"embedding_length": 1 << 30},
            r"token_embd\.weight has shape \[256, 64\]: expected rows of 1073741824",
        ),
        ("bert", {"pooling_type": 4}, r"pooling_type is 4, and there is no cls\.output\.weight"),
        ("nomic_bert", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "rope scaling .*yarn"),
        ("modernbert", {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, "rope scaling .*linear"),
        ("modernbert", {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ("modernbert", {"classifier__pooling_type": 3}, r"classifier\.pooling_type = 3"),
        ("modernbert", {"attention__sliding_window_pattern": [True]}, "1 entries for 4 layers"),
    ],
)
def test_what_the_classes_do_not_do_is_refused(
    model_type: str, own: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_encoder(model_type, tmp_path)
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=message):
        GgufSource(write(tmp_path, **own))


def test_rankers_that_converters_write_in_part_are_refused(tmp_path: Path) -> None:
    """Of BERT's, files lack the layer before the last one; DistilBERT's has another activation there than llama.cpp."""
    make_ranker("bert", tmp_path / "bert")
    with pytest.raises(UnsupportedArchitectureError, match=r"'cls\.output\.weight' that is to rank texts alone"):
        GgufSource(write(tmp_path / "bert"))
    make_ranker("distilbert", tmp_path / "distilbert")
    with pytest.raises(UnsupportedArchitectureError, match="as DistilBERT's do"):
        GgufSource(write(tmp_path / "distilbert"))


def test_biases_that_a_class_does_not_add_are_refused(tmp_path: Path) -> None:
    make_encoder("nomic_bert", tmp_path)
    path = rewrite(write(tmp_path), {"blk.0.attn_output.bias": np.zeros(HIDDEN, np.float32)})
    with pytest.raises(UnsupportedArchitectureError, match=r"blk\.0\.attn_output\.bias"):
        GgufSource(path)


def test_layers_that_are_not_there_are_refused_before_they_are_made(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    last = {f"blk.{(1 << 30) - 1}.attn_output.weight": np.zeros((HIDDEN, HIDDEN), np.float32)}
    with pytest.raises(CheckpointError, match=r"it has \d+ tensors for 1073741824 layers"):
        GgufSource(rewrite(write(tmp_path, block_count=1 << 30), last))


def test_other_encoders_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "jina.gguf"
    writer = gguf.GGUFWriter(path, "jina-bert-v2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitectureError, match=r"'jina-bert-v2': supported are .*nomic-bert") as caught:
        GgufSource(path)
    assert "bert" in caught.value.supported


def test_biases_and_kinds_of_tokens_that_are_left_out_are_zero(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    source = GgufSource(rewrite(write(tmp_path), {}, without=("token_types.", "blk.0.attn_q.bias")))
    for name, shape in (
        ("encoder.layer.0.attention.self.query.bias", (HIDDEN,)),
        ("embeddings.token_type_embeddings.weight", (1, HIDDEN)),
    ):
        assert source.shape(name) == shape
        torch.testing.assert_close(source.tensor(name, torch.float32, CPU), torch.zeros(shape))
    assert source.config["type_vocab_size"] == 1


def test_matrices_of_queries_keys_and_values_are_parted_as_they_are_stored(tmp_path: Path) -> None:
    make_encoder("nomic_bert", tmp_path)
    exact, stored = GgufSource(write(tmp_path)), GgufSource(write(tmp_path, "Q8_0"))
    whole = torch.cat([exact.matrix(f"layers.2.self_attn.{each}_proj.weight").decoded() for each in "qkv"])
    reader = gguf.GGUFReader(tmp_path / "F32.gguf")
    data: Any = next(each.data for each in reader.tensors if each.name == "blk.2.attn_qkv.weight")
    np.testing.assert_array_equal(whole.numpy(), data)
    for each in "qkv":
        matrix = stored.matrix(f"layers.2.self_attn.{each}_proj.weight")
        assert isinstance(matrix, BlockMatrix)
        assert matrix.shape == (HIDDEN, HIDDEN)


def test_bert_too_may_have_them_in_one(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    path = write(tmp_path)
    plain = GgufSource(path)
    names = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    parts = [f"blk.1.attn_{each}" for each in "qkv"]
    fused = {
        f"blk.1.attn_qkv.{kind}": np.concatenate([names[f"{part}.{kind}"] for part in parts])
        for kind in ("weight", "bias")
    }
    found = GgufSource(rewrite(path, fused, without=tuple(f"{part}." for part in parts)))
    assert set(found.names()) == set(plain.names())
    for name in plain.names():
        one, other = (each.tensor(name, torch.float32, CPU) for each in (found, plain))
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_layers_of_the_pooled_vector_are_read(tmp_path: Path) -> None:
    hidden, wide = 32, 48
    weights = [np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((wide, hidden), (8, wide))]
    source: Any = _Tensors({"dense_2.weight": weights[0], "dense_3.weight": weights[1]})
    recipe = _recipe(source, hidden)
    assert recipe.pooling == "mean"
    for layer, weight in zip(recipe.dense, weights, strict=True):
        np.testing.assert_array_equal(layer.weight, weight)
    with pytest.raises(CheckpointError, match=r"model\.gguf: dense_2\.weight has shape .* expected rows of 16"):
        _recipe(source, 16)
    source["dense_3.weight"] = weights[0]
    with pytest.raises(CheckpointError, match=r"dense_3\.weight has shape \[48, 32\]: expected rows of 48"):
        _recipe(source, hidden)


class _Tensors(dict[str, Any]):
    """Stands for weights."""

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(self[name]).to(device, dtype)


def _recipe(source: Any, hidden_size: int) -> EmbeddingRecipe:
    from paged_sdk.weights.checkpoint import Checkpoint

    metadata = {"general.architecture": "gemma-embedding", "gemma-embedding.pooling_type": 1}
    checkpoint = Checkpoint(path=Path("model.gguf"), config={}, source=source, metadata=metadata)
    return read_recipe(checkpoint, hidden_size)


def test_tables_of_encoders_stay_exact_where_files_are_quantized(tmp_path: Path) -> None:
    """As llama.cpp's own tool has it, which cannot add quantized ones up."""
    make_encoder("bert", tmp_path)
    source = open_checkpoint(write(tmp_path)).source
    shapes = {name: source.shape(name) for name in source.names()}
    assert shapes["embeddings.position_embeddings.weight"] == (128, HIDDEN)
    for name, shape in (("position_embd", (128, HIDDEN)), ("token_types", (2, HIDDEN)), ("cls.output", (1, HIDDEN))):
        assert not is_quantizable(f"{name}.weight", shape)
    assert is_quantizable("cls.weight", (HIDDEN, HIDDEN))
