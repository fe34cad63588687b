"""Models whose layers are on several devices say what they say on one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from adapter_files import write_adapter
from drafting import drafting
from far_device import FAR, FARTHER, AnyBuilder, far_model, far_parts, far_tensors, let_choose_far
from native_weights import needs_library
from paged_sdk import (
    ConfigError,
    Constraint,
    GgufModelBuilder,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    Model,
    OutOfMemoryError,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    Topology,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.attention.backend import AttentionSetup, KvStorage
from paged_sdk.attention.choice import choose_storage
from paged_sdk.attention.divided import DividedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.build.device_setup import weights_must_fit
from paged_sdk.build.placement import choose_devices
from paged_sdk.kernels.step import StepContext
from paged_sdk.kv.pool_size import DeviceMemory
from paged_sdk.models.fused_decoder import FusedLayers
from paged_sdk.models.spanned_decoder import SpannedDecoderModel
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.types.step import AWAITED, StepRow
from tiny import build_model, make_checkpoint, make_gguf, make_other_checkpoint
from tiny_ranker import logits_of, make_answering_ranker, make_decoder_ranker
from tiny_vision import make_vision_checkpoint, picture

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


def texts(builder: AnyBuilder, sampling: SamplingParams = GREEDY, **options: Any) -> list[str]:
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


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.long if "last" in place else ()) for place in PLACES]
)
def test_texts_are_those_of_one_device(checkpoint: Path, expected: list[str], place: str) -> None:
    assert texts(builder_of(checkpoint).with_topology(PLACES[place])) == expected


def test_no_operation_gets_tensors_of_two_devices() -> None:
    with far_tensors():
        there, farther, here = (torch.ones(3, device=device) for device in (FAR, FARTHER, "cpu"))
        assert (there + 1).cpu().tolist() == [2, 2, 2]
        for one, other in ((there, here), (here, farther), (there, farther)):
            with pytest.raises(RuntimeError, match="expected all tensors to be on one device"):
                torch.add(one, other)


@pytest.mark.parametrize(
    "cache_type", [pytest.param(PagedCacheType.AUTO, marks=pytest.mark.long), PagedCacheType.F8E4M3]
)
def test_pressure_and_chunks(checkpoint: Path, cache_type: PagedCacheType) -> None:
    """Prompts come in chunks, and texts lose their blocks to others, on every device alike. On the CPU alone, 8-bit
    keys are stored otherwise: without what is measured of them.
    """
    builder = builder_of(checkpoint, cache_type=cache_type)
    is_exact = cache_type is PagedCacheType.AUTO
    roomy = texts(builder if is_exact else builder.with_topology(PLACES["in between"]))
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


@pytest.mark.long
def test_keys_and_values_without_pages(checkpoint: Path, expected: list[str]) -> None:
    assert texts(builder_of(checkpoint).without_paged_attn().with_topology(PLACES["in between"])) == expected


@pytest.mark.long
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


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(family, marks=pytest.mark.long) for family in ("gemma2", "mixtral"))]
)
def test_families(family: str, tmp_path: Path) -> None:
    """Biases of keys in FP8, windows and tied embeddings, experts."""
    checkpoint = make_checkpoint(family, tmp_path, num_hidden_layers=NUM_LAYERS)
    builder = builder_of(checkpoint, cache_type=PagedCacheType.F8E4M3)
    there, divided = (
        Topology.empty().with_range(layers, LayerTopology(device="meta:0"))
        for layers in (range(NUM_LAYERS), range(1, 2))
    )
    # With all layers on the CPU, FP8's key offsets would be measured.
    assert texts(builder.with_topology(divided)) == texts(builder.with_topology(there))


@needs_library
def test_latent_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers on the CPU run in native calls, which decompress keys of the longest prompt."""
    sizes: dict[str, Any] = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
    }
    checkpoint = make_other_checkpoint("youtu", tmp_path, num_hidden_layers=NUM_LAYERS, **sizes)
    run, found = FusedLayers.run, list[tuple[range, bool]]()

    def watched(self: FusedLayers, hidden: Any, rotations: Any, ctx: StepContext, **options: Any) -> None:
        rows = ctx.attention.native_rows
        found.append((self.layers, rows is not None and rows.batch.decompressed is not None))
        run(self, hidden, rotations, ctx, **options)

    monkeypatch.setattr(FusedLayers, "run", watched)
    expected = texts(builder_of(checkpoint))
    assert texts(builder_of(checkpoint).with_topology(PLACES["in between"])) == expected
    for layers in (range(NUM_LAYERS), range(1), range(2, NUM_LAYERS)):
        assert {decompresses for each, decompresses in found if each == layers} == {True, False}


@needs_library
def test_each_fused_span_uses_its_own_rotary_embeddings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model has one for layers with windows, and one for the third layer, which has none."""
    caplog.set_level(logging.INFO, "paged_sdk")
    builder = builder_of(make_checkpoint("gemma3_text", tmp_path))
    expected = texts(builder)
    for layers in (range(2, 4), range(1, 3)):
        topology = Topology.empty().with_range(layers, LayerTopology(device="meta:0"))
        assert texts(builder.with_topology(topology)) == expected
    assert not any("one operation at a time" in message for message in caplog.messages)


@pytest.mark.parametrize("place", ["the last layers", "in turns, head and embeddings"])
def test_ranks_are_made_where_the_last_layer_is(place: str, tmp_path: Path) -> None:
    """By a layer of their own, and by the output projection."""
    make_decoder_ranker("llama", tmp_path / "layer", num_hidden_layers=NUM_LAYERS)
    make_answering_ranker("llama", tmp_path / "answer", num_hidden_layers=NUM_LAYERS)

    async def ranked(builder: AnyBuilder) -> list[float]:
        async with far_model(builder) as model:
            return logits_of(await model.rank("the sea", ["a ship and a number", "x"]))

    for name in ("layer", "answer"):
        builder = builder_of(tmp_path / name)
        here = asyncio.run(ranked(builder))
        assert asyncio.run(ranked(builder.with_topology(PLACES[place]))) == pytest.approx(here, abs=1e-5)


@needs_library
def test_layers_on_the_cpu_are_fused_span_by_span(
    checkpoint: Path, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paged_sdk")
    parts = far_parts(builder_of(checkpoint).with_topology(PLACES["in between"]))
    inner = runner_of(parts)._step_runner
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
    inner = runner_of(parts)._step_runner
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_images_go_where_layers_add_them(tmp_path: Path) -> None:
    """Qwen3-VL adds vectors of images to what its first layers give, on these layers' devices."""
    make_vision_checkpoint("qwen3_vl", tmp_path)
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(512))
    builder = VisionModelBuilder(tmp_path).with_dtype("float32").with_device("cpu").with_num_threads(1)
    builder = builder.with_paged_attn(meta).with_max_num_batched_tokens(20)
    asked = VisionMessages().add_image_message("user", "What is this?", picture(40, 60))

    async def said(builder: VisionModelBuilder) -> str | None:
        async with far_model(builder) as model:
            response = await model.send_chat_request(RequestBuilder.from_messages(asked).with_sampling(GREEDY))
            return response.choices[0].message.content

    expected = asyncio.run(said(builder))
    # Its encoder reads tensors on the host, which those in disguise refuse.
    here = Topology.empty().with_regex("embed_tokens", LayerTopology(device="cpu"))
    for layer in (0, 1):
        spread = here.with_range(range(layer, layer + 1), LayerTopology(device="meta:0"))
        assert asyncio.run(said(builder.with_topology(spread))) == expected


def test_vectors_and_scores(checkpoint: Path) -> None:
    async def run(builder: TextModelBuilder) -> list[Any]:
        async with far_model(builder) as model:
            vectors = await model.embed(list(PROMPTS), pooling="mean")
            scores = await model.score(list(PROMPTS[1:]), prefix=PROMPTS[0])
            return [*vectors.embeddings, *(score.logprobs for score in scores.scores)]

    there = asyncio.run(run(builder_of(checkpoint).with_topology(PLACES["in between"])))
    for one, other in zip(asyncio.run(run(builder_of(checkpoint))), there, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.long
def test_texts_that_outgrow_longrope_s_context(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
        },
        "original_max_position_embeddings": 60,
        "max_position_embeddings": 512,
    }
    builder = builder_of(make_checkpoint("phi3", tmp_path, **config))
    there, divided = (
        Topology.empty().with_range(layers, LayerTopology(device="meta:0")) for layers in (range(2), range(1, 2))
    )
    # With all layers on the CPU, FP8's key offsets would be measured.
    assert texts(builder.with_topology(divided)) == texts(builder.with_topology(there))


@pytest.mark.long
def test_a_draft_model_has_devices_of_its_own(checkpoint: Path, expected: list[str]) -> None:
    target = builder_of(checkpoint).with_topology(PLACES["the last layers"])
    for topology in (Topology.empty(), PLACES["in between"]):
        draft = TextModelBuilder(checkpoint).with_dtype("float32").with_topology(topology)
        assert texts(TextSpeculativeBuilder(target, draft, SpeculativeConfig(gamma=3))) == expected


@pytest.mark.long
def test_forced_tokens_need_no_logits(checkpoint: Path) -> None:
    constraint = Constraint.regex("(the first (one|two|three) of them, ){1,3}and the last")
    builder = builder_of(checkpoint)
    for place in ("the last layers", "in turns, head and embeddings"):
        spread = builder.with_topology(PLACES[place])
        assert texts(spread, constraint=constraint) == texts(builder, constraint=constraint)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for CUDA here")
def test_a_backend_of_its_own_on_each_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, triton_device: torch.device
) -> None:
    """Triton's kernels, interpreted, read one layer's pages, and the native ones the others'."""
    from paged_sdk.attention.triton_paged import TritonPagedBackend

    def storage(setup: AttentionSetup, candidates: object) -> KvStorage:
        if setup.device != torch.device("cpu:0"):
            return choose_storage(setup)
        pool = evolve(setup.pool, device=triton_device)
        make = partial(TritonPagedBackend, setup.model, pool, max_num_seqs=4, max_model_len=setup.engine.max_model_len)
        return KvStorage(make=make)

    short = evolve(GREEDY, max_len=4)
    builder = builder_of(checkpoint).with_max_num_seqs(4).with_max_num_batched_tokens(32)
    one = texts(builder, short)
    monkeypatch.setattr("paged_sdk.build.kv_storage.choose_storage", storage)
    topology = Topology.empty().with_range(range(1, 2), LayerTopology(device="cpu:0"))
    assert texts(builder.with_topology(topology), short) == one


def test_the_device_without_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 900 << 20, "cuda:0": 100 << 20, "cuda:1": 200 << 20}
    monkeypatch.setattr(
        "paged_sdk.build.device_setup.device_memory", lambda device: DeviceMemory(total=1 << 40, free=free[str(device)])
    )
    devices = [torch.device(name) for name in free]
    said = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a total capacity of 79.11 GiB of which"
    with (
        pytest.raises(OutOfMemoryError, match=r"do not fit cuda:1: 200\.0 MiB were free") as caught,
        weights_must_fit(tmp_path, devices),
    ):
        raise torch.OutOfMemoryError(said)
    assert caught.value.available == 200 << 20


def test_the_next_step_finds_tokens_that_were_chosen_on_another_device() -> None:
    with far_tensors():
        overlap = OverlapTokens(4, FARTHER)
        overlap.put([7, 9], torch.tensor([11, 12]).to(FARTHER))
        row = StepRow(9, 3, [AWAITED], [0], 3)
        batch = make_input_batch([row], FAR, overlap)
        assert batch.token_ids.device == FAR
        assert batch.token_ids.cpu().tolist() == [12]


def test_devices_have_mistral_rs_s_names_too(tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text("0-2:\n  device: cuda[1]\n2-3:\n  device: metal[0]\n3:\n  device: cuda:0\n")
    settings = TextModelBuilder("m").with_device("cpu").with_topology(Topology.from_yaml(file)).settings
    assert [str(device) for device in choose_devices(settings)] == ["cpu", "cuda:1", "mps:0", "cuda:0"]


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_blocks_of_a_gguf_file_are_decoded_where_nothing_multiplies_them(family: str, tmp_path: Path) -> None:
    file = make_gguf(tmp_path, family=family, quantization="Q8_0")
    meta = PagedAttentionMeta(block_size=4, gpu_memory=MemoryGpuConfig.ContextSize(512))
    builder = GgufModelBuilder(tmp_path, [file.name]).with_device("cpu").with_num_threads(1).with_paged_attn(meta)
    topology = Topology.empty().with_range(range(1, 2), LayerTopology(device="meta:0"))
    exact = builder.with_dtype("float32")
    assert texts(exact.with_topology(topology)) == texts(exact)
    parts = far_parts(builder.with_topology(topology))
    inner = runner_of(parts)._step_runner
    assert inner is not None
    assert isinstance(inner.model, SpannedDecoderModel)
    own, there = inner.model._model.layers
    assert [type(linear) is DenseLinear for linear in (*own.linears, *there.linears)] == [False] * len(own.linears) + [
        True
    ] * len(there.linears)
    parts.engine.close()
