"""Quantizing single layers, through the public face."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from native_weights import needs_library
from paged_sdk import ConfigError, IsqType, LayerTopology, Model, SamplingParams, TextModelBuilder, Topology
from paged_sdk.quant.side_by_side import SideBySideLinear

pytestmark = [pytest.mark.anyio, needs_library]

Q2K, Q6K, Q8_0 = (LayerTopology(isq=isq) for isq in (IsqType.Q2K, IsqType.Q6K, IsqType.Q8_0))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    return tiny.make_checkpoint("llama", directory, hidden_size=256, intermediate_size=512, head_dim=64)


def builder_of(checkpoint: Path) -> TextModelBuilder:
    return TextModelBuilder(checkpoint).with_force_cpu().with_num_threads(1).with_dtype("float32")


async def prompt_logprobs(model: Model) -> list[float]:
    response = await model.send_completion_request(
        list(range(5, 60)), SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    )
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


async def logprobs_of(builder: TextModelBuilder) -> list[float]:
    async with builder.build() as model:
        return await prompt_logprobs(model)


async def test_layers_are_quantized_as_their_topology_says(checkpoint: Path) -> None:
    builder = builder_of(checkpoint)
    everywhere = Topology.empty().with_range(range(2), Q2K).with_regex("embed_tokens|lm_head", Q6K)
    by_setting = await logprobs_of(builder.with_isq(IsqType.Q2K))
    assert await logprobs_of(builder.with_topology(everywhere)) == by_setting
    # It counts before the setting, and says nothing of what it does not select.
    assert await logprobs_of(builder.with_isq(IsqType.Q8_0).with_topology(everywhere)) == by_setting
    one = Topology.empty().with_range(range(1, 2), Q2K)
    partly = await logprobs_of(builder.with_isq(IsqType.Q8_0).with_topology(one))
    assert partly not in (by_setting, await logprobs_of(builder.with_isq(IsqType.Q8_0)))


async def test_an_expression_counts_before_a_range(checkpoint: Path) -> None:
    builder = builder_of(checkpoint)
    ranges = Topology.empty().with_range(range(2), Q2K)
    both = Topology.empty().with_regex("layers", Q8_0).with_range(range(2), Q2K)
    alone = Topology.empty().with_regex("layers", Q8_0)
    assert await logprobs_of(builder.with_topology(both)) == await logprobs_of(builder.with_topology(alone))
    assert await logprobs_of(builder.with_topology(both)) != await logprobs_of(builder.with_topology(ranges))


async def test_one_matrix_of_several_that_share_an_input(checkpoint: Path) -> None:
    builder = builder_of(checkpoint)
    exact = await logprobs_of(builder)
    topology = Topology.empty().with_regex(r"layers\.0\.self_attn\.k_proj", Q8_0)
    async with builder.with_topology(topology).build() as model:
        near = await prompt_logprobs(model)
    assert 0 < sum(abs(a - b) for a, b in zip(near, exact, strict=True)) / len(exact) < 1


async def test_a_file_in_the_command_line_s_form(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text("0-2:\n  isq: Q8_0\n  device: cpu\n")
    expected = await logprobs_of(builder_of(checkpoint).with_topology(Topology.empty().with_range(range(2), Q8_0)))
    assert await logprobs_of(builder_of(checkpoint).with_topology(Topology.from_yaml(file))) == expected


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        (Topology.empty().with_range(range(1, 3), Q8_0), r"topology = '1-3' .* layers below 2,"),
        (Topology.empty().with_range(range(10**9), Q8_0), r"layers below 2,"),
        (Topology.empty().with_regex("no_such", Q8_0), r"topology = '/no_such/' .* such as model\.layers\."),
        (
            Topology.empty().with_range(range(1), LayerTopology(device="meta")),
            r"topology = '0-1: device meta' .* a device that this machine has",
        ),
    ],
)
async def test_a_selector_that_selects_nothing_is_refused(checkpoint: Path, topology: Topology, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await builder_of(checkpoint).with_topology(topology).build()


def test_side_by_side_is_a_layer() -> None:
    import torch

    from paged_sdk.quant.dense import DenseLinear

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, 8, generator=generator) for rows in (3, 5)]
    linear = SideBySideLinear([DenseLinear(weight) for weight in weights])
    x = torch.randn(4, 8, generator=generator)
    torch.testing.assert_close(linear.forward(x, None), x @ torch.cat(weights).T)
    assert (linear.in_features, linear.out_features, linear.num_bytes) == (8, 8, 8 * 8 * 4)
    assert linear.native_weights is None
