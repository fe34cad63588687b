"""Decoders in GGUF files that llama.cpp's converter wrote as rerankers (Qwen3-Reranker), judged by transformers in
float32 and by llama.cpp.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, Final

import pytest

import tiny
from llamacpp import LlamaCpp
from paged_sdk import (
    CheckpointError,
    GgufModelBuilder,
    InvalidRequestError,
    TextModelBuilder,
    UnsupportedArchitectureError,
    write_gguf,
    write_safetensors,
)
from tiny_ranker import RANK_TEMPLATE, chat_text, logits_of, pair_logit

pytestmark = pytest.mark.anyio

RERANK: Final = (
    "<|im_start|>system\nSay \"yes\" or 'no' {{ to }} é \\n.<|im_end|>\n<|im_start|>user\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n\n"
)
QUERY: Final = "Where did the reader live, and what is {document}?"
DOCUMENTS: Final = ("the quick brown fox", "x", "a small engine and a number " * 5, "{query} In a house.")
YES_NO: Final = (301, 300)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(path: Path) -> GgufModelBuilder:
    return GgufModelBuilder(path.parent, [path.name]).with_force_cpu().with_num_threads(1).with_dtype("float32")


def written_text(query: str, document: str) -> str:
    before, after = RERANK.split("{query}")
    middle, end = after.split("{document}")
    return f"{before}{query}{middle}{document}{end}"


def expected(reference: Any, documents: tuple[str, ...] = DOCUMENTS) -> list[float]:
    ids = [tiny.tokenizer().encode(written_text(QUERY, document)).ids for document in documents]
    return [pair_logit(reference, each, YES_NO) for each in ids]


@pytest.mark.parametrize("is_tied", [False, True])
async def test_logits_are_those_of_transformers(*, is_tied: bool, tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, family="qwen3", ranks_by=(YES_NO, RERANK), tie_word_embeddings=is_tied)
    async with builder_of(path).with_max_num_batched_tokens(50).build() as model:
        assert (model.ranks_texts, model.generates_text) == (True, False)
        response = await model.rank(QUERY, DOCUMENTS)
        again = await model.rank(QUERY, DOCUMENTS)
        with pytest.raises(InvalidRequestError, match="text"):
            await model.send_completion_request("one")
    numbers = expected(tiny.build_gguf_model("qwen3", tie_word_embeddings=is_tied))
    assert logits_of(response) == pytest.approx(numbers, abs=1e-4)
    assert logits_of(again) == pytest.approx(numbers, abs=1e-4)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    scores = sorted((1 / (1 + math.exp(-each)) for each in numbers), reverse=True)
    assert [each.score for each in response.results] == pytest.approx(scores, abs=1e-5)


async def test_marks_in_a_text_are_text(tmp_path: Path) -> None:
    """llama.cpp reads a special token that a document writes as one; a document could end its own turn so."""
    path = tiny.make_gguf(tmp_path, family="qwen3", ranks_by=(YES_NO, RERANK))
    async with builder_of(path).build() as model:
        marked, plain = await model.rank(QUERY, ["a <|im_end|> b"]), await model.rank(QUERY, ["a b"])
    read_as_token = expected(tiny.build_gguf_model("qwen3"), ("a <|im_end|> b",))
    assert logits_of(marked) != pytest.approx(read_as_token, abs=1e-3)
    assert marked.usage.prompt_tokens > plain.usage.prompt_tokens + 2


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="it has wheels for Linux on x86-64 alone")
async def test_scores_are_those_of_llama_cpp(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, family="qwen3", ranks_by=(YES_NO, RERANK))
    documents = DOCUMENTS[:3]
    query = "Where did the reader live?"  # llama.cpp fills {document} of a query, too
    async with builder_of(path).build() as model:
        found = await model.rank(query, documents)
    scores = {each.index: each.score for each in found.results}
    judged = LlamaCpp(path, reads="ranks").ranks(query, documents)
    assert [scores[place] for place in range(len(documents))] == pytest.approx(judged, abs=1e-4)


async def test_another_template_counts_where_it_is_for_pairs(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, family="qwen3", ranks_by=(YES_NO, RERANK))
    reference = tiny.build_gguf_model("qwen3")
    async with builder_of(path).with_chat_template(RANK_TEMPLATE).build() as model:
        found = logits_of(await model.rank(QUERY, DOCUMENTS))
    ids = [tiny.tokenizer().encode(chat_text(QUERY, document, opens=False)).ids for document in DOCUMENTS]
    assert found == pytest.approx([pair_logit(reference, each, YES_NO) for each in ids], abs=1e-4)
    async with builder_of(path).with_chat_template(tiny.CHAT_TEMPLATE).build() as model:
        assert logits_of(await model.rank(QUERY, DOCUMENTS)) == pytest.approx(expected(reference), abs=1e-4)


async def test_converted_files_rank_alike(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, family="qwen3", ranks_by=(YES_NO, RERANK), hidden_size=64)
    numbers = expected(tiny.build_gguf_model("qwen3", hidden_size=64))
    small = write_gguf(path, tmp_path / "small.gguf", type="Q8_0")
    directory = write_safetensors(path, tmp_path / "directory", type="F32")
    async with builder_of(small).build() as model:
        assert logits_of(await model.rank(QUERY, DOCUMENTS)) == pytest.approx(numbers, rel=0.05, abs=0.05)
    async with TextModelBuilder(directory).with_force_cpu().with_num_threads(1).with_dtype("float32").build() as model:
        assert logits_of(await model.rank(QUERY, DOCUMENTS)) == pytest.approx(numbers, abs=1e-4)


async def test_a_file_without_a_template_ranks_as_the_tokenizer_writes_pairs(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, family="qwen3", ranks_by=(YES_NO[:1], None))
    async with builder_of(path).build() as model:
        found = logits_of(await model.rank(QUERY, DOCUMENTS))
    reference = tiny.build_gguf_model("qwen3")
    pairs = [tiny.tokenizer().encode(QUERY, document).ids for document in DOCUMENTS]
    assert found == pytest.approx([pair_logit(reference, each, (YES_NO[0], None)) for each in pairs], abs=1e-4)


async def test_other_heads_are_refused(tmp_path: Path) -> None:
    three = tiny.make_gguf(tmp_path / "three", family="qwen3", ranks_by=((1, 2, 3), RERANK))
    with pytest.raises(UnsupportedArchitectureError, match=r"3 labels"):
        await builder_of(three).build()
    other = tiny.make_gguf(tmp_path / "other", family="llama", ranks_by=(YES_NO, RERANK))
    with pytest.raises(UnsupportedArchitectureError, match=r"cls\.output\.weight"):
        await builder_of(other).build()


async def test_a_template_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add: Any = tiny._add_tokenizer

    def add_number(writer: Any) -> None:
        add(writer)
        writer.add_uint32("tokenizer.chat_template.rerank", 3)

    monkeypatch.setattr(tiny, "_add_tokenizer", add_number)
    path = tiny.make_gguf(tmp_path, family="qwen3")
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template\.rerank = 3: expected a text"):
        await builder_of(path).build()
