"""Vectors over HTTP, as OpenAI's client asks for them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import openai
import pytest

from paged_sdk import TextModelBuilder
from serving import Serving, serving

TEXTS: Final = ["The kettle boils.", "A pot of tea"]


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Path) -> Iterator[Serving]:
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    with serving({"tiny": builder.build}) as served:
        yield served


@pytest.fixture(scope="module")
def expected(served: Serving) -> Any:
    async def embed() -> Any:
        return (await served.model.embed(TEXTS)).embeddings

    return anyio.run(embed)


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_vectors(served: Serving, expected: Any, form: Any) -> None:
    answer = served.openai.embeddings.create(model="tiny", input=TEXTS, **form)
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens > 0
    rows = [
        np.frombuffer(base64.b64decode(each.embedding), "<f4")
        if isinstance(each.embedding, str)
        else np.array(each.embedding, np.float32)
        for each in answer.data
    ]
    np.testing.assert_allclose(np.stack(rows), expected, rtol=0, atol=1e-6)


def test_fields_are_passed_on(served: Serving, expected: Any) -> None:
    short = served.openai.embeddings.create(model="tiny", input=TEXTS[0], dimensions=4)
    assert len(short.data[0].embedding) == 4
    plain = served.openai.embeddings.create(
        model="tiny", input=TEXTS, extra_body={"normalize": False, "pooling": "mean"}
    )
    assert not np.allclose(plain.data[0].embedding, expected[0])
    by_ids = served.openai.embeddings.create(model="tiny", input=[[5, 6, 7], [8]])
    assert len(by_ids.data) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[10**6]]}, "input"),
        ({"dimensions": 10**6}, "dimensions"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"stream": True}, "stream"),
    ],
)
def test_a_bad_request_is_400_and_names_the_field(served: Serving, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.post("/embeddings", body={"model": "tiny", "input": "a", **fields}, cast_to=object)
    assert (caught.value.param or "").startswith(param)
