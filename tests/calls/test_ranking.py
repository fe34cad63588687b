"""How well documents go with a query, judged by transformers in float32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_sdk import (
    BlockingModel,
    ContextLengthError,
    InvalidRequestError,
    IsqType,
    NumericalError,
    RankedDocument,
    RankResponse,
    ReplicaSet,
    SamplingParams,
    TextModelBuilder,
    UnsupportedArchitectureError,
)
from paged_sdk.testing import fake_model
from serving import serving
from tiny_encoder import DEBERTA_V3, make_ranker, word_pieces

pytestmark = pytest.mark.anyio

QUERY: Final = "boiling tea"
DOCUMENTS: Final = ("the kettle boils", "tea", "a pot of tea, and one more, and one more", "x y z")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(directory: Path) -> TextModelBuilder:
    return TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)


def logit(reference: Any, query: str, document: str, most: int | None = None) -> float:
    """Return what transformers says of a pair, whose document is cut where it is too long."""
    tokenizer = word_pieces()
    if most is not None:
        tokenizer.enable_truncation(most, strategy="only_second")
    pair = tokenizer.encode(query, document)
    given = {"input_ids": torch.tensor([pair.ids]), "attention_mask": torch.ones(1, len(pair.ids), dtype=torch.int64)}
    if getattr(reference.config, "type_vocab_size", 1) > 1:
        given["token_type_ids"] = torch.tensor([pair.type_ids])
    with torch.inference_mode():
        return float(reference(**given).logits)


def logits(response: RankResponse) -> list[float]:
    """Return the numbers in the documents' order."""
    return [each.logit for each in sorted(response.results, key=lambda each: each.index)]


# Token types and a pooler; layers of its own for a text, and positions from 2 on; none of both; numbers of distances,
# by head and by token; a pooler of another form; other layers for a text; means and windows.
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bert", {}),
        ("xlm-roberta", {"pad_token_id": 1}),
        ("distilbert", {}),
        ("mpnet", {"pad_token_id": 1}),
        ("deberta-v2", DEBERTA_V3),
        ("albert", {}),
        ("electra", {}),
        ("modernbert", {"classifier_pooling": "cls"}),
        ("modernbert", {"classifier_pooling": "mean"}),
    ],
)
@pytest.mark.parametrize("way", ["paged", "contiguous", "small steps"])
async def test_ranks_are_those_of_transformers(
    model_type: str, changes: dict[str, Any], way: str, tmp_path: Path
) -> None:
    reference = make_ranker(model_type, tmp_path, **changes)
    builder = builder_of(tmp_path)
    if way != "paged":
        builder = builder.without_paged_attn() if way == "contiguous" else builder.with_max_num_batched_tokens(40)
    async with builder.build() as model:
        assert model.ranks_texts
        response = await model.rank(QUERY, DOCUMENTS)
        (alone,) = (await model.rank(QUERY, DOCUMENTS[2:3])).results
    expected = [logit(reference, QUERY, document) for document in DOCUMENTS]
    assert logits(response) == pytest.approx(expected, abs=2e-5)
    assert [each.logit for each in response.results] == sorted(logits(response), reverse=True)
    assert alone.logit == pytest.approx(expected[2], abs=2e-5)
    assert response.usage.prompt_tokens == sum(len(word_pieces().encode(QUERY, each).ids) for each in DOCUMENTS)


async def test_quantized_and_rounded_weights_stay_near(tmp_path: Path) -> None:
    reference = make_ranker("bert", tmp_path)
    expected = [logit(reference, QUERY, document) for document in DOCUMENTS]
    for builder in (builder_of(tmp_path).with_isq(IsqType.Q8_0), builder_of(tmp_path).with_dtype("bfloat16")):
        async with builder.build() as model:
            assert logits(await model.rank(QUERY, DOCUMENTS)) == pytest.approx(expected, abs=0.15)


async def test_documents_are_cut_where_that_is_wanted(tmp_path: Path) -> None:
    reference = make_ranker("bert", tmp_path, max_position_embeddings=24)
    long = "tea " * 30
    async with builder_of(tmp_path).build() as model:
        with pytest.raises(ContextLengthError, match=r"documents\[1\] has \d+ tokens with the query, 24 fit"):
            await model.rank(QUERY, ["tea", long])
        response = await model.rank(QUERY, ["tea", long], truncation=True)
        with pytest.raises(ContextLengthError, match=r"query has 33 tokens, 23 fit beside a document") as caught:
            await model.rank(long, ["tea"], truncation=True)
        assert caught.value.field == "query"
    assert logits(response) == pytest.approx([logit(reference, QUERY, each, 24) for each in ("tea", long)], abs=2e-5)


async def test_parts_are_told_apart_where_the_tokenizer_says_so(tmp_path: Path) -> None:
    reference = make_ranker("bert", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_input_names": ["input_ids", "attention_mask"]}))
    given = torch.tensor([word_pieces().encode(QUERY, DOCUMENTS[0]).ids])
    with torch.inference_mode():
        expected = float(reference(given, attention_mask=torch.ones_like(given)).logits)
    async with builder_of(tmp_path).build() as model:
        assert logits(await model.rank(QUERY, DOCUMENTS[:1])) == pytest.approx([expected], abs=2e-5)


async def test_what_cannot_be_ranked_is_refused(tmp_path: Path) -> None:
    make_ranker("bert", tmp_path)
    async with builder_of(tmp_path).build() as model:
        documents: Any
        for documents, why in (
            ([], "at least one text"),
            ("tea", "a list of at least one text"),
            (["tea", ""], r"documents\[1\]"),
        ):
            with pytest.raises(InvalidRequestError, match=why):
                await model.rank(QUERY, documents)
        with pytest.raises(InvalidRequestError, match="query"):
            await model.rank("", ["tea"])
        with pytest.raises(InvalidRequestError, match="Unicode"):
            await model.rank("\ud800", ["tea"])
        with pytest.raises(InvalidRequestError, match="ranks texts, and makes no vectors"):
            await model.embed("tea")
        assert (await model.embed("tea", pooling="mean")).embeddings.shape == (1, 64)
        with pytest.raises(InvalidRequestError, match=r"is an encoder, .*; rank\(\) says how well texts go together"):
            await model.send_completion_request("tea", SamplingParams(max_len=2))
    async with fake_model("yes") as fake:
        assert not fake.ranks_texts
        with pytest.raises(InvalidRequestError, match="cannot rank documents: it has no layers for that"):
            await fake.rank(QUERY, DOCUMENTS)


async def test_ranks_that_are_no_numbers_are_errors(tmp_path: Path) -> None:
    make_ranker("bert", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["classifier.bias"].fill_(math.nan)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    async with builder_of(tmp_path).build() as model:
        with pytest.raises(NumericalError, match="rank is NaN or Inf"):
            await model.rank(QUERY, DOCUMENTS)
        assert (await model.embed("tea", pooling="mean")).embeddings.shape == (1, 64)


async def test_classes_that_do_not_rank_are_refused(tmp_path: Path) -> None:
    make_ranker("bert", tmp_path / "kinds", num_labels=3)
    with pytest.raises(UnsupportedArchitectureError, match="has 3 labels"):
        await builder_of(tmp_path / "kinds").build()
    # Its tokens' hidden states go through a layer before they become one; positions are rotary.
    make_ranker("eurobert", tmp_path / "late", classifier_pooling="late")
    with pytest.raises(UnsupportedArchitectureError, match="more than one vector"):
        await builder_of(tmp_path / "late").build()


async def test_means_are_ranked_in_sixteen_bits(tmp_path: Path) -> None:
    reference = make_ranker("modernbert", tmp_path, classifier_pooling="mean")
    expected = [logit(reference, QUERY, document) for document in DOCUMENTS]
    for dtype in ("bfloat16", "float16"):
        async with builder_of(tmp_path).with_dtype(dtype).build() as model:
            assert logits(await model.rank(QUERY, DOCUMENTS)) == pytest.approx(expected, abs=0.15)


async def test_rankers_that_sentence_transformers_has_written(tmp_path: Path) -> None:
    """Its modules.json has the class alone, without a pooling."""
    reference = make_ranker("bert", tmp_path)
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    settings = {
        "max_seq_length": 30,
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    }
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    documents = [DOCUMENTS[0], "tea " * 40]
    async with builder_of(tmp_path).build() as model:
        assert model.ranks_texts
        with pytest.raises(ContextLengthError, match="30 fit"):
            await model.rank(QUERY, documents)
        response = await model.rank(QUERY, documents, truncation=True)
        with pytest.raises(InvalidRequestError, match="ranks texts, and makes no vectors"):
            await model.embed("tea")
    assert logits(response) == pytest.approx([logit(reference, QUERY, each, 30) for each in documents], abs=2e-5)


async def test_texts_are_turned_to_lower_case_where_the_files_say_so(tmp_path: Path) -> None:
    reference = make_ranker("bert", tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    prompts = {"prompts": {"ask": "Ask The "}, "default_prompt_name": "ask"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    async with builder_of(tmp_path).build() as model:
        response = await model.rank(QUERY.upper(), [each.upper() for each in DOCUMENTS])
    expected = [logit(reference, f"ask the {QUERY}", each) for each in DOCUMENTS]
    assert logits(response) == pytest.approx(expected, abs=2e-5)


def test_scores_are_the_logistic_function() -> None:
    for number, score in ((0.0, 0.5), (2.0, 0.8807970779778823), (-800.0, 0.0), (800.0, 1.0)):
        assert RankedDocument(index=0, logit=number).score == pytest.approx(score)


def test_blocking_models_and_replicas_rank(tmp_path: Path) -> None:
    reference = make_ranker("bert", tmp_path)
    expected = [logit(reference, QUERY, document) for document in DOCUMENTS]
    with BlockingModel(builder_of(tmp_path).build()) as model:
        assert model.ranks_texts
        assert logits(model.rank(QUERY, DOCUMENTS)) == pytest.approx(expected, abs=2e-5)


async def test_replicas_rank(tmp_path: Path) -> None:
    reference = make_ranker("bert", tmp_path)
    expected = [logit(reference, QUERY, document) for document in DOCUMENTS]
    replicas = [await builder_of(tmp_path).build() for _ in range(2)]
    async with ReplicaSet(replicas) as model:
        assert logits(await model.rank(QUERY, DOCUMENTS * 3)) == pytest.approx(expected * 3, abs=2e-5)


def test_a_server_ranks(tmp_path: Path) -> None:
    reference = make_ranker("bert", tmp_path)
    expected = sorted((-logit(reference, QUERY, document), place) for place, document in enumerate(DOCUMENTS))
    with serving({"ranker": builder_of(tmp_path).build}) as served:
        body = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS}
        answer = served.http.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": True}).json()
        assert [each["index"] for each in answer["results"]] == [place for _, place in expected[:2]]
        best = answer["results"][0]
        assert best["document"] == {"text": DOCUMENTS[best["index"]]}
        assert 1 > best["relevance_score"] > answer["results"][1]["relevance_score"] > 0
        plain = served.http.post("/v1/rerank", json=body).json()
        assert [set(each) for each in plain["results"]] == [{"index", "relevance_score"}] * len(DOCUMENTS)
        assert plain["usage"]["total_tokens"] > 0
        assert served.http.get("/v1/models").json()["data"][0]["output_modalities"] == ["rank"]
        for wrong, field in (({"documents": []}, "documents"), ({"top_n": 0}, "top_n"), ({"query": ""}, "query")):
            refused = served.http.post("/v1/rerank", content=json.dumps({**body, **wrong}), headers=JSON)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field
        too_long = {**body, "query": "tea " * 200, "truncate_sequence": True}
        refused = served.http.post("/v1/rerank", content=json.dumps(too_long), headers=JSON).json()["error"]
        assert (refused["param"], refused["code"]) == ("query", "context_length_exceeded")
        assert refused["message"] == "query has 203 tokens, 99 fit: shorten it"


JSON: Final = {"Content-Type": "application/json"}
