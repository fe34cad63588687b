"""How likely texts are, judged by transformers in float32."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import pytest
import torch

import tiny
from adapter_files import write_adapter
from arrivals import wait_for_requests
from paged_sdk import (
    BlockingModel,
    ContextLengthError,
    InvalidRequestError,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    TextModelBuilder,
    TextScore,
)
from paged_sdk.kv.contiguous import common_prefix_length
from paged_sdk.testing import fake_model

TEXTS: Final = tuple([(7 * i * i + 3 * n) % 512 for i in range(n)] for n in (3, 40, 41, 150, 17, 2, 64))
PREFIX: Final = [(5 * i * i + 1) % 512 for i in range(75)]
GREEDY: Final = SamplingParams(temperature=0, max_len=30, ignore_eos=True)


@functools.cache
def reference(family: str) -> Any:
    return tiny.build_model(family)


def judge(text: Sequence[int], first: int, family: str = "llama") -> tuple[list[float], list[bool]]:
    """Return the log-probability of each token from one on, and whether none is likelier."""
    with torch.inference_mode():
        logits = reference(family)(torch.tensor([text])).logits[0]
    logprobs, likeliest = logits.log_softmax(-1), logits.argmax(-1)
    places = range(first, len(text))
    return (
        [float(logprobs[place - 1, text[place]]) for place in places],
        [int(likeliest[place - 1]) == text[place] for place in places],
    )


def check(score: TextScore, text: Sequence[int], first: int, family: str = "llama", tolerance: float = 1e-4) -> None:
    logprobs, likeliest = judge(text, first, family)
    assert score.token_ids == tuple(text[first:])
    np.testing.assert_allclose(score.logprobs, logprobs, atol=tolerance)
    assert score.are_likeliest.tolist() == likeliest
    assert score.is_greedy == all(likeliest)
    assert score.logprob == pytest.approx(sum(logprobs), abs=tolerance * len(logprobs))
    assert math.log(score.perplexity) == pytest.approx(-sum(logprobs) / len(logprobs), abs=tolerance)


def builder_of(directory: Path) -> TextModelBuilder:
    return TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
async def test_families_give_transformers_scores(family: str, tmp_path: Path) -> None:
    async with builder_of(tiny.make_checkpoint(family, tmp_path)).with_max_num_batched_tokens(70).build() as model:
        response = await model.score(TEXTS)
        for text, score in zip(TEXTS, response.scores, strict=True):
            check(score, text, 1, family, tolerance=1e-3)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", ["FP8", "no prefix cache", "contiguous", "preempted"])
async def test_scores_go_with_everything_else(mode: str, tiny_checkpoint: Path) -> None:
    """They are the same beside texts that are generated, some through an adapter, in every kind of KV memory."""
    builder = builder_of(tiny_checkpoint).with_max_num_batched_tokens(48)
    if mode == "contiguous":
        builder = builder.without_paged_attn()
    else:
        kind = PagedCacheType.F8E4M3 if mode == "FP8" else PagedCacheType.AUTO
        memory = MemoryGpuConfig.ContextSize(240 if mode == "preempted" else 4000)
        builder = builder.with_paged_attn(PagedAttentionMeta(block_size=4, gpu_memory=memory, cache_type=kind))
    if mode == "no prefix cache":
        builder = builder.with_prefix_cache_n(None)
    adapter = write_adapter(tiny_checkpoint / "adapter", reference("llama"), strength=0.05)
    found: dict[str | None, list[TextScore]] = {}
    beside: list[str] = []
    async with builder.with_adapter(adapter).build() as model:
        alone = [(await model.send_completion_request(text[:60], GREEDY)).choices[0].text for text in TEXTS[:4]]
        through = (await model.score(TEXTS, prefix=PREFIX, adapter="adapter")).scores

        async def chat(text: list[int]) -> None:
            beside.append((await model.send_completion_request(text, GREEDY)).choices[0].text)

        async def score(adapter: str | None) -> None:
            found[adapter] = list((await model.score(TEXTS, prefix=PREFIX, adapter=adapter)).scores)

        wait_for_requests(model, 4 + 2 * len(TEXTS))
        async with anyio.create_task_group() as tasks:
            for text in TEXTS[:4]:
                tasks.start_soon(chat, text[:60])
            tasks.start_soon(score, None)
            tasks.start_soon(score, "adapter")
        stats = model.stats()
    assert sorted(beside) == sorted(alone)
    errors: list[float] = []
    for place, text in enumerate(TEXTS):
        if mode == "FP8":
            errors.append(float(np.abs(found[None][place].logprobs - judge(PREFIX + text, 75)[0]).mean()))
        else:
            check(found[None][place], PREFIX + text, 75, tolerance=1e-3)
        np.testing.assert_allclose(found["adapter"][place].logprobs, through[place].logprobs, atol=1e-3)
    assert not errors or 0 < max(errors) < 0.5
    assert max(np.abs(one.logprobs - other.logprobs).max() for one, other in zip(found[None], through, strict=True)) > 1
    assert stats.blocks_used == 0
    assert (stats.preemptions > 0) == (mode == "preempted")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("paged", [True, False])
async def test_what_comes_before_all_texts_is_computed_once(tiny_checkpoint: Path, *, paged: bool) -> None:
    builder = builder_of(tiny_checkpoint)
    texts = [[7, 8], [7, 9, 10], [11]]
    async with (builder if paged else builder.without_paged_attn().with_max_num_seqs(1)).build() as model:
        response = await model.score(texts, prefix=PREFIX)
        for text, score in zip(texts, response.scores, strict=True):
            check(score, PREFIX + text, 75)
        # Whole blocks of 32 with paged attention; else all but the token that the first of a text follows.
        assert response.usage.prompt_tokens_details.cached_tokens == 2 * (64 if paged else 74)
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3 * 75 + 6, 0)
        # Without a prefix every token but the first needs the logits of the one before it.
        whole = await model.score([PREFIX])
        check(whole.scores[0], PREFIX, 1)
        assert whole.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_text_is_tokenized_together_with_what_comes_before_it(model: Model) -> None:
    encode = tiny.tokenizer().encode
    before, joined = encode("The capital of France is").ids, encode("The capital of France is Paris.").ids
    assert joined[: len(before)] == before
    (score,) = (await model.score(" Paris.", prefix="The capital of France is")).scores
    check(score, joined, len(before))
    # The word that the text goes on with is one of its own.
    first = common_prefix_length(encode("The cap").ids, joined)
    assert first < len(encode("The cap").ids)
    (score,) = (await model.score("ital of France is Paris.", prefix="The cap")).scores
    check(score, joined, first)
    (score,) = (await model.score([joined[len(before) :]], prefix="The capital of France is")).scores
    check(score, joined, len(before))
    (score,) = (await model.score(" Paris.", prefix=before)).scores
    check(score, joined, len(before))
    (score,) = (await model.score("The capital of France is Paris.", prefix="")).scores
    check(score, joined, 1)
    (score,) = (await model.score([[5]])).scores
    assert (score.token_ids, score.logprob, score.perplexity, score.is_greedy) == ((), 0, 1, True)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tokens_that_the_tokenizer_puts_around_a_text_are_not_scored(tmp_path: Path) -> None:
    directory = tiny.make_checkpoint("llama", tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text())
    special = [{"SpecialToken": {"id": name, "type_id": 0}} for name in tiny.SPECIAL_TOKENS[::2]]
    around = [special[0], {"Sequence": {"id": "A", "type_id": 0}}, special[1]]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": around,
        "pair": around,
        "special_tokens": {
            name: {"id": name, "ids": [token], "tokens": [name]}
            for token, name in ((0, tiny.SPECIAL_TOKENS[0]), (2, tiny.SPECIAL_TOKENS[2]))
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    ids = tiny.tokenizer().encode("The sea").ids
    async with builder_of(directory).build() as model:
        check((await model.score("The sea")).scores[0], [0, *ids], 1)
        # The vector of a text is the last token's, which is the one that ends it.
        vector, same = [(await model.embed(text)).embeddings for text in ("The sea", [0, *ids, 2])]
        np.testing.assert_allclose(vector, same, atol=1e-6)


@pytest.mark.anyio
async def test_a_fake_model_scores_texts_as_what_it_would_say() -> None:
    async with fake_model("Paris", "Rome") as model:
        response = await model.score(["Paris", "Rome"], prefix="The capital of France is ", cache_salt="a")
        assert [score.is_greedy for score in response.scores] == [True, False]
        assert response.scores[0].perplexity == pytest.approx(2)
        best = max(response.scores, key=lambda score: score.logprob)
        assert bytes(best.token_ids) == b"Paris"
        assert (await model.score("Rome", prefix="x")).scores[0].is_greedy
        assert [request.prompt for request in model.requests] == ["The capital of France is ", "x"]
        sent = response.to_dict()
        assert json.loads(response.to_json()) == sent
        assert [each["is_greedy"] for each in sent["data"]] == [True, False]
        with pytest.raises(ValueError, match="read-only"):
            best.logprobs[0] = 0.0


def test_blocking_models_score_too() -> None:
    with BlockingModel(fake_model("yes")) as model:
        assert model.score("yes", prefix="Say ", priority=1, timeout=10).scores[0].is_greedy


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"texts": ["a", ""]}, r"texts\[1\] = ''"),
        ({"texts": ""}, r"texts\[0\] = ''"),
        ({"texts": "", "prefix": "The sea"}, r"texts\[0\] = ''"),
        ({"texts": [[]], "prefix": [1]}, r"texts\[0\] = \[\]"),
        ({"texts": "a", "prefix": [512]}, "prefix = 512"),
        ({"texts": [512]}, "texts = 512"),
        ({"texts": ["a", [512]]}, r"texts\[1\] = 512"),
        ({"texts": "a", "adapter": "none"}, "adapter"),
        ({"texts": "a", "truncation": True}, "option = 'truncation'"),
    ],
)
async def test_what_cannot_be_used_is_named(values: dict[str, Any], message: str, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await model.score(**values)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("chunk", [16, 512])
async def test_a_text_may_be_as_long_as_the_context(chunk: int, builder: TextModelBuilder) -> None:
    """Nothing is generated after it, so its last token may have the last position: of a prompt that goes on, it has
    none, and what is read in several steps needs KV for all of them."""
    text = [(7 * place + 3) % 512 for place in range(64)]
    async with builder.with_max_num_batched_tokens(chunk).build() as model:
        (expected,) = (await model.score([text])).scores
    async with builder.with_max_num_batched_tokens(chunk).with_max_model_len(64).build() as model:
        (found,) = (await model.score([text])).scores
        vectors = (await model.embed([text], pooling="mean")).embeddings
        assert vectors.shape[0] == 1
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_text_that_is_too_long_is_named(builder: TextModelBuilder) -> None:
    async with builder.with_max_model_len(64).build() as model:
        with pytest.raises(ContextLengthError, match=r"texts\[1\] has 70 tokens with the prefix before it, 64 fit"):
            await model.score([[1] * 3, [1] * 20], prefix=[2] * 50)
