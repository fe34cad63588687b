"""Models whose layers are on several devices say what they say on one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from adapter_files import write_adapter
from drafting import drafting
from far_device import FAR, FARTHER, far_model, far_parts, far_tensors, let_choose_far
from native_weights import needs_library
from paged_sdk import (
    ConfigError,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    Model,
    OutOfMemoryError,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    TextModelBuilder,
    Topology,
)
from paged_sdk.attention.divided import DividedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.kv.pool_size import DeviceMemory
from paged_sdk.models.spanned_decoder import SpannedDecoderModel
from paged_sdk.runner.model_runner import ModelRunner
from tiny import build_model, make_checkpoint

NUM_LAYERS = 4
GREEDY = SamplingParams(temperature=0.0, max_len=12, ignore_eos=True)
PROMPTS = (list(range(5, 60)), [7, 8, 9] * 5, [40, 41, 42, 43] * 6)
PLACES = {
    "the last layers": Topology.empty().with_range(range(2, 4), LayerTopology(device="meta:0")),
    "in between": Topology.empty().with_range(range(1, 2), LayerTopology(device="meta:0")),
    "in turns, head and embeddings": Topology.empty()
    .with_range(range(1), LayerTopology(device="meta:0"))
    .with_range(range(2, 3), LayerTopology(device="meta:0"))
    .with_regex("embed_tokens|lm_head", LayerTopology(device="meta:0")),
    "two others": Topology.empty()
    .with_range(range(2), LayerTopology(device="meta:0"))
    .with_range(range(2, 4), LayerTopology(device="meta:1")),
}


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    let_choose_far(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=NUM_LAYERS)


def builder_of(checkpoint: Path, **options: Any) -> TextModelBuilder:
    meta = PagedAttentionMeta(block_size=4, gpu_memory=MemoryGpuConfig.ContextSize(512))
    plain = TextModelBuilder(checkpoint).with_dtype("float32").with_device("cpu").with_num_threads(1)
    return plain.with_paged_attn(evolve(meta, **options))


async def ask(model: Model, sampling: SamplingParams = GREEDY, **options: Any) -> list[str]:
    sent = [model.send_completion_request(prompt, sampling, **options) for prompt in PROMPTS]
    responses = await asyncio.gather(*sent)
    assert model.stats().blocks_used == 0
    return [choice.text for response in responses for choice in response.choices]


def texts(builder: TextModelBuilder, sampling: SamplingParams = GREEDY, **options: Any) -> list[str]:
    async def run() -> list[str]:
        async with far_model(builder) as model:
            return await ask(model, sampling, **options)

    return asyncio.run(run())


def runner_of(parts: Any) -> ModelRunner:
    runner = parts.engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[str]:
    return texts(builder_of(checkpoint))


@pytest.mark.parametrize("place", PLACES)
def test_texts_are_those_of_one_device(checkpoint: Path, expected: list[str], place: str) -> None:
    assert texts(builder_of(checkpoint).with_topology(PLACES[place])) == expected


def test_no_operation_gets_tensors_of_two_devices() -> None:
    with far_tensors():
        there, farther, here = (torch.ones(3, device=device) for device in (FAR, FARTHER, "cpu"))
        assert (there + 1).cpu().tolist() == [2, 2, 2]
        for one, other in ((there, here), (here, farther), (there, farther)):
            with pytest.raises(RuntimeError, match="expected all tensors to be on one device"):
                torch.add(one, other)


@pytest.mark.parametrize("cache_type", PagedCacheType)
def test_pressure_and_chunks(checkpoint: Path, cache_type: PagedCacheType) -> None:
    """Prompts come in chunks, and texts lose their blocks to others, on every device alike."""
    roomy = texts(builder_of(checkpoint, cache_type=cache_type))
    tight = builder_of(checkpoint, gpu_memory=MemoryGpuConfig.ContextSize(84), cache_type=cache_type)

    async def run() -> tuple[list[str], list[str]]:
        builder = tight.with_max_num_batched_tokens(13).with_max_model_len(72).with_topology(PLACES["in between"])
        async with far_model(builder) as model:
            found = await ask(model), await ask(model)
            stats = model.stats()
            assert stats.preemptions > 0
            assert stats.prefix_hits > 0
            return found

    assert asyncio.run(run()) == (roomy, roomy)


def test_keys_and_values_without_pages(checkpoint: Path, expected: list[str]) -> None:
    assert texts(builder_of(checkpoint).without_paged_attn().with_topology(PLACES["in between"])) == expected


def test_drafts_and_choices(checkpoint: Path, expected: list[str]) -> None:
    drawn = evolve(GREEDY, temperature=0.9, seed=3, n_choices=3)
    builder, spread = builder_of(checkpoint), builder_of(checkpoint).with_topology(PLACES["in between"])
    one = texts(builder, drawn)
    assert len(set(one)) > len(PROMPTS)
    assert texts(spread, drawn) == one

    async def run() -> tuple[list[str], int]:
        async with far_model(spread, drafting(looks_back=False)) as model:
            return await ask(model, prediction=expected[0]), model.stats().accepted_tokens

    found, accepted = asyncio.run(run())
    assert found == expected
    assert accepted > 0


def test_adapters_are_where_their_layers_are(checkpoint: Path, expected: list[str], tmp_path: Path) -> None:
    path = write_adapter(tmp_path, build_model("llama", num_hidden_layers=NUM_LAYERS), strength=0.05)
    builder = builder_of(checkpoint).with_adapter(path, name="other")
    adapted = texts(builder, adapter="other")
    assert adapted != expected
    assert texts(builder.with_topology(PLACES["in turns, head and embeddings"]), adapter="other") == adapted


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mixtral"])
def test_families(family: str, tmp_path: Path) -> None:
    """Biases of keys in FP8, windows and tied embeddings, experts."""
    builder = builder_of(make_checkpoint(family, tmp_path), cache_type=PagedCacheType.F8E4M3)
    topology = Topology.empty().with_range(range(1, 2), LayerTopology(device="meta:0"))
    assert texts(builder.with_topology(topology)) == texts(builder)


@needs_library
def test_layers_on_the_cpu_are_fused_span_by_span(
    checkpoint: Path, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paged_sdk")
    parts = far_parts(builder_of(checkpoint).with_topology(PLACES["in between"]))
    inner = runner_of(parts)._parts
    assert inner is not None
    assert isinstance(inner.model, SpannedDecoderModel)
    assert inner.model.fused_spans == (range(1), range(2, 4))
    assert not any("one operation at a time" in message for message in caplog.messages)
    where = "embeddings on cpu, layers 0-1 on cpu, layers 1-2 on meta:0, layers 2-4 on cpu, output projection on cpu"
    assert any(where in message for message in caplog.messages)
    parts.engine.close()


def test_a_step_s_indices_are_made_once_for_each_device(
    checkpoint: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = far_parts(builder_of(checkpoint).with_topology(PLACES["in turns, head and embeddings"]))
    inner = runner_of(parts)._parts
    assert inner is not None
    assert isinstance(inner.backend, DividedBackend)
    counts: dict[torch.device, int] = {}

    def count(device: torch.device, prepare: Any) -> Any:
        def counted(rows: Sequence[Any]) -> Any:
            counts[device] = counts.get(device, 0) + 1
            return prepare(rows)

        return counted

    for device, part in inner.backend.parts.items():
        assert isinstance(part, PagedBackend)
        assert {tensor.device for layer in part._layers for tensor in layer.tensors} == {device}
        assert len(part._layers) == NUM_LAYERS / 2
        monkeypatch.setattr(part, "prepare", count(device, part.prepare))

    async def run() -> list[str]:
        async with Model(parts) as model:
            return await ask(model)

    assert asyncio.run(run()) == expected
    assert counts.keys() == {FAR, torch.device("cpu")}
    assert len(set(counts.values())) == 1


def test_a_text_that_nobody_reads_any_more_leaves_nothing(checkpoint: Path) -> None:
    async def run() -> None:
        async with far_model(builder_of(checkpoint).with_topology(PLACES["the last layers"])) as model:
            stream = model.stream_completion_request(PROMPTS[0], evolve(GREEDY, max_len=400))
            async for _ in stream:
                break
            await stream.aclose()
            await model.send_completion_request(PROMPTS[1], GREEDY)
            assert model.stats().blocks_used == 0

    asyncio.run(run())


@needs_library
def test_weights_are_quantized_where_they_are(tmp_path: Path) -> None:
    wide = make_checkpoint("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=3)
    quantized = Topology.empty().with_range(range(2), LayerTopology(isq=IsqType.Q8_0))
    spread = quantized.with_range(range(2, 3), LayerTopology(device="meta:0"))
    assert texts(builder_of(wide).with_topology(spread)) == texts(builder_of(wide).with_topology(quantized))
    with pytest.raises(ConfigError, match=r"isq = 'Q8_0' .* \(here meta:0"):
        far_parts(builder_of(wide).with_topology(spread).with_isq(IsqType.Q8_0))
    with pytest.raises(ConfigError, match=r"isq = 'Q4K' .* \(here meta:0"):
        far_parts(builder_of(wide).with_topology(spread.with_regex(r"layers\.2\.", LayerTopology(isq=IsqType.Q4K))))


@needs_library
def test_weights_are_quantized_again_on_every_device(tmp_path: Path) -> None:
    wide = make_checkpoint("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=3)
    path = write_adapter(
        tmp_path / "adapter",
        build_model("llama", hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=3),
        strength=0.05,
    )
    builder = builder_of(wide).with_isq(IsqType.Q8_0).with_adapter(path, name="other")
    spread = builder.with_topology(Topology.empty().with_range(range(1, 2), LayerTopology(device="cpu:0")))

    async def run(builder: TextModelBuilder) -> list[list[str]]:
        async with far_model(builder) as model:
            before = await ask(model), await ask(model, adapter="other")
            await model.re_isq_model(IsqType.Q4K)
            return [*before, await ask(model), await ask(model, adapter="other")]

    found = asyncio.run(run(builder))
    assert len({tuple(each) for each in found}) == 4
    assert asyncio.run(run(spread)) == found


def test_what_one_device_alone_can_do_is_refused(checkpoint: Path) -> None:
    builder = builder_of(checkpoint).with_topology(PLACES["in between"]).with_batch_invariance()
    with pytest.raises(ConfigError, match=r"with_batch_invariance = True .* a model on one device; here embeddings on"):
        far_parts(builder)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"down_proj", r"'/down_proj/: device meta:0' .* one device for all of a layer, and not model\.layers\.0\."),
        (r"layers\.[01]\.mlp", "one device for all of a layer"),
    ],
)
def test_a_layer_is_on_one_device(checkpoint: Path, pattern: str, said: str) -> None:
    topology = Topology.empty().with_regex(pattern, LayerTopology(device="meta:0"))
    with pytest.raises(ConfigError, match=said):
        far_parts(builder_of(checkpoint).with_topology(topology))


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for device in ("cuda[7]", "cuda:7", "cpu:1", "nowhere"):
        topology = Topology.empty().with_range(range(1), LayerTopology(device=device))
        with pytest.raises(ConfigError, match=r"topology = '0-1: device [a-z]+") as caught:
            far_parts(TextModelBuilder(tmp_path / "none").with_device("cpu").with_topology(topology))
        assert device in str(caught.value)


def test_the_pool_is_what_every_device_can_hold(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 256 bytes on the other device, which has one of the layers, and 768 on the CPU."""
    free = {"cpu": 2**20, "meta": 2**20}
    monkeypatch.setattr(
        "paged_sdk.build.kv_memory.device_memory",
        lambda device: DeviceMemory(total=2 * free[device.type], free=free[device.type]),
    )

    def blocks(memory: MemoryGpuConfig) -> int:
        builder = builder_of(checkpoint, gpu_memory=memory).with_topology(PLACES["in between"])
        parts = far_parts(builder)
        parts.engine.close()
        return parts.config.num_blocks

    assert blocks(MemoryGpuConfig.ContextSize(320)) == 80
    free["meta"] = 2**20 // 4
    assert blocks(MemoryGpuConfig.MB(1)) == 256  # three quarters of it are for the CPU
    free["meta"] -= 1024
    assert blocks(MemoryGpuConfig.Fraction(0.875)) == 191  # of twice as much, half of which is in use
    for memory in (MemoryGpuConfig.MB(1), MemoryGpuConfig.ContextSize(1024)):
        with pytest.raises(
            OutOfMemoryError, match=r"^on meta:0: a KV cache of .*ContextSize\(tokens=1024\) "
        ) as caught:
            blocks(memory)
        assert caught.value.largest_context == 1020
    with pytest.raises(OutOfMemoryError, match=r"^a KV cache of .*MB\(megabytes=2\) needs"):
        blocks(MemoryGpuConfig.MB(2))
