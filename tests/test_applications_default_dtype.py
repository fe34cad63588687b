"""Models do not follow torch's default dtype, which an application may set for models of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import tiny
from native_weights import needs_library
from paged_sdk import IsqType, SamplingParams, TextModelBuilder
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.kernels.quantized.grouped_matrix import rounded_levels
from paged_sdk.kernels.quantized.quantize_tables import quantize_table_blocks
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.weights.quantized.grouped_reading import e2m1_levels

GIVEN: Final = SamplingParams(temperature=0.0, max_len=6, top_n_logprobs=1)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@needs_library
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "isq"),
    [
        ("llama", None),
        ("qwen3", IsqType.NF4),
        ("mixtral", IsqType.HQQ4),
        ("gemma2", IsqType.FP8),
        ("olmo", IsqType.Q4_0),
    ],
)
async def test_a_model_computes_the_same(family: str, isq: IsqType | None, tmp_path: Path) -> None:
    make: Callable[..., Any] = tiny.make_checkpoint if family in tiny.FAMILIES else tiny.make_other_checkpoint
    builder = TextModelBuilder(make(family, tmp_path)).with_force_cpu().with_dtype("float32").with_num_threads(1)
    builder = builder if isq is None else builder.with_isq(isq)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        with default_dtype(dtype):
            async with builder.build() as model:
                answer = await model.send_completion_request(tuple(range(5, 25)), GIVEN)
        assert answer.choices[0].logprobs is not None
        found.append([(each.token_id, each.logprob) for each in answer.choices[0].logprobs.content])
    assert found[0] == found[1]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blocks() -> Tensor:
    values = torch.randn(8, 256, dtype=torch.float32, generator=seeded(0))
    return quantize_table_blocks(values, tensor_type_of("IQ4_NL"))


def levels() -> Tensor:
    made = [rounded_levels(torch.rand(16, dtype=torch.float32, generator=seeded(seed))) for seed in range(20)]
    return torch.cat([codes.double() * factor for codes, factor in made])


def biases() -> Tensor:
    (rows,) = DenseLinear(torch.ones(4, 4, dtype=torch.float32), None).decoded(torch.device("cpu"))
    return rows.bias


@pytest.mark.parametrize("make", [blocks, levels, biases, e2m1_levels])
def test_a_table_is_the_same(make: Callable[[], Tensor]) -> None:
    expected = make()
    with default_dtype(torch.bfloat16):
        found = make()
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
