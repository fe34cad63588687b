"""Vectors by encoders (BERT and its like), judged by transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paged_sdk import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    IsqType,
    SamplingParams,
    TextModelBuilder,
    UnsupportedArchitectureError,
)
from paged_sdk.config.pooling import Pooling
from tiny_encoder import CLS, DEBERTA_V3, SEP, make_encoder, make_ranker, word_pieces

pytestmark = pytest.mark.anyio

TEXTS = ("The kettle is boiling.", "a pot of tea, and one more?", "x", "tea " * 40)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(directory: Path) -> TextModelBuilder:
    return TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)


def vector(reference: Any, text: str, pooling: Pooling) -> npt.NDArray[np.float32]:
    ids = torch.tensor([word_pieces().encode(text).ids])
    with torch.inference_mode():
        hidden = reference.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return np.asarray((hidden[0] if pooling == "cls" else hidden.mean(0)).numpy(), dtype=np.float32)


def expected(reference: Any, pooling: Pooling) -> npt.NDArray[np.float32]:
    return np.stack([vector(reference, text, pooling) for text in TEXTS])


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "modernbert", "mpnet", "deberta-v2", "t5"])
@pytest.mark.parametrize("way", ["paged", "contiguous", "small steps", "one at a time"])
async def test_vectors_are_those_of_transformers(model_type: str, way: str, tmp_path: Path) -> None:
    # 8 tokens before and after
    changes = {"modernbert": {"local_attention": 16}, "deberta-v2": DEBERTA_V3}.get(model_type, {})
    reference = make_encoder(model_type, tmp_path, **changes)
    builder = builder_of(tmp_path)
    if way == "contiguous":
        builder = builder.without_paged_attn()
    elif way != "paged":
        builder = builder.with_max_num_batched_tokens(48) if way == "small steps" else builder.with_max_num_seqs(1)
    async with builder.build() as model:
        pooling: Pooling
        for pooling in ("cls", "mean"):
            found = await model.embed(TEXTS, pooling=pooling, normalize=False)
            wanted = expected(reference, pooling)
            np.testing.assert_allclose(found.embeddings, wanted, atol=2e-5 * float(np.abs(wanted).max()))
            again = await model.embed(TEXTS, pooling=pooling, normalize=False)
            np.testing.assert_array_equal(again.embeddings, found.embeddings)
        assert model.stats().running == 0


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("t5", {"feed_forward_proj": "gated-gelu", "d_kv": 12}),
        ("t5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 5}),
        ("mt5", {}),
        ("umt5", {}),
    ],
)
async def test_encoders_of_an_encoder_and_a_decoder(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_encoder(model_type, tmp_path, **changes)
    async with builder_of(tmp_path).build() as model:
        found = (await model.embed(TEXTS, pooling="mean", normalize=False)).embeddings
        with pytest.raises(InvalidRequestError, match="is an encoder"):
            await model.score(["tea"])
    wanted = expected(reference, "mean")
    np.testing.assert_allclose(found, wanted, atol=2e-5 * float(np.abs(wanted).max()))
    for architectures in (["T5ForConditionalGeneration"], None):
        content = json.loads((tmp_path / "config.json").read_text()) | {"architectures": architectures}
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(UnsupportedArchitectureError, match="no class of this name that generates text"):
            await builder_of(tmp_path).build()


async def test_means_are_taken_where_nothing_is_said(tmp_path: Path) -> None:
    """As sentence-transformers does with a directory that has no modules.json."""
    reference = make_encoder("bert", tmp_path)
    async with builder_of(tmp_path).build() as model:
        found = (await model.embed(TEXTS)).embeddings
    wanted = expected(reference, "mean")
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=2e-5)


# T5's scores are not scaled, so that errors of random weights weigh more.
@pytest.mark.parametrize(("model_type", "least"), [("bert", 0.995), ("mpnet", 0.995), ("t5", 0.98)])
async def test_quantized_and_rounded_weights_stay_near(model_type: str, least: float, tmp_path: Path) -> None:
    reference = make_encoder(model_type, tmp_path)
    wanted = expected(reference, "mean")
    rounded = [builder_of(tmp_path).with_dtype(dtype) for dtype in ("bfloat16", "float16")]
    for builder in (builder_of(tmp_path).with_isq(IsqType.Q8_0), *rounded):
        async with builder.build() as model:
            found = (await model.embed(TEXTS, normalize=False)).embeddings
        cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
        assert cosines.min() > least, builder


async def test_texts_keep_the_tokens_around_them_when_they_are_cut(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, max_position_embeddings=32)
    texts: list[str | list[int]] = [
        "tea " * 40,
        [CLS, *word_pieces().encode("tea " * 30, add_special_tokens=False).ids, SEP],
    ]
    async with builder_of(tmp_path).build() as model:
        with pytest.raises(ContextLengthError, match="has 42 tokens, 32 fit"):
            await model.embed(texts)
        cut = await model.embed(texts, truncation=True)
    np.testing.assert_array_equal(cut.embeddings[0], cut.embeddings[1])


async def test_positions_of_roberta_end_two_earlier(tmp_path: Path) -> None:
    """Its table of positions has rows that no token of a text has: the first is the padding token's successor."""
    make_encoder("roberta", tmp_path, max_position_embeddings=34, pad_token_id=1)
    async with builder_of(tmp_path).build() as model:
        assert (await model.embed([[CLS, *[7] * 30, SEP]])).embeddings.shape == (1, 64)
        with pytest.raises(ContextLengthError, match="33 tokens, 32 fit"):
            await model.embed([[CLS, *[7] * 31, SEP]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_numbers_of_distances_reach_far(dtype: str, tmp_path: Path) -> None:
    """MPNet's distances of 128 tokens and more have one bucket, in each direction."""
    reference: Any = make_encoder("mpnet", tmp_path, max_position_embeddings=402, pad_token_id=1)
    reference.base_model.encoder.relative_attention_bias.weight.data.mul_(3)
    reference.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 1000}))
    texts = [[CLS, *torch.randint(5, 60, (length,)).tolist(), SEP] for length in (398, 140, 1)]
    wanted = []
    for text in texts:
        ids = torch.tensor([text])
        with torch.inference_mode():
            wanted.append(reference.base_model(input_ids=ids).last_hidden_state[0].mean(0).numpy())
    async with builder_of(tmp_path).with_dtype(dtype).build() as model:
        found = (await model.embed(texts, pooling="mean", normalize=False)).embeddings
        with pytest.raises(ContextLengthError, match="401 tokens, 400 fit"):
            await model.embed([[7] * 401])
    rounding = 2e-5 if dtype == "float32" else 4e-2
    np.testing.assert_allclose(found, np.stack(wanted), atol=rounding * float(np.abs(wanted).max()))


async def test_encoders_generate_nothing(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    async with builder_of(tmp_path).build() as model:
        with pytest.raises(InvalidRequestError, match="is an encoder, whose tokens attend to later ones"):
            await model.send_completion_request("tea", SamplingParams(max_len=3))
        with pytest.raises(InvalidRequestError, match="is an encoder"):
            await model.score(["tea"])
        ids = await model.tokenize("The kettle is boiling.")
        assert await model.detokenize(ids) == "the kettle is boiling ."


async def test_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_encoder("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.1.attention.self.query.weight"
    save_file({each: value for each, value in tensors.items() if each != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layer\.1\.attention\.self\.query"):
        await builder_of(tmp_path).build()


async def test_what_is_no_encoder_of_texts_is_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    others: tuple[dict[str, object], ...] = (
        {"architectures": ["BertForTokenClassification"]},
        {"model_type": "longformer", "architectures": None},
    )
    for changes in others:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UnsupportedArchitectureError):
            await builder_of(tmp_path).build()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="with_batch_invariance"):
        await builder_of(tmp_path).with_batch_invariance().build()


async def test_what_cannot_be_tried_is_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path / "short", max_position_embeddings=2)
    with pytest.raises(UnsupportedArchitectureError, match="a few tokens cannot be tried"):
        await builder_of(tmp_path / "short").build()
    make_ranker("bert", tmp_path / "ranker")
    path = tmp_path / "ranker" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_eps": "small"}))
    with pytest.raises(UnsupportedArchitectureError, match=r"cannot be made .*layer_norm_eps"):
        await builder_of(tmp_path / "ranker").build()
