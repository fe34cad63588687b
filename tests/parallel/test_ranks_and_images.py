"""Several ranks read images as one process does: rank 0 encodes them, and the others are told what it has made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paged_sdk import (
    BlockingModel,
    MemoryGpuConfig,
    PagedAttentionMeta,
    RequestBuilder,
    SamplingParams,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.kernels.step import InsertedRows
from paged_sdk.parallel.messages import StepReader, StepWriter
from paged_sdk.types.media import ImageSpan, PromptMedia
from paged_sdk.types.step import Step, StepRow
from tiny_vision import VISION_FAMILIES, make_vision_checkpoint, picture

CHAT = (
    VisionMessages()
    .add_image_message("user", "What is this?", picture(40, 60))
    .add_message("assistant", "A square.")
    .add_image_message("user", "And this?", picture(70, 30, seed=1))
)
SAMPLING = SamplingParams(temperature=0.7, seed=3, n_choices=2, max_len=12, top_n_logprobs=1, ignore_eos=True)


def builder(path: Path, dtype: str) -> VisionModelBuilder:
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(2048))
    # Fewer tokens a step than an image has.
    return (
        VisionModelBuilder(path)
        .with_dtype(dtype)
        .with_num_threads(1)
        .with_max_num_batched_tokens(24)
        .with_paged_attn(meta)
    )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        # Three positions a token, and vectors that later layers add.
        pytest.param(family, dtype, marks=[] if (family, dtype) == ("qwen3_vl", "float32") else pytest.mark.long)
        for family, made in VISION_FAMILIES.items()
        if not made.is_recurrent and family != "gemma4"  # states and layers of several shapes are not divided
        for dtype in ("float32", "float64")
    ],
)
def test_the_same_texts(family: str, dtype: str, tmp_path: Path) -> None:
    changes = {}
    if family == "qwen3_vl_moe":  # two ranks join 64 neurons by 32, and would add up sums of 48: other bits
        text = VISION_FAMILIES[family].config["text_config"]
        changes["text_config"] = text | {"moe_intermediate_size": 64}
    make_vision_checkpoint(family, tmp_path, **changes)
    whole = builder(tmp_path, dtype)
    request = RequestBuilder.from_messages(CHAT).with_sampling(SAMPLING)
    found = []
    with BlockingModel(whole.build()) as one, BlockingModel(whole.with_tensor_parallel(2).build()) as two:
        for model in (one, two):
            answers = [model.send_chat_request(request) for _ in range(2)]
            found.append([answer.to_dict()["choices"] for answer in answers])
            cached = answers[1].usage.prompt_tokens_details
            assert cached is not None
            assert cached.cached_tokens > 0
    assert found[0] == found[1]


def test_steps_with_images_as_messages() -> None:
    span = ImageSpan(
        first_token=1,
        num_tokens=3,
        places=np.array([1, 3]),
        digest=b"d",
        inputs={"x": np.ones(4)},
        is_bidirectional=True,
    )
    media = PromptMedia(spans=(span,), positions=np.arange(15).reshape(3, 5))
    inserted = InsertedRows(torch.tensor([1, 3]), torch.randn(2, 4, dtype=torch.bfloat16), (torch.randn(2, 4),))
    writer, reader = StepWriter(), StepReader()
    first = Step(rows=[StepRow(7, 0, [5, 6, 7, 8], [1], 5, media=media), StepRow(8, 4, [1], [2], 4)])
    told, vectors = reader.read(writer.message(first, inserted))
    assert told.rows[1].media is None
    known = told.rows[0].media
    assert known is not None
    assert known.positions is not None
    assert (known.positions == media.positions).all()
    assert known.whole_spans(0, 4) == media.whole_spans(0, 4) == [(1, 4)]
    assert known.spans[0].places.tolist() == [1, 3]
    assert vectors is not None
    assert torch.equal(vectors.places, inserted.places)
    assert torch.equal(vectors.vectors, inserted.vectors)
    assert torch.equal(vectors.later[0], inserted.later[0])
    # It is told once of a sequence, until that has ended.
    again = writer.message(Step(rows=[StepRow(7, 4, [9], [1], 5, media=media)]), None)
    assert reader.read(again)[0].rows[0].media is known
    assert reader.read(again)[1] is None
    reader.read(writer.message(Step(rows=[], finished_seq_ids=[7]), None))
    other = Step(rows=[StepRow(7, 0, [9], [1], 5, media=media)])
    assert reader.read(writer.message(other, None))[0].rows[0].media is not None
    assert reader.read(writer.message(Step(rows=[StepRow(9, 0, [9], [1], 5)]), None))[0].rows[0].media is None
