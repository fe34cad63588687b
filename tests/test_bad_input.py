"""What a newcomer may get wrong: each is a typed error that says what is allowed, before work starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from paged_sdk import (
    BlockingModel,
    CheckpointError,
    ConfigError,
    GgufModelBuilder,
    InvalidRequestError,
    MemoryGpuConfig,
    Model,
    ModelLoadError,
    NumericalError,
    OutOfMemoryError,
    PagedAttentionMeta,
    PagedError,
    SamplingParams,
    TextMessages,
    TextModelBuilder,
    UnsupportedArchitectureError,
)

pytestmark = pytest.mark.anyio

QUESTION = TextMessages().add_message("user", "Hello")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """Return a checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def edit_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


async def build_fails(builder: TextModelBuilder | GgufModelBuilder, kind: type[PagedError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        await builder.build()
    for word in words:
        assert word in str(caught.value)


async def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    await build_fails(TextModelBuilder(tmp_path / "nothing"), ModelLoadError, "nothing")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
async def test_a_link_that_leads_nowhere(copy: Path, name: str) -> None:
    (copy / "model.safetensors").unlink()
    (copy / name).symlink_to("nothing")
    await build_fails(TextModelBuilder(copy), CheckpointError, str(copy))


async def test_a_gguf_file_cut_in_half(tmp_path: Path) -> None:
    whole = tiny.make_gguf(tmp_path)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    await build_fails(GgufModelBuilder(cut), CheckpointError, "cut.gguf")


async def test_a_pickled_checkpoint(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, copy / "pytorch_model.bin")
    await build_fails(TextModelBuilder(copy), CheckpointError, "pytorch_model.bin", "safetensors")


async def test_an_unknown_architecture(copy: Path) -> None:
    edit_config(copy, model_type="mamba", architectures=["MambaForCausalLM"])
    await build_fails(TextModelBuilder(copy), UnsupportedArchitectureError, "mamba", "keeps other states")


async def test_a_missing_tensor(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors")
    await build_fails(TextModelBuilder(copy), CheckpointError, "model.norm.weight")


async def test_nan_in_the_weights_reaches_the_request_as_an_error(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, copy / "model.safetensors")
    async with TextModelBuilder(copy).with_dtype("float32").build() as model:
        for _ in range(2):
            with pytest.raises(NumericalError) as caught:
                await model.send_chat_request(QUESTION)
            assert caught.value.request_id in str(caught.value)
        assert model.stats().blocks_used == 0


@pytest.mark.parametrize("paged", [True, False])
async def test_what_begins_like_a_prompt_that_ended_in_nan_is_computed_anew(
    copy: Path, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN may be in the KV of the tokens before it, too, which were computed in one chunk with it."""
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, copy / "model.safetensors")
    builder = TextModelBuilder(copy).with_dtype("float32").with_max_num_batched_tokens(64)
    same, short = [5, 6, 7, 8] * 10, SamplingParams(max_len=2, temperature=0)

    async def num_cached(model: Model) -> int:
        usage = (await model.send_completion_request([*same, 9], short)).usage
        return usage.prompt_tokens_details.cached_tokens

    monkeypatch.setenv("MISTRALRS_PAGED_ATTN", "on" if paged else "off")
    async with builder.build() as model:
        with pytest.raises(NumericalError):
            await model.send_completion_request([*same, 77, *[9] * 100], short)
        assert await num_cached(model) == 0
        assert await num_cached(model) >= 32


async def test_a_template_that_tries_to_reach_python(tiny_checkpoint: Path) -> None:
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    async with TextModelBuilder(tiny_checkpoint).with_chat_template(hostile).build() as model:
        with pytest.raises(InvalidRequestError, match="template"):
            await model.send_chat_request(QUESTION)


async def test_a_template_that_is_malformed(tiny_checkpoint: Path) -> None:
    await build_fails(TextModelBuilder(tiny_checkpoint).with_chat_template("{% for %}"), ModelLoadError, "template")


async def test_a_pool_that_does_not_fit(builder: TextModelBuilder) -> None:
    huge = PagedAttentionMeta(gpu_memory=MemoryGpuConfig.MB(10**9))
    with pytest.raises(OutOfMemoryError, match="largest") as caught:
        await builder.with_paged_attn(huge).build()
    assert caught.value.needed > caught.value.available > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda builder: builder.with_max_model_len(10**6), ("max_model_len", "2048")),
        (lambda builder: builder.with_device("cuda:7"), ("device", "cpu")),
        (lambda builder: builder.with_device("abacus"), ("device", "cpu")),
        (lambda builder: builder.with_dtype("int3"), ("dtype", "bfloat16")),
        (lambda builder: builder.with_token_source("env:NO_SUCH_VARIABLE"), ("NO_SUCH_VARIABLE",)),
        (lambda builder: builder.with_token_source("password"), ("with_token_source", "literal")),
        (lambda builder: builder.with_token_source("path:/proc/self/mem"), ("with_token_source", "a readable file")),
        (lambda builder: builder.with_token_source("path:/dev/zero"), ("with_token_source", "not a regular file")),
        (lambda builder: builder.with_token_source("path:~nobody/x"), ("with_token_source", "a readable file")),
        (lambda builder: builder.with_paged_attn(None), ("with_paged_attn", "PagedAttentionMeta")),
        (lambda builder: builder.with_paged_attn({}), ("with_paged_attn", "PagedAttentionMeta")),
        (lambda builder: builder.with_paged_attn(True), ("with_paged_attn", "PagedAttentionMeta")),
        (lambda builder: builder.with_paged_attn(lambda: "yes"), ("with_paged_attn", "PagedAttentionMeta")),
        (lambda builder: builder.with_paged_attn(lambda: None), ("with_paged_attn", "PagedAttentionMeta")),
        (lambda builder: builder.with_chat_template(5), ("with_chat_template", "a template or a path")),
        (lambda builder: builder.with_chat_template("x" * 10**5), ("with_chat_template", "a template or a path")),
        (lambda builder: builder.with_tokenizer_json("x" * 10**5), ("with_tokenizer_json", "a path")),
        (lambda builder: builder.with_tokenizer_json(5), ("with_tokenizer_json", "a path")),
        (lambda builder: builder.with_prefix_cache_n(""), ("prefix_cache_n", ">= 0")),
        (lambda builder: builder.with_auto_isq(True), ("with_auto_isq", "2, 3, 4, 5, 6 or 8")),
        (lambda builder: builder.with_num_threads(10**9), ("num_threads", "<= 1024")),
        (lambda builder: builder.with_max_num_seqs(0), ("max_num_seqs", ">= 1")),
        (lambda builder: builder.with_num_threads(-1), ("num_threads", ">= 1")),
    ],
)
async def test_a_setting_that_cannot_be_used(
    builder: TextModelBuilder, change: Callable[[TextModelBuilder], TextModelBuilder], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        await change(builder).build()
    for word in words:
        assert word in str(caught.value)


def test_none_is_taken_where_a_builder_s_signature_has_it() -> None:
    builder, taking = TextModelBuilder("model"), []
    for name in dir(builder):
        if not name.startswith("with_"):
            continue
        first = next((each for each in get_type_hints(getattr(builder, name)) if each != "return"), None)
        if first is not None and NoneType in get_args(get_type_hints(getattr(builder, name))[first]):
            getattr(builder, name)(None)
            taking.append(name)
    assert taking == ["with_prefix_cache_n", "with_speculation"]


async def test_one_build_is_one_model(builder: TextModelBuilder) -> None:
    building = builder.build()
    async with building as model:
        with pytest.raises(ConfigError, match=r"this build\(\) was used already"):
            await building
        with pytest.raises(ConfigError, match=r"this build\(\) was used already"):
            async with building:
                pass
        assert (await model.send_completion_request("Hello", SamplingParams(max_len=1))).choices
    with pytest.raises(ConfigError):
        BlockingModel(building)


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ("Hello", {"max_len": 3}, "sampling = {'max_len': 3}"),
        ("Hello", 5, "sampling = 5"),
        (b"Hello", None, "prompt = b'Hello'"),
        (bytearray(b"Hello"), None, "prompt = bytearray(b'Hello')"),
        (memoryview(b"Hello"), None, "prompt = <memory"),
        ({1: 2}, None, "prompt = {1: 2}"),
        ({1, 2}, None, "prompt = {1, 2}"),
        (5, None, "prompt = 5"),
        (None, None, "prompt = None"),
        ([1, True], None, "prompt = True"),
        ([1, 2.0], None, "prompt = 2.0"),
        (np.array([1.0, 2.0]), None, "prompt = 1.0"),
        (np.array([True]), None, "prompt = True"),
        (np.array([[1, 2]]), None, "prompt = array([[1, 2]])"),
        ([-1], None, "prompt = -1"),
        ([10**9] * 10**5, None, "prompt = 1000000000"),
    ],
)
async def test_a_prompt_that_cannot_be_used(model: Model, prompt: Any, sampling: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await model.send_completion_request(prompt, sampling)
    assert str(caught.value).startswith(named)
    assert len(str(caught.value)) < 300


async def test_numpy_s_token_ids_are_token_ids(model: Model) -> None:
    sampling = SamplingParams(temperature=0.0, max_len=4)
    arrays: list[Any] = [np.array([3, 4, 5]), [np.int32(3), np.int64(4), 5], torch.tensor([3, 4, 5]), range(3, 6)]
    texts = [(await model.send_completion_request(ids, sampling)).choices[0].text for ids in ([3, 4, 5], *arrays)]
    assert len(set(texts)) == 1
    ids: Any = np.array([3, 4, 5])
    assert await model.detokenize(ids) == await model.detokenize([3, 4, 5])


async def test_a_bad_environment_stops_the_build(builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISTRALRS_PAGED_ATTN_CACHE_TYPE", "int4")
    await build_fails(builder, ConfigError, "MISTRALRS_PAGED_ATTN_CACHE_TYPE", "int4", "f8e4m3")


async def test_explicit_settings_win_over_the_environment(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISTRALRS_PAGED_ATTN", "off")
    monkeypatch.setenv("MISTRALRS_PREFIX_CACHE_N", "3")
    async with builder.build() as model:
        assert not model.config.paged
        assert model.config.prefix_cache_n == 3
    meta = PagedAttentionMeta(block_size=16, gpu_memory=MemoryGpuConfig.ContextSize(160))
    async with builder.with_paged_attn(meta).with_prefix_cache_n(None).build() as model:
        assert (model.config.num_blocks, model.config.block_size) == (10, 16)
        assert model.config.prefix_cache_n == 0


async def test_a_model_without_a_template_completes_but_does_not_chat(copy: Path) -> None:
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    (copy / "chat_template.jinja").unlink(missing_ok=True)

    async def ask(model: Model) -> None:
        with pytest.raises(InvalidRequestError, match="send_completion_request"):
            await model.send_chat_request(QUESTION)
        assert (await model.send_completion_request("Hello", SamplingParams(max_len=3))).choices

    async with TextModelBuilder(copy).build() as model:
        await ask(model)
