"""Requests that read something off a prompt, in an engine without weights, where steps overlap and where not."""

from __future__ import annotations

import numpy as np
import pytest
from engine_driver import VOCAB, Driver

from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.types.reading import PooledVector, PromptScores, TokenScores
from paged_sdk.types.response import Usage

PROMPTS = [[(7 * n + i) % 300 for i in range(n)] for n in (1, 3, 16, 17, 40)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_they_end_with_their_prompt(smollm2_text: TextProcessor, num_blocks: int, *, overlaps: bool) -> None:
    driver = Driver(smollm2_text.tokenizer, num_blocks=num_blocks, overlaps=overlaps)
    chats = [driver.submit(f"chat {place}", [5, 6, 7, place], max_tokens=25) for place in range(2)]
    means = [driver.submit(f"mean {place}", text, reading=PooledVector("mean")) for place, text in enumerate(PROMPTS)]
    scores = [driver.submit(f"score {place}", text, reading=PromptScores(1)) for place, text in enumerate(PROMPTS)]
    driver.run()
    for listener, text in zip(means, PROMPTS, strict=True):
        (event,) = listener.events
        assert event.finish_reason == "stop"
        assert isinstance(event.reading, np.ndarray)
        np.testing.assert_allclose(event.reading, np.bincount(text, minlength=VOCAB) / len(text), rtol=1e-6)
    for listener, text in zip(scores, PROMPTS, strict=True):
        (event,) = listener.events
        assert isinstance(event.reading, TokenScores)
        assert len(event.reading.logprobs) == len(text) - 1
        assert listener.token_ids == [[]]
    for name, end in driver.ends.items():
        assert isinstance(end, Usage)
        assert end.completion_tokens == (25 if name.startswith("chat") else 0)
    assert all(len(listener.token_ids[0]) == 25 for listener in chats)
    stats = driver.engine.stats()
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)


@pytest.mark.parametrize("overlaps", [False, True])
def test_they_can_be_ended_before(smollm2_text: TextProcessor, *, overlaps: bool) -> None:
    driver = Driver(smollm2_text.tokenizer, overlaps=overlaps)
    listener = driver.submit("mean", PROMPTS[4], reading=PooledVector("mean"))
    driver.step()
    driver.engine.abort("mean")
    driver.run()
    driver.deliver()
    (event,) = listener.events
    assert (event.finish_reason, event.reading) == ("canceled", None)
    assert driver.engine.stats().blocks_used == 0
