"""The prefix cache outlives the pool and the process: prompts are not computed again, and answers stay the same."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import pytest
import torch

import tiny
import tiny_vision
from adapter_files import write_adapter
from paged_sdk import (
    CompletionResponse,
    ConfigError,
    GgufModelBuilder,
    IsqType,
    MemoryGpuConfig,
    Model,
    NumericalError,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessageRole,
    TextModelBuilder,
    VisionMessages,
    VisionModelBuilder,
    embedded_model_path,
)
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.runner import stored_blocks
from paged_sdk.runner.block_files import BlockFiles

BLOCK: Final = 4
PROMPT: Final = [(5 * i * i + 1) % 500 + 3 for i in range(75)]
WHOLE: Final = len(PROMPT) - 1 - (len(PROMPT) - 1) % BLOCK
GREEDY: Final = SamplingParams(temperature=0, max_len=12, ignore_eos=True, top_n_logprobs=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def meta(tokens: int = 2000, cache_type: PagedCacheType = PagedCacheType.AUTO) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=BLOCK, gpu_memory=MemoryGpuConfig.ContextSize(tokens), cache_type=cache_type)


def builder_of(checkpoint: Path, tokens: int = 2000) -> TextModelBuilder:
    builder = TextModelBuilder(checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    return builder.with_paged_attn(meta(tokens)).with_batch_invariance()


def said(response: CompletionResponse) -> list[object]:
    return [
        (choice.text, [(entry.token, entry.logprob) for entry in choice.logprobs.content])
        for choice in response.choices
        if choice.logprobs is not None
    ]


def cached(response: CompletionResponse) -> int:
    return response.usage.prompt_tokens_details.cached_tokens


def stored(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


async def ask(model: Model, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY) -> CompletionResponse:
    return await model.send_completion_request(prompt, sampling=sampling)


async def twice(builder: TextModelBuilder, directory: Path) -> tuple[CompletionResponse, CompletionResponse]:
    """Ask the same of two models, one after the other, which share a directory."""
    answers = []
    for _ in range(2):
        async with builder.with_prefix_cache_dir(directory).build() as model:
            answers.append(await ask(model))
    return answers[0], answers[1]


MODES: Final[dict[str, Callable[[TextModelBuilder], TextModelBuilder]]] = {
    "plain": lambda builder: builder,
    "bfloat16": lambda builder: builder.with_dtype("bfloat16"),
    "FP8": lambda builder: builder.with_paged_attn(meta(cache_type=PagedCacheType.F8E4M3)),
    "4 bits": lambda builder: builder.with_paged_attn(meta(cache_type=PagedCacheType.Q4)),
    "quantized": lambda builder: builder.with_isq(IsqType.Q8_0),
    "small chunks": lambda builder: builder.with_max_num_batched_tokens(5),
    "speculation": lambda builder: builder.with_speculation(SpeculativeConfig(3)),
}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_the_next_model_reads_what_the_first_has_computed(
    mode: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    if mode == "4 bits":
        tiny_checkpoint = tiny.make_checkpoint("llama", tmp_path / "model", head_dim=32)
    first, second = await twice(MODES[mode](builder_of(tiny_checkpoint)), tmp_path / "kv")
    assert (cached(first), cached(second)) == (0, WHOLE)
    assert said(second) == said(first)


@pytest.mark.anyio
@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3_moe"])
async def test_families(family: str, tmp_path: Path) -> None:
    """Windows in every other layer, in every layer, and experts."""
    checkpoint = tiny.make_checkpoint(family, tmp_path / "model")
    builder = builder_of(checkpoint)
    first, second = await twice(builder, tmp_path / "kv")
    assert cached(second) == WHOLE
    assert said(second) == said(first)


@pytest.mark.anyio
async def test_what_has_left_the_pool_comes_back(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint, tokens=120).with_max_model_len(110)
    others = [[7 + number, *PROMPT[1:]] for number in range(4)]
    async with builder.build() as model:
        expected = said(await ask(model))
    async with builder.with_prefix_cache_dir(tmp_path).build() as model:
        await ask(model)
        for other in others:
            await ask(model, other)
        await anyio.sleep(0.2)  # for the last blocks to be written
        again = await ask(model)
        assert said(again) == expected
        assert cached(again) == WHOLE
        assert model.stats().prefix_restored >= WHOLE
        assert model.stats().blocks_used == 0
    async with builder.with_prefix_cache_n(16).build() as model:
        await ask(model)
        for other in others:
            await ask(model, other)
        assert cached(await ask(model)) == 0


@pytest.mark.anyio
async def test_a_prompt_larger_than_the_memory_for_reading(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a prompt is read in parts, nothing else runs whose step would take the parts into the pool."""
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path)
    async with builder.build() as model:
        expected = said(await ask(model))
    size = stored(tmp_path)[0].stat().st_size
    monkeypatch.setattr(stored_blocks, "_MOST_PER_READ", 2 * size)
    monkeypatch.setattr(stored_blocks, "_MOST_UNUSED", 4 * size)
    async with builder.build() as model:
        with anyio.fail_after(20):
            answer = await ask(model)
        assert (said(answer), cached(answer)) == (expected, WHOLE)


@pytest.mark.anyio
async def test_a_disk_that_does_not_answer(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path).with_max_num_seqs(1)
    async with builder.build() as model:
        expected = said(await ask(model))
    leave = threading.Event()
    monkeypatch.setattr(stored_blocks, "_MOST_SECONDS", 0.1)
    monkeypatch.setattr(BlockFiles, "read", lambda self, digest, pieces: leave.wait(20) and False)
    async with builder.build() as model:
        with anyio.fail_after(10):
            for _ in range(2):
                answer = await ask(model)
                assert said(answer) == expected
        leave.set()


@pytest.mark.anyio
async def test_many_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint, tokens=400).with_max_model_len(120).with_max_num_seqs(4)
    prompts = [[*PROMPT[: 30 + 3 * number], number + 3] for number in range(12)]
    answers: list[dict[int, list[object]]] = []
    for _ in range(2):
        found: dict[int, list[object]] = {}

        async def one(number: int, model: Model, found: dict[int, list[object]]) -> None:
            found[number] = said(await ask(model, prompts[number]))

        async with builder.with_prefix_cache_dir(tmp_path).build() as model:
            async with anyio.create_task_group() as group:
                for number in range(len(prompts)):
                    group.start_soon(one, number, model, found)
            stats = model.stats()
            assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)
        answers.append(found)
    assert answers[0] == answers[1]
    assert stats.prefix_restored > 0
    # Prompts that share blocks read them once.
    assert stats.prefix_restored <= sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)


@pytest.mark.anyio
async def test_several_choices_and_adapters(tiny_checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny.build_model("llama"), strength=0.05)
    builder = builder_of(tiny_checkpoint).with_adapter(adapter, name="other").with_prefix_cache_dir(tmp_path / "kv")
    sampling = SamplingParams(temperature=0.9, seed=3, n_choices=3, max_len=9, ignore_eos=True, top_n_logprobs=1)
    found = []
    for _ in range(2):
        async with builder.build() as model:
            plain = await ask(model, sampling=sampling)
            adapted = await model.send_completion_request(PROMPT, sampling=GREEDY, adapter="other")
            found.append((said(plain), said(adapted), cached(plain), cached(adapted)))
    assert found[0][:2] == found[1][:2]
    assert found[0][0] != found[0][1]
    assert (found[0][2:], found[1][2:]) == ((0, 0), (WHOLE, WHOLE))


@pytest.mark.anyio
async def test_a_salt_keeps_prompts_apart(tiny_checkpoint: Path, tmp_path: Path) -> None:
    request = RequestBuilder().add_message(TextMessageRole.USER, "the same words " * 9).with_sampling(GREEDY)
    for salts, is_found in ((("a",), False), (("b", "a"), True)):
        async with builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path).build() as model:
            for salt in salts:
                response = await model.send_chat_request(request.with_cache_salt(salt))
                assert (response.usage.prompt_tokens_details.cached_tokens > 0) == (is_found and salt == "a")


@pytest.mark.anyio
async def test_prompts_with_images(tmp_path: Path) -> None:
    tiny_vision.make_vision_checkpoint("llava", tmp_path / "model")
    builder = VisionModelBuilder(tmp_path / "model").with_dtype("float32").with_force_cpu().with_num_threads(1)
    builder = builder.with_paged_attn(meta()).with_batch_invariance().with_prefix_cache_dir(tmp_path / "kv")
    messages = VisionMessages().add_image_message(TextMessageRole.USER, "what is this?", [tiny_vision.picture(20, 20)])
    request = RequestBuilder.from_messages(messages).with_sampling(GREEDY)
    texts, tokens = [], []
    for _ in range(2):
        async with builder.build() as model:
            response = await model.send_chat_request(request)
            texts.append(response.choices[0].message.content)
            tokens.append(response.usage.prompt_tokens_details.cached_tokens)
    assert texts[0] == texts[1]
    assert tokens[0] == 0
    assert tokens[1] > 0


@pytest.mark.anyio
async def test_other_weights_or_settings_find_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path / "kv")
    async with builder.build() as model:
        await ask(model)
    changed = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    tiny.make_checkpoint("llama", changed, seed=5)
    others = [
        builder.with_dtype("bfloat16"),
        builder.with_isq(IsqType.Q8_0),
        builder.with_paged_attn(PagedAttentionMeta(block_size=8)),
        builder.with_paged_attn(meta(cache_type=PagedCacheType.F8E4M3)),
        builder_of(changed).with_prefix_cache_dir(tmp_path / "kv"),
    ]
    for other in others:
        async with other.build() as model:
            assert cached(await ask(model)) == 0
    async with builder.build() as model:
        assert cached(await ask(model)) == WHOLE


@pytest.mark.anyio
async def test_other_weights_in_files_of_the_same_age_find_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Some ways of packing give every file the same time, and weights of one shape have files of one size."""
    other = tiny.make_checkpoint("llama", tmp_path / "other", seed=5)
    sizes = []
    for checkpoint in (shutil.copytree(tiny_checkpoint, tmp_path / "one"), other):
        own = [each for each in checkpoint.iterdir() if each.is_file()]  # other tests may have made directories
        for file in own:
            os.utime(file, (1, 1))
        sizes.append({file.name: file.stat().st_size for file in own})
        async with builder_of(checkpoint).with_prefix_cache_dir(tmp_path / "kv").build() as model:
            assert cached(await ask(model)) == 0
    assert sizes[0] == sizes[1]


@pytest.mark.anyio
async def test_weights_are_requantized_without_files_that_are_gone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words to calibrate with. " * 40)
    builder = builder_of(tiny_checkpoint).with_isq(IsqType.Q8_0).with_calibration_file(text)
    async with builder.with_prefix_cache_dir(tmp_path / "kv").build() as model:
        await ask(model)
        text.unlink()
        await model.re_isq_model(IsqType.Q4K)
        assert cached(await ask(model)) == 0
        assert cached(await ask(model)) == WHOLE


@pytest.mark.anyio
async def test_requantized_weights_have_blocks_of_their_own(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path)
    async with builder.build() as model:
        before = said(await ask(model))
        await model.re_isq_model(IsqType.Q4K)
        other = await ask(model)
        assert cached(other) == 0
        assert said(other) != before
    async with builder.build() as model:
        again = await ask(model)
        assert (said(again), cached(again)) == (before, WHOLE)
        await model.re_isq_model(IsqType.Q4K)
        once_more = await ask(model)
        assert (said(once_more), cached(once_more)) == (said(other), WHOLE)


@pytest.mark.anyio
async def test_a_reset_removes_what_is_stored(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path)
    async with builder.build() as model:
        await ask(model)
        await model.reset_prefix_cache()
        assert cached(await ask(model, PROMPT[:50])) == 0
        await model.reset_prefix_cache()
    assert not stored(tmp_path)


@pytest.mark.anyio
async def test_damaged_blocks_are_computed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path)
    async with builder.build() as model:
        expected = said(await ask(model))
    for number, path in enumerate(stored(tmp_path)):
        if number % 3 == 0:
            path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = [-1]
    while found[-1] < WHOLE:  # reading ends at the first damaged block, which is then written anew
        async with builder.build() as model:
            answer = await ask(model)
            assert said(answer) == expected
            assert cached(answer) > found[-1]
            found.append(cached(answer))
    assert len(found) > 3


@pytest.mark.anyio
async def test_a_prompt_with_nan_is_not_stored(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path).with_max_num_batched_tokens(16)
    async with builder.build() as model:
        await ask(model, PROMPT[:40])
        with monkeypatch.context() as patch:
            for kind in (DecoderModel, FusedDecoderModel):
                patch.setattr(
                    kind, "logits", lambda self, hidden, adapted=None: torch.full((len(hidden), 512), torch.nan)
                )
            with pytest.raises(NumericalError):
                await ask(model)
        await anyio.sleep(0.1)
    async with builder.build() as model:
        assert cached(await ask(model)) == 0


@pytest.mark.anyio
async def test_cancelled_requests_leave_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path)
    async with builder.build() as model:
        expected = said(await ask(model))
    async with builder.build() as model:
        for delay in (0.0, 0.0005, 0.001, 0.002, 0.004):
            with anyio.move_on_after(delay):
                await ask(model)
            await model.reset_prefix_cache() if delay == 0.001 else await anyio.lowlevel.checkpoint()
        assert said(await ask(model)) == expected
        with anyio.fail_after(10):
            while model.stats().blocks_used or model.stats().waiting:
                await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_two_models_of_a_process_share_a_directory(tiny_checkpoint: Path, tmp_path: Path) -> None:
    builder = builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path)
    async with builder.build() as one, builder.build() as other:
        first = await ask(one)
        with anyio.fail_after(10):
            while len(stored(tmp_path)) < WHOLE // BLOCK:
                await anyio.sleep(0.01)
        second = await ask(other)
        assert (cached(first), cached(second)) == (0, WHOLE)
        assert said(first) == said(second)


@pytest.mark.anyio
async def test_the_directory_stays_within_its_size(tiny_checkpoint: Path, tmp_path: Path) -> None:
    limit = 200_000
    async with builder_of(tiny_checkpoint).with_prefix_cache_dir(tmp_path, limit).build() as model:
        for number in range(12):
            await ask(model, [number + 3, *PROMPT])
    assert 0 < sum(path.stat().st_size for path in stored(tmp_path)) <= limit


@pytest.mark.anyio
async def test_what_does_not_go_together_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = builder_of(tiny_checkpoint)
    others = {
        "paged attention": plain.without_paged_attn(),
        "a prefix cache": plain.with_prefix_cache_n(None),
        "a model in one process": plain.with_tensor_parallel(2),
    }
    for needed, builder in others.items():
        with pytest.raises(ConfigError, match=f"with_prefix_cache_dir.*{needed}"):
            await builder.with_prefix_cache_dir(tmp_path).build()
    with pytest.raises(ConfigError, match="max_bytes"):
        plain.with_prefix_cache_dir(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"with_prefix_cache_dir.*directory to write to"):
        await plain.with_prefix_cache_dir(Path(__file__)).build()
    with monkeypatch.context() as patch:
        patch.setenv("MISTRALRS_PREFIX_CACHE_DIR", __file__)
        with pytest.raises(ConfigError, match=r"MISTRALRS_PREFIX_CACHE_DIR.*directory to write to"):
            await plain.build()
    # A variable may be meant for another model of the process.
    monkeypatch.setenv("MISTRALRS_PREFIX_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        async with others["a prefix cache"].build() as model:
            await ask(model)
    assert "MISTRALRS_PREFIX_CACHE_DIR has no effect here" in caplog.text
    async with plain.build() as model:
        await ask(model)
    async with plain.build() as model:
        assert cached(await ask(model)) == WHOLE


@pytest.mark.anyio
async def test_a_home_directory_is_expanded(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with builder_of(tiny_checkpoint).with_prefix_cache_dir("~/kv").build() as model:
        await ask(model)
    assert stored(tmp_path / "kv")


@pytest.mark.anyio
async def test_the_embedded_model(tmp_path: Path) -> None:
    question = RequestBuilder().add_message(TextMessageRole.SYSTEM, "You are a guide. " * 40)
    question = question.add_message(TextMessageRole.USER, "Name the capital of France.")
    found = []
    for _ in range(2):
        async with GgufModelBuilder(embedded_model_path()).with_prefix_cache_dir(tmp_path).build() as model:
            response = await model.send_chat_request(question)
            found.append((response.choices[0].message.content, response.usage.prompt_tokens_details.cached_tokens))
    assert found[0][0] == found[1][0]
    assert "Paris" in found[0][0]
    assert found[0][1] == 0
    assert found[1][1] > 150
