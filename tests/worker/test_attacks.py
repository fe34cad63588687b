"""Odd requests beside an ordinary one: they are answered or refused by a typed error, and it does not notice."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

import tiny
from arrivals import obeyed
from paged_sdk import (
    ConfigError,
    DryParams,
    InvalidRequestError,
    LogitsProcessorError,
    MemoryGpuConfig,
    Model,
    NumericalError,
    PagedAttentionMeta,
    PagedError,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.chat.tokenizer import SpecialTokens, Tokenizer

VOCABULARY = range(tiny.VOCAB_SIZE)
HOSTILE: dict[str, tuple[dict[str, Any], type[PagedError] | None]] = {
    "a stop string that never matches": ({"stop": "a" * 16_000 + "b"}, None),
    "stop strings of a million characters": ({"stop": "a" * 10**6}, ConfigError),
    "twenty thousand stop strings": ({"stop": [f"q{i}" for i in range(20_000)]}, ConfigError),
    "more choices than sequences": ({"n_choices": 1000}, InvalidRequestError),
    "every token banned": ({"logits_bias": dict.fromkeys(VOCABULARY, -math.inf)}, NumericalError),
    "every token ends the text, and none may": ({"stop_token_ids": VOCABULARY, "min_tokens": 5}, NumericalError),
    "a seed of two hundred bits": ({"seed": 2**200, "temperature": 1.0}, None),
    "a temperature beyond float32": ({"temperature": 1e300, "seed": 1}, None),
    "top_p below float32": ({"temperature": 1.0, "top_p": 1e-300, "seed": 1}, None),
    "all tokens' logprobs": ({"top_n_logprobs": 10**9}, ConfigError),
    "all tokens' logprobs of the prompt": ({"prompt_logprobs": 10**9}, ConfigError),
    "a bias for a token beyond": ({"logits_bias": {10**30: 1.0}}, InvalidRequestError),
    "an endless text": ({"max_len": 10**30}, None),
    "endless breakers": ({"dry_params": {"multiplier": 1.0, "sequence_breakers": ["ab " * 10**6]}}, ConfigError),
    "many breakers": ({"dry_params": {"multiplier": 1.0, "sequence_breakers": ["b"] * 9999}}, ConfigError),
    "growth beyond any number": ({"dry_params": {"multiplier": 1e300, "base": 1e300, "allowed_length": 0}}, None),
    "a breaker that is no text": ({"dry_params": {"multiplier": 1.0, "sequence_breakers": ["\ud800"]}}, ConfigError),
}


def sampling_of(settings: dict[str, Any]) -> SamplingParams:
    dry = settings.get("dry_params")
    dry_params = None if dry is None else DryParams(**dry)
    usual = {"temperature": 0.0, "max_len": 8, "ignore_eos": True}
    return SamplingParams(**{**usual, **settings, "dry_params": dry_params})


@pytest.mark.anyio
async def test_an_ordinary_request_does_not_notice(builder: TextModelBuilder) -> None:
    ordinary = SamplingParams(temperature=0, max_len=60, ignore_eos=True)
    outcomes: dict[str, object] = {}

    async def attack(name: str, settings: dict[str, Any]) -> None:
        try:
            await model.send_completion_request([5] * 200, sampling_of(settings))
            outcomes[name] = None
        except Exception as error:
            outcomes[name] = type(error)

    async with builder.build() as model:
        expected = (await model.send_completion_request([1, 2, 3], ordinary)).choices
        async with anyio.create_task_group() as tasks:
            for name, (settings, _) in HOSTILE.items():
                tasks.start_soon(attack, name, settings)
            for _ in range(3):
                assert (await model.send_completion_request([1, 2, 3], ordinary)).choices == expected
        assert outcomes == {name: error for name, (_, error) in HOSTILE.items()}
        assert model.stats().blocks_used == 0


@pytest.mark.anyio
async def test_a_logits_processor_that_exits_ends_its_request(model: Model) -> None:
    def leave(token_ids: Sequence[int], logits: Any) -> None:
        sys.exit(3)

    request = RequestBuilder().add_message("user", "Hello").with_logits_processors(leave)
    with pytest.raises(LogitsProcessorError, match="SystemExit"):
        await model.send_chat_request(request)
    assert (await model.send_completion_request([1, 2, 3], SamplingParams(max_len=2))).choices


@pytest.mark.anyio
async def test_a_prompt_that_changes_after_it_was_given(model: Model) -> None:
    sampling = SamplingParams(temperature=0, max_len=5, ignore_eos=True)
    expected = await model.send_completion_request([1, 2, 3], sampling)
    prompt = [1, 2, 3]
    stream = model.stream_completion_request(prompt, sampling)
    prompt[:] = [-7, 10**9]
    assert (await stream.collect()).choices == expected.choices


@pytest.mark.anyio
async def test_a_pool_for_one_token(builder: TextModelBuilder) -> None:
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(1))
    sampling = SamplingParams(temperature=0, max_len=50, ignore_eos=True)
    async with builder.with_paged_attn(meta).build() as model:
        response = await model.send_completion_request([1, 2, 3], sampling)
        assert response.choices[0].finish_reason == "length"
        with pytest.raises(PagedError):
            await model.send_completion_request(list(range(3, 12)), sampling)
        assert model.stats().blocks_used == 0


@pytest.mark.anyio
async def test_prompt_logprobs_that_are_cancelled(model: Model) -> None:
    sampling = SamplingParams(temperature=0, max_len=50, ignore_eos=True, prompt_logprobs=5, n_choices=3)
    for delay in (0.0, 0.005, 0.02):
        with anyio.move_on_after(delay):
            await model.send_completion_request([5] * 900, sampling)
    await obeyed(model)
    assert model.stats().running == model.stats().waiting == 0
    assert model.stats().blocks_used == 0
    assert (await model.send_completion_request([1, 2], sampling)).prompt_logprobs is not None


def test_a_long_text_is_encoded_without_python_s_lock() -> None:
    """Other threads get on meanwhile, and the tokens are the same ones."""
    tokenizer = Tokenizer(tiny.tokenizer(), SpecialTokens())
    text = "Once upon a time, 1234 times. Zwölf – 🦩\n" * 8_000
    piece = text[: 40 * 100]
    assert tokenizer.encode(text[:12_000], add_special_tokens=False) == _encoded_in_lines(tokenizer, text[:12_000])
    assert tokenizer.encode(piece, add_special_tokens=False) == _encoded_in_lines(tokenizer, piece)
    ticks = 0
    # Once is enough where there is a processor for both threads that wakes them in time; else it takes a longer text.
    # With the lock held, no length is enough.
    for times in (1, 1, 2, 4, 8, 16):
        encoding = threading.Thread(target=tokenizer.encode, args=(text * times,), kwargs={"add_special_tokens": False})
        encoding.start()
        ticks = 0
        while encoding.is_alive():
            time.sleep(0.001)
            ticks += 1
        if ticks > 5:
            break
    assert ticks > 5


def _encoded_in_lines(tokenizer: Tokenizer, text: str) -> list[int]:
    lines = text.splitlines(keepends=True)
    return [token for line in lines for token in tokenizer.encode(line, add_special_tokens=False)]
