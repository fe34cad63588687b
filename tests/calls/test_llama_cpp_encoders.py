"""llama.cpp says of encoders in GGUF files what this package says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gguf_encoder_files import word_piece_metadata, write_encoder
from paged_sdk import TextModelBuilder
from tiny_encoder import make_embedding_gemma, make_encoder, make_ranker, word_pieces

pytest.importorskip("xllamacpp", reason="it has wheels for Linux on x86-64 alone")

from llamacpp import LlamaCpp

pytestmark = pytest.mark.anyio

TEXTS: Final = ("The kettle is boiling.", "a pot of tea, and one more?", "x", "tea " * 40)
CLOSE: Final = 2e-5
#: Its approximation of GELU is read from a table of half precision.
CLOSE_GELU: Final = 5e-3
VOCAB_SIZE: Final = 256


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def written(directory: Path, **own: Any) -> Path:
    tokenizer = word_piece_metadata(word_pieces(), VOCAB_SIZE)
    return write_encoder(directory, directory / "model.gguf", tokenizer=tokenizer, **own)


@pytest.mark.parametrize(
    ("model_type", "changes", "close"),
    [
        ("bert", {}, CLOSE_GELU),
        ("xlm-roberta", {"pad_token_id": 1}, CLOSE_GELU),
        ("nomic_bert", {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}}, CLOSE),
        ("modernbert", {"local_attention": 16, "hidden_activation": "silu"}, CLOSE),
        ("eurobert", {"pad_token_id": 0}, CLOSE),
        ("gemma3_text", {}, CLOSE_GELU),
    ],
)
async def test_vectors_are_its(model_type: str, changes: dict[str, Any], close: float, tmp_path: Path) -> None:
    if model_type == "gemma3_text":
        make_embedding_gemma(tmp_path)
    else:
        make_encoder(model_type, tmp_path, **changes)
    path = written(tmp_path, pooling_type=1)
    async with builder_of(path).build() as model:
        found = (await model.embed(TEXTS)).embeddings
    judge = LlamaCpp(path, reads="vectors")
    np.testing.assert_allclose(found, [judge.vector(text) for text in TEXTS], atol=close)


async def test_ranks_are_its(tmp_path: Path) -> None:
    """Of a model with one kind of tokens, as XLM-RoBERTa's rankers are: it knows no second kind."""
    make_ranker("xlm-roberta", tmp_path, pad_token_id=1, type_vocab_size=1)
    path = written(tmp_path)
    documents = ("the kettle boils", "tea", "a pot of tea, and one more, and one more")
    async with builder_of(path).build() as model:
        response = await model.rank("boiling tea", documents)
    found = [each.logit for each in sorted(response.results, key=lambda each: each.index)]
    assert found == pytest.approx(LlamaCpp(path, reads="ranks").ranks("boiling tea", documents), abs=CLOSE_GELU)
