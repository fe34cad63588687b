"""Scores that fall with the distance of keys: slopes, single queries, and a model in an engine."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from odd_configs import reference_of
from safetensors.torch import save_file
from test_not_fused import continuation, expected
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import tiny
from native_weights import needs_library
from paged_sdk import TextModelBuilder
from paged_sdk.build.topology import isq_by_name
from paged_sdk.config.isq import IsqType
from paged_sdk.config.topology import LayerTopology, Topology
from paged_sdk.kernels.attention import decode_attention, prefill_attention
from paged_sdk.kernels.attention_inputs import ScoreOptions
from paged_sdk.models.alibi import alibi_slopes

BLOOM: Final[dict[str, Any]] = {
    "model_type": "bloom",
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 96,
    "n_layer": 2,
    "n_head": 6,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("num_heads", [1, 4, 6, 12, 71])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    bloom: Any = _get_alibi_slopes(num_heads, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), bloom)
    mpt: Any = build_mpt_alibi_tensor(num_heads, 2, 5)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads, 5)), -mpt[:, 0, 0])


def test_single_queries_of_texts_of_several_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(*shape, 8, generator=generator, dtype=torch.float64) for shape in ((2, 4), (2, 9, 2), (2, 9, 2))
    )
    slopes = torch.tensor([0.5, 0.1, 2.0, 0.7])
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    scores = ScoreOptions(scale=1 / math.sqrt(8), softcap=3.0, alibi_slopes=slopes)
    own = decode_attention(query, key, value, mask, scores)
    for row, length in enumerate((9, 5)):
        alone = prefill_attention(query[row, None], key[row, :length], value[row, :length], scores)
        torch.testing.assert_close(own[row], alone[0])
        torch.testing.assert_close(
            decode_attention(query[row, None], key[row, None, :length], value[row, None, :length], None, scores), alone
        )


@needs_library
@pytest.mark.anyio
async def test_a_checkpoint_without_prefixes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As BLOOM's were released; prompts that share a start, so that the prefix cache serves some."""
    caplog.set_level(logging.INFO, "paged_sdk")
    tiny.make_checkpoint("llama", tmp_path)  # for its tokenizer
    reference = reference_of(BLOOM, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BLOOM | {"architectures": ["BloomForCausalLM"]}))
    tensors = {name.removeprefix("transformer."): each for name, each in reference.state_dict().items()}
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    async with TextModelBuilder(tmp_path).with_force_cpu().with_dtype("float32").build() as model:
        for prompt in ([5, 7, 11], list(range(60)), [*range(60), 9, 4]):
            assert await continuation(model, prompt) == expected(reference, prompt)
        assert model.stats().prefix_hits > 0
    assert "native CPU kernels: they have no alibi" in caplog.text


@pytest.mark.parametrize("layers", ["model.layers", "transformer.h", "h", "transformer.blocks"])
def test_topologies_find_layers_of_every_name(layers: str) -> None:
    topology = Topology.empty().with_range(range(1, 3), LayerTopology(isq=IsqType.Q4K))
    ((expression, _),) = isq_by_name(topology)
    assert expression.search(f"{layers}.2.mlp.weight")
    assert not expression.search(f"{layers}.3.mlp.weight")
