"""Vectors of texts, judged by transformers in float32 and the formulas of pooling."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import tiny
from adapter_files import write_adapter
from arrivals import Step, num_unheard, obeyed, wait_for_requests
from paged_sdk import (
    BlockingModel,
    CheckpointError,
    ContextLengthError,
    InvalidRequestError,
    MemoryGpuConfig,
    Model,
    ModelClosedError,
    NumericalError,
    PagedAttentionMeta,
    PagedCacheType,
    QueueFullError,
    ReadingOptions,
    RequestTimeoutError,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    UnsupportedArchitectureError,
    write_gguf,
)
from paged_sdk.config.pooling import POOLINGS, Pooling
from paged_sdk.testing import fake_model
from paged_sdk.types.request_options import RequestOptions
from talk import until

Vectors = npt.NDArray[np.float32]

TEXTS: Final = tuple([(7 * i * i + 3 * n) % 512 for i in range(n)] for n in (3, 40, 41, 90, 17, 1, 64))
GREEDY: Final = SamplingParams(temperature=0, max_len=30, ignore_eos=True)


@functools.cache
def hidden(family: str, text: tuple[int, ...]) -> torch.Tensor:
    model: Any = reference(family)
    with torch.inference_mode():
        states: torch.Tensor = model.get_decoder()(torch.tensor([text])).last_hidden_state[0]
    return states


@functools.cache
def reference(family: str) -> Any:
    return tiny.build_model(family)


def pooled(pooling: Pooling, text: Sequence[int], family: str = "llama", first: int = 0) -> Vectors:
    states = hidden(family, tuple(text))
    places = torch.arange(first + 1, len(text) + 1, dtype=torch.float32)
    match pooling:
        case "last":
            vector = states[-1]
        case "cls":
            vector = states[first]
        case "mean":
            vector = states[first:].mean(0)
        case "max":
            vector = states[first:].amax(0)
        case "weighted_mean":
            vector = places @ states[first:] / places.sum()
    return np.asarray(vector.numpy(), dtype=np.float32)


def expected(pooling: Pooling, family: str = "llama") -> Vectors:
    return np.stack([pooled(pooling, text, family) for text in TEXTS])


def unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), dtype=np.float32)


def builder_of(directory: Path) -> TextModelBuilder:
    return TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_moe"])
async def test_families_give_transformers_hidden_states(family: str, tmp_path: Path) -> None:
    async with builder_of(tiny.make_checkpoint(family, tmp_path)).with_max_num_batched_tokens(50).build() as model:
        for pooling in POOLINGS:
            response = await model.embed(TEXTS, pooling=pooling, normalize=False)
            scale = float(np.abs(expected(pooling, family)).max())
            np.testing.assert_allclose(response.embeddings, expected(pooling, family), atol=2e-5 * scale)


def in_mode(builder: TextModelBuilder, mode: str) -> TextModelBuilder:
    if mode == "contiguous":
        return builder.without_paged_attn()
    kind = PagedCacheType.F8E4M3 if mode == "FP8" else PagedCacheType.AUTO
    memory = MemoryGpuConfig.ContextSize(112 if mode == "preempted" else 4000)
    builder = builder.with_paged_attn(PagedAttentionMeta(block_size=4, gpu_memory=memory, cache_type=kind))
    return builder.with_prefix_cache_n(None) if mode == "no prefix cache" else builder


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", ["FP8", "no prefix cache", "contiguous", "preempted", "drafts"])
async def test_vectors_go_with_everything_else(mode: str, tiny_checkpoint: Path) -> None:
    """They are the same beside texts that are generated, some through an adapter, in every kind of KV memory."""
    adapter = write_adapter(tiny_checkpoint / "adapter", reference("llama"), strength=0.05)
    builder = in_mode(builder_of(tiny_checkpoint), mode).with_adapter(adapter).with_max_num_batched_tokens(48)
    if mode == "drafts":
        builder = builder.with_speculation(SpeculativeConfig(gamma=4))
    found: dict[Any, Vectors] = {}
    prompts = [[5, 6, 7, 8] * 6, [40, 41, 42] * 5, TEXTS[3][:60]]
    async with builder.build() as model:
        alone = [await model.send_completion_request(prompt, GREEDY) for prompt in prompts]
        through = (await model.embed(TEXTS, normalize=False, adapter="adapter")).embeddings
        beside: list[str] = []

        async def chat(prompt: Sequence[int]) -> None:
            beside.append((await model.send_completion_request(prompt, GREEDY)).choices[0].text)

        async def embed(pooling: Pooling, adapter: str | None) -> None:
            response = await model.embed(TEXTS, pooling=pooling, normalize=False, adapter=adapter)
            found[pooling, adapter] = response.embeddings

        wait_for_requests(model, len(prompts) + 2 * len(POOLINGS) * len(TEXTS))
        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(chat, prompt)
            for pooling, name in itertools.product(POOLINGS, (None, "adapter")):
                tasks.start_soon(embed, pooling, name)
        stats = model.stats()
    assert sorted(beside) == sorted(response.choices[0].text for response in alone)
    for pooling in POOLINGS:
        if mode == "FP8":
            assert np.sum(unit(found[pooling, None]) * unit(expected(pooling)), axis=1).min() > 0.95
        else:
            np.testing.assert_allclose(found[pooling, None], expected(pooling), atol=2e-4)
    np.testing.assert_allclose(found["last", "adapter"], through, atol=2e-4)
    assert np.abs(through - expected("last")).max() > 0.5
    assert stats.blocks_used == 0
    assert (stats.preemptions > 0) == (mode == "preempted")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("paged", [True, False])
async def test_only_tokens_whose_states_are_not_read_come_from_the_prefix_cache(
    tiny_checkpoint: Path, *, paged: bool
) -> None:
    builder = builder_of(tiny_checkpoint)
    text = TEXTS[3]
    async with (builder if paged else builder.without_paged_attn()).build() as model:

        async def cached(pooling: Pooling) -> int:
            response = await model.embed(text, pooling=pooling, normalize=False)
            np.testing.assert_allclose(response.embeddings[0], pooled(pooling, text), atol=2e-5)
            return response.usage.prompt_tokens_details.cached_tokens

        assert await cached("mean") == 0
        # What the mean has computed serves others.
        assert await cached("last") == (64 if paged else len(text) - 1)
        assert [await cached(pooling) for pooling in ("mean", "max", "weighted_mean", "cls")] == [0] * 4
        response = await model.send_completion_request(text, GREEDY)
        assert response.usage.prompt_tokens_details.cached_tokens == (64 if paged else len(text) - 1)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(directory: Path, *kinds: str, **pooling: Any) -> None:
    names = [("" if kind == "Transformer" else f"{place}_{kind}") for place, kind in enumerate(kinds)]
    write_json(
        directory / "modules.json",
        [
            {"idx": place, "name": str(place), "path": name, "type": f"sentence_transformers.models.{kind}"}
            for place, (kind, name) in enumerate(zip(kinds, names, strict=True))
        ],
    )
    for kind, name in zip(kinds, names, strict=True):
        if kind == "Pooling":
            write_json(directory / name / "config.json", {"word_embedding_dimension": 64, **pooling})


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_vectors_are_made_as_the_checkpoint_says(tmp_path: Path) -> None:
    """Mean, two dense layers, length 1; prompts, one of which is the default; lower case; a maximum length."""
    directory = tiny.make_checkpoint("llama", tmp_path)
    write_modules(
        directory,
        *("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
        pooling_mode_mean_tokens=True,
        pooling_mode_cls_token=False,
    )
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(96, 64, generator=generator), torch.randn(64, 96, generator=generator)
    bias = torch.randn(96, generator=generator)
    kinds = ("torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity")
    for place, kind, tensors in zip(
        (2, 3), kinds, ({"linear.weight": first, "linear.bias": bias}, {"linear.weight": second}), strict=True
    ):
        own = directory / f"{place}_Dense"
        write_json(own / "config.json", {"activation_function": kind, "bias": place == 2})
        save_file(tensors, own / "model.safetensors")
    prompts = {"query": "Find: ", "document": ""}
    write_json(directory / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "document"})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 50, "do_lower_case": True})
    encode = tiny.tokenizer().encode

    def vector(text: str) -> Vectors:
        mean = torch.from_numpy(pooled("mean", encode(text).ids))
        return unit((torch.tanh(mean @ first.T + bias) @ second.T).numpy())

    async with builder_of(directory).build() as model:
        said = await model.embed(["The sea", "A kettle"])
        np.testing.assert_allclose(said.embeddings, [vector("the sea"), vector("a kettle")], atol=1e-5)
        asked = await model.embed("The sea", prompt_name="query")
        np.testing.assert_allclose(asked.embeddings[0], vector("find: the sea"), atol=1e-5)
        plain = await model.embed("The sea", normalize=False)
        np.testing.assert_allclose(unit(plain.embeddings), said.embeddings[:1], atol=1e-6)
        assert float(np.linalg.norm(plain.embeddings)) > 2
        short = await model.embed("The sea", dimensions=10)
        np.testing.assert_allclose(short.embeddings, unit(said.embeddings[:1, :10]), atol=1e-6)
        with pytest.raises(InvalidRequestError, match=r"dimensions = 65 .*from 1 to 64"):
            await model.embed("The sea", dimensions=65)
        with pytest.raises(InvalidRequestError, match=r"prompt_name = 'other' .*query, document"):
            await model.embed("The sea", prompt_name="other")
        with pytest.raises(InvalidRequestError, match="prompt_name"):
            await model.embed([1, 2], prompt_name="query")
        with pytest.raises(ContextLengthError, match=r"texts\[1\] has 64 tokens, 50 fit"):
            await model.embed([TEXTS[0], TEXTS[6]])


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("prompt", "settings"), [("Once upon: ", {}), ("ONCE UPON: ", {"do_lower_case": True})], ids=["as is", "lower case"]
)
async def test_tokens_of_a_prompt_are_not_pooled_where_the_checkpoint_says_so(
    prompt: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = tiny.make_checkpoint("llama", tmp_path)
    write_modules(directory, "Transformer", "Pooling", pooling_mode="weightedmean", include_prompt=False)
    write_json(directory / "config_sentence_transformers.json", {"prompts": {"query": prompt}})
    write_json(directory / "sentence_bert_config.json", settings)
    encode = tiny.tokenizer().encode
    async with builder_of(directory).build() as model:
        response = await model.embed("a time", prompt_name="query")
        said = prompt.lower() if settings else prompt
        whole, before = encode(f"{said}a time").ids, encode(said).ids
        np.testing.assert_allclose(response.embeddings[0], pooled("weighted_mean", whole, first=len(before)), atol=1e-5)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("kinds", "pooling", "reason"),
    [
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "mean_tokens",
        ),
        (("Transformer", "Pooling"), {"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len_tokens"),
        (("Transformer", "Pooling", "LayerNorm"), {"pooling_mode": "mean"}, "LayerNorm"),
        (("Transformer", "Pooling", "Normalize", "Dense"), {"pooling_mode": "mean"}, "Dense after Normalize"),
        (("Transformer",), {}, "has no Pooling"),
    ],
)
async def test_what_a_checkpoint_asks_for_in_vain_is_named(
    kinds: tuple[str, ...], pooling: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = tiny.make_checkpoint("llama", tmp_path)
    write_modules(directory, *kinds, **pooling)
    async with builder_of(directory).build() as model:
        with pytest.raises(InvalidRequestError, match=reason):
            await model.embed("The sea")
        response = await model.embed(TEXTS[1], pooling="last", normalize=True)
        np.testing.assert_allclose(response.embeddings[0], unit(pooled("last", TEXTS[1])), atol=1e-5)
        assert (await model.send_completion_request("The sea", GREEDY)).choices[0].text


@pytest.mark.anyio
async def test_many_texts_leave_room_in_the_queue(builder: TextModelBuilder) -> None:
    """A hundred texts pass through a queue of eight, beside a chat; the chat waits for few of them."""
    texts = [[number % 512, 7, number // 512] for number in range(100)]
    order: list[str] = []
    async with builder.with_max_num_seqs(2).with_max_queue(8).build() as model:
        wait_for_requests(model, 4)  # half of the queue is for one call's

        async def embed() -> None:
            response = await model.embed(texts, pooling="mean", normalize=False)
            order.append("texts")
            np.testing.assert_allclose(response.embeddings, [pooled("mean", text) for text in texts], atol=1e-5)
            assert response.usage.prompt_tokens == 300

        async def chat() -> None:
            await model.send_completion_request([1, 2, 3], SamplingParams(temperature=0, max_len=2))
            order.append("chat")

        async with anyio.create_task_group() as tasks:
            step = Step(model)
            tasks.start_soon(embed)
            await until(lambda: step.is_done.is_set() and not num_unheard(model))
            tasks.start_soon(chat)
            await until(lambda: num_unheard(model) > 0)
            step.may_end.set()
        assert order == ["chat", "texts"]


@pytest.mark.anyio
async def test_whoever_stops_waiting_gives_the_blocks_back(builder: TextModelBuilder) -> None:
    texts = [[number % 512, *TEXTS[3]] for number in range(400)]
    async with builder.with_max_num_batched_tokens(32).build() as model:
        with pytest.raises(RequestTimeoutError):
            await model.embed(texts, timeout=1e-3)
        await obeyed(model)
        step = Step(model)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(model.embed, texts)
                await until(step.is_done.is_set)
                scope.cancel()
        step.may_end.set()
        with pytest.raises(InvalidRequestError, match=r"texts\[1\] = '' "):
            await model.embed(["The sea", ""])
        await obeyed(model)
        assert (model.stats().blocks_used, model.stats().running, model.stats().waiting) == (0, 0, 0)
        np.testing.assert_allclose(
            (await model.embed(TEXTS, pooling="mean", normalize=False)).embeddings, expected("mean"), atol=2e-5
        )


@pytest.mark.anyio
async def test_closing_ends_them() -> None:
    model = fake_model("yes", delay=0.05)
    errors: list[Exception] = []

    async def embed() -> None:
        try:
            await model.embed(["a", "b"] * 2000)  # 125 steps
        except ModelClosedError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embed)
        while not model.stats().steps:
            await anyio.lowlevel.checkpoint()
        await model.aclose()
    assert len(errors) == 1
    with pytest.raises(ModelClosedError):
        await model.embed("a")


@pytest.mark.anyio
async def test_a_full_queue_refuses_them() -> None:
    async with (
        fake_model("yes " * 2000, delay=0.01, max_num_seqs=1, max_queue=1) as model,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(model.send_completion_request, "a")
        while not model.stats().running:
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(model.send_completion_request, "b")
        while not model.stats().waiting:
            await anyio.lowlevel.checkpoint()
        with pytest.raises(QueueFullError):
            await model.embed(["c", "d"])
        tasks.cancel_scope.cancel()


ALL: Final[ReadingOptions] = {"priority": 3, "timeout": 60.0, "cache_salt": "tenant"}


@pytest.mark.anyio
async def test_a_fake_model_counts_bytes() -> None:
    async with fake_model("yes") as model:
        response = await model.embed(["abc", "bca", "xyz"], **ALL)
        same, other = response.embeddings[0] @ response.embeddings[1], response.embeddings[0] @ response.embeddings[2]
        assert float(same) == pytest.approx(1)
        assert float(other) == 0
        assert response.usage.prompt_tokens == response.usage.total_tokens == 9
        assert [request.prompt for request in model.requests] == ["abc", "bca", "xyz"]
        assert model.requests[0].options == RequestOptions(priority=3, timeout=60.0, cache_salt="tenant")
        assert {*ALL, "adapter"} == set(ReadingOptions.__annotations__)
        salted = (await model.embed(["x" * 100] * 2, pooling="last", cache_salt="a")).usage.prompt_tokens_details
        assert salted.cached_tokens == 96
        long = await model.embed("ab" * 10**4, truncation=True)
        assert long.usage.prompt_tokens == model.max_sequence_length


def test_blocking_models_make_them_too() -> None:
    with BlockingModel(fake_model("yes")) as model:
        response = model.embed(["a", "b"], dimensions=98, **ALL)
        assert response.embeddings.shape == (2, 98)


@pytest.mark.anyio
async def test_the_wire_form_is_openais() -> None:
    async with fake_model("yes") as model:
        response = await model.embed(["ab", "b"], dimensions=99)
    sent = response.to_dict()
    assert [each["index"] for each in sent["data"]] == [0, 1]
    assert (sent["object"], sent["model"], sent["usage"]) == ("list", "fake", {"prompt_tokens": 3, "total_tokens": 3})
    np.testing.assert_array_equal(sent["data"][0]["embedding"], response.embeddings[0])
    assert json.loads(response.to_json()) == sent
    text = response.to_dict(encoding_format="base64")["data"][1]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), dtype="<f4"), response.embeddings[1])
    with pytest.raises(InvalidRequestError, match="encoding_format"):
        response.to_dict(encoding_format="hex")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        response.embeddings[0, 0] = 1.0
    assert math.isclose(float(np.linalg.norm(response.embeddings[0])), 1, rel_tol=1e-6)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"texts": []}, r"texts = \[\] is not allowed: expected a text, .* at least one"),
        ({"texts": ["a", []]}, r"texts\[1\] = \[\] is not allowed: expected a text of at least one token"),
        ({"texts": [1, 512]}, "texts = 512"),
        ({"texts": ["a", [1, 512]]}, r"texts\[1\] = 512"),
        ({"texts": ["a", 3]}, "texts = 3"),
        ({"texts": 5}, "texts = 5"),
        ({"texts": "a", "pooling": "median"}, "pooling = 'median'"),
        ({"texts": "a", "normalize": 1}, "normalize = 1"),
        ({"texts": "a", "truncation": None}, "truncation = None"),
        ({"texts": "a", "dimensions": 0}, "dimensions = 0"),
        ({"texts": "a", "adapter": "none"}, "adapter"),
        ({"texts": "a", "prediction": "b"}, "option = 'prediction'"),
        ({"texts": "a", "timeout": 0}, "timeout = 0"),
    ],
)
async def test_what_cannot_be_used_is_named(values: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await model.embed(**values)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
async def test_checkpoints_without_an_output_projection_make_vectors_only(family: str, tmp_path: Path) -> None:
    directory = tiny.make_checkpoint(family, tmp_path)
    reference(family).get_decoder().save_pretrained(directory)  # in place of the whole model's files
    async with builder_of(directory).build() as model:
        response = await model.embed(TEXTS, pooling="mean", normalize=False)
        scale = float(np.abs(expected("mean", family)).max())
        np.testing.assert_allclose(response.embeddings, expected("mean", family), atol=2e-5 * scale)
        with pytest.raises(InvalidRequestError, match=r"prompt: .* has no output projection .*Model.* embed\(\)"):
            await model.send_completion_request("Once")
        with pytest.raises(InvalidRequestError, match="messages: "):
            await model.send_chat_request([{"role": "user", "content": "Hello"}])
    with pytest.raises(UnsupportedArchitectureError, match="has no output projection"):
        write_gguf(directory, tmp_path / "model.gguf")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_gguf_files_say_how_they_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_config: Any = tiny._add_config

    def add_pooling(kind: int) -> Path:
        def add(writer: Any, config: Any) -> None:
            add_config(writer, config)
            writer.add_uint32("llama.pooling_type", kind)

        monkeypatch.setattr(tiny, "_add_config", add)
        return tiny.make_gguf(tmp_path / str(kind))

    for kind, pooling in ((1, "mean"), (3, "last")):
        async with builder_of(add_pooling(kind)).build() as model:
            response = await model.embed(TEXTS)
            np.testing.assert_allclose(response.embeddings, unit(expected(pooling)), atol=2e-5)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError, match="pooling_type"):
                await model.send_completion_request("Once")
    async with builder_of(add_pooling(4)).build() as model:
        with pytest.raises(InvalidRequestError, match="pooling_type = 4: this model ranks"):
            await model.embed("Once")
        with pytest.raises(InvalidRequestError, match=r"else than text; .*pooling_type = 4: this model ranks"):
            await model.send_completion_request("Once")
    with pytest.raises(CheckpointError, match="pooling_type = 9"):
        await builder_of(add_pooling(9)).build()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_texts_with_nan_fail_alone(tmp_path: Path) -> None:
    """One token's embedding is broken: texts that hold it fail, others in the batch are what they were."""
    directory = tiny.make_checkpoint("llama", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    broken = next(token for token in range(512) if all(token not in text for text in TEXTS))
    tensors["model.embed_tokens.weight"][broken] = torch.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    failed: list[str] = []
    async with builder_of(directory).build() as model:

        async def fail(call: Any, **values: Any) -> None:
            with pytest.raises(NumericalError) as raised:
                await call([[1, 2, broken, 3], [1, 2]], **values)
            failed.append(str(raised.value).partition(": ")[2])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(fail, model.embed, pooling="max"))
            tasks.start_soon(partial(fail, model.embed, pooling="last"))
            tasks.start_soon(fail, model.score)
            response = await model.embed(TEXTS, pooling="mean", normalize=False)
        await obeyed(model)  # the texts beside those that failed are ended, too
        assert model.stats().blocks_used == 0
    assert sorted(failed) == ["the hidden states hold NaN or Inf"] * 2 + ["the logits hold NaN or Inf"]
    np.testing.assert_allclose(response.embeddings, expected("mean"), atol=2e-5)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", ["FP8", "contiguous", "preempted"])
async def test_encoders_see_a_text_in_both_directions(mode: str, tmp_path: Path) -> None:
    """EmbeddingGemma: no text is cut into chunks, however small the budget is, and none shares keys with another."""
    directory = tiny.make_checkpoint("gemma3_text", tmp_path, use_bidirectional_attention=True)
    whole: Any = AutoModelForCausalLM.from_pretrained(directory)
    judge: Any = whole.get_decoder()
    judge.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Gemma3TextModel"]
    write_json(directory / "config.json", config | {"sliding_window": 16})
    judge = AutoModel.from_pretrained(directory)
    assert judge.config.sliding_window == 9
    builder = in_mode(builder_of(directory), mode).with_max_num_batched_tokens(32)
    found: dict[str, Vectors] = {}
    texts = [*TEXTS, TEXTS[3][:60]]
    async with builder.build() as model:

        async def embed(pooling: Pooling) -> None:
            response = await model.embed(texts, pooling=pooling, normalize=False)
            assert response.usage.prompt_tokens_details.cached_tokens == 0
            found[pooling] = response.embeddings

        async with anyio.create_task_group() as tasks:
            for pooling in ("mean", "last", "cls"):
                tasks.start_soon(embed, pooling)
        with pytest.raises(InvalidRequestError, match="is an encoder"):
            await model.send_completion_request("Once")
        assert model.stats().blocks_used == 0
    for place, text in enumerate(texts):
        with torch.inference_mode():
            states = judge(torch.tensor([text])).last_hidden_state[0].numpy()
        for pooling, vector in (("mean", states.mean(0)), ("last", states[-1]), ("cls", states[0])):
            if mode == "FP8":
                assert float(unit(found[pooling][place]) @ unit(vector)) > 0.85
            else:
                np.testing.assert_allclose(found[pooling][place], vector, atol=1e-4 * float(np.abs(states).max()))
