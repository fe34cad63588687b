"""Vectors and ranks by encoders in GGUF files, judged by transformers in float32 on what the files were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from gguf_encoder_files import word_piece_metadata, write_encoder
from paged_sdk import (
    ContextLengthError,
    InvalidRequestError,
    IsqType,
    SamplingParams,
    TextModelBuilder,
    UnsupportedArchitectureError,
)
from paged_sdk.config.pooling import Pooling
from serving import serving
from tiny_encoder import make_embedding_gemma, make_encoder, make_ranker, word_pieces

pytestmark = pytest.mark.anyio

TEXTS: Final = ("The kettle is boiling.", "a pot of tea, and one more?", "x", "tea " * 40)
QUERY: Final = "boiling tea"
DOCUMENTS: Final = ("the kettle boils", "tea", "a pot of tea, and one more, and one more", "x y z")
VOCAB_SIZE: Final = 256


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def written(directory: Path, quantization: str = "F32", **own: Any) -> Path:
    tokenizer = word_piece_metadata(word_pieces(), VOCAB_SIZE)
    path = directory / f"{quantization}.gguf"
    return write_encoder(directory, path, quantization=quantization, tokenizer=tokenizer, **own)


def expected(reference: Any, pooling: Pooling) -> npt.NDArray[np.float32]:
    """Return what transformers computes of each text alone, with vectors of length 1."""
    found = []
    for text in TEXTS:
        ids = torch.tensor([word_pieces().encode(text).ids])
        with torch.inference_mode():
            hidden = reference.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        vector = hidden[0] if pooling == "cls" else hidden.mean(0)
        found.append((vector / vector.norm()).numpy())
    return np.stack(found)


def logits_of(reference: Any) -> list[float]:
    """Return what transformers says of each document."""
    found = []
    for document in DOCUMENTS:
        pair = word_pieces().encode(QUERY, document)
        ids = torch.tensor([pair.ids])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.inference_mode():
            found.append(float(reference(**given).logits))
    return found


# XLM-RoBERTa's table of positions begins later than the file's, and DistilBERT has no kinds of tokens.
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bert", {}),
        ("xlm-roberta", {"pad_token_id": 1}),
        ("distilbert", {}),
        ("nomic_bert", {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}}),
        ("modernbert", {"local_attention": 16, "hidden_activation": "silu"}),
        ("eurobert", {"pad_token_id": 0}),
    ],
)
async def test_vectors_are_those_of_transformers(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_encoder(model_type, tmp_path, **changes)
    pooling: Pooling
    for kind, pooling in ((1, "mean"), (2, "cls")):
        async with builder_of(written(tmp_path, pooling_type=kind)).build() as model:
            found = (await model.embed(TEXTS)).embeddings
        np.testing.assert_allclose(found, expected(reference, pooling), atol=1e-5)


async def test_embedding_gemmas_layers_see_both_ways(tmp_path: Path) -> None:
    reference = make_embedding_gemma(tmp_path)
    async with builder_of(written(tmp_path, pooling_type=1)).build() as model:
        found = (await model.embed(TEXTS)).embeddings
    np.testing.assert_allclose(found, expected(reference, "mean"), atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
        ("modernbert", {"classifier_pooling": "cls", "classifier_bias": True}),
        ("modernbert", {"classifier_pooling": "mean"}),
    ],
)
async def test_ranks_are_those_of_transformers(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_ranker(model_type, tmp_path, **changes)
    path = written(tmp_path, pooling_type=4)
    async with builder_of(path).build() as model:
        assert model.ranks_texts
        response = await model.rank(QUERY, DOCUMENTS)
        with pytest.raises(InvalidRequestError, match="ranks texts, and makes no vectors"):
            await model.embed("tea")
        assert (await model.embed("tea", pooling="mean")).embeddings.shape == (1, 64)
    found = [each.logit for each in sorted(response.results, key=lambda each: each.index)]
    assert found == pytest.approx(logits_of(reference), abs=2e-5)


async def test_quantized_files_stay_near_and_take_isq(tmp_path: Path) -> None:
    reference = make_encoder("bert", tmp_path)
    wanted = expected(reference, "mean")
    eight_bits = builder_of(written(tmp_path, "Q8_0", pooling_type=1))
    halves = builder_of(written(tmp_path, "F16", pooling_type=1))
    for builder in (eight_bits, halves, halves.with_isq(IsqType.Q8_0), eight_bits.with_isq(IsqType.Q8_0)):
        async with builder.build() as model:
            found = (await model.embed(TEXTS)).embeddings
        assert (found * wanted).sum(1).min() > 0.995
    cache = halves.with_isq(IsqType.Q8_0).with_isq_cache(tmp_path / "kept")
    kept = []
    for _ in range(2):
        async with cache.build() as model:
            kept.append((await model.embed(TEXTS)).embeddings)
    np.testing.assert_array_equal(kept[0], kept[1])


async def test_files_without_a_pooling_give_means_and_encoders_no_text(tmp_path: Path) -> None:
    reference = make_encoder("bert", tmp_path, max_position_embeddings=64)
    for path in (written(tmp_path), written(tmp_path, pooling_type=0)):
        async with builder_of(path).build() as model:
            found = (await model.embed(TEXTS)).embeddings
            np.testing.assert_allclose(found, expected(reference, "mean"), atol=1e-5)
            with pytest.raises(InvalidRequestError, match=r"F32\.gguf is an encoder, whose tokens attend to later"):
                await model.send_completion_request("tea", SamplingParams(max_len=3))
            with pytest.raises(ContextLengthError, match="72 tokens, 64 fit"):
                await model.embed("tea " * 70)


async def test_a_classifier_is_refused(tmp_path: Path) -> None:
    make_ranker("roberta", tmp_path, num_labels=3, pad_token_id=1)
    with pytest.raises(UnsupportedArchitectureError, match="has 3 labels"):
        await builder_of(written(tmp_path)).build()


def test_a_server_answers_for_a_file(tmp_path: Path) -> None:
    reference = make_ranker("xlm-roberta", tmp_path, pad_token_id=1, type_vocab_size=1)
    best = int(np.argmax(logits_of(reference)))
    with serving({"ranker": builder_of(written(tmp_path)).build}) as served:
        answer = served.http.post("/v1/rerank", json={"model": "ranker", "query": QUERY, "documents": DOCUMENTS})
        assert answer.json()["results"][0]["index"] == best


def write_query_update(path: Path) -> torch.Tensor:
    """Write an adapter of the first layer's queries as llama.cpp's converter does, and return what it adds."""
    generator = np.random.default_rng(0)
    down, up = (generator.standard_normal(shape, np.float32) * 0.2 for shape in ((4, 64), (64, 4)))
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", down)
    writer.add_tensor("blk.0.attn_q.weight.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 2.0 * torch.from_numpy(up @ down)


async def test_adapters_in_files_of_their_own_change_encoders(tmp_path: Path) -> None:
    reference: Any = make_encoder("bert", tmp_path)
    update = write_query_update(tmp_path / "lora.gguf")
    async with builder_of(written(tmp_path, pooling_type=1)).build() as model:
        await model.load_adapter(tmp_path / "lora.gguf")
        found = (await model.embed(TEXTS, adapter="lora")).embeddings
        plain = (await model.embed(TEXTS)).embeddings
    np.testing.assert_allclose(plain, expected(reference, "mean"), atol=1e-5)
    reference.bert.encoder.layer[0].attention.self.query.weight.data += update
    np.testing.assert_allclose(found, expected(reference, "mean"), atol=1e-5)
    assert np.abs(found - plain).max() > 0.01


async def test_adapters_in_files_of_their_own_change_rankers(tmp_path: Path) -> None:
    """The class of a ranker has its layers in a module of another name than the class that makes vectors."""
    reference: Any = make_ranker("xlm-roberta", tmp_path, pad_token_id=1, type_vocab_size=1)
    update = write_query_update(tmp_path / "lora.gguf")
    async with builder_of(written(tmp_path, pooling_type=4)).build() as model:
        await model.load_adapter(tmp_path / "lora.gguf")
        response = await model.rank(QUERY, DOCUMENTS, adapter="lora")
    found = [each.logit for each in sorted(response.results, key=lambda each: each.index)]
    assert np.abs(np.array(found) - logits_of(reference)).max() > 0.01
    reference.roberta.encoder.layer[0].attention.self.query.weight.data += update
    assert found == pytest.approx(logits_of(reference), abs=2e-5)
