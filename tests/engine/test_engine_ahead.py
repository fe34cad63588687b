"""An engine whose device hands sampled tokens on, against one that has each step's results before the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paged_sdk.chat.text_processor import text_processor_from_gguf
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.engine.engine import Engine
from paged_sdk.engine.request import EngineRequest
from paged_sdk.errors import NumericalError
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.testing.fake_runner import FakeRunner
from paged_sdk.testing.next_token import HashedTokens, NextToken
from paged_sdk.weights.checkpoint import open_checkpoint

VOCAB = 400
STOP = 399
HASHED = HashedTokens(range(300, VOCAB))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Any) -> Tokenizer:
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.metadata is not None
    try:
        return text_processor_from_gguf(checkpoint.metadata).tokenizer
    finally:
        checkpoint.source.close()


class Driver:
    """An engine, and what its requests have been told."""

    def __init__(
        self, tokenizer: Tokenizer, *, num_blocks: int = 64, next_token: NextToken = HASHED, **runner: Any
    ) -> None:
        config = EngineConfig(num_blocks=num_blocks, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)
        self.kv = KvCacheManager(num_blocks, 4)
        self.runner = FakeRunner(next_token, vocab_size=VOCAB, **runner)
        self.engine = Engine(Scheduler(config, self.kv), self.kv, self.runner, tokenizer)
        self.texts: dict[tuple[str, int], str] = {}
        self.ends: dict[str, Any] = {}

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 20, **sampling: Any) -> None:
        self.engine.submit(
            EngineRequest(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling=SamplingParams(temperature=0.0, seed=0, **sampling),
                stop_token_ids=frozenset({STOP}),
                max_tokens=max_tokens,
                arrival=0.0,
            )
        )

    def step(self) -> None:
        for event in self.engine.step():
            assert event.request_id not in self.ends
            for delta in event.choices:
                key = event.request_id, delta.index
                self.texts[key] = self.texts.get(key, "") + delta.text
            if event.is_last:
                self.ends[event.request_id] = event.usage or event.error

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def submit_many(driver: Driver) -> None:
    for index in range(12):
        stop = ("e",) if index % 4 == 3 else ()
        driver.submit(f"request {index}", [300 + index] * (3 + 2 * index), stop=stop, n_choices=1 + index % 3 // 2)


def test_texts_and_usage_are_the_same(tokenizer: Tokenizer) -> None:
    """In chunks, with preemptions, choices, stop tokens and stop strings."""
    ahead, behind = (Driver(tokenizer, num_blocks=24, hands_on=hands_on) for hands_on in (True, False))
    for driver in (ahead, behind):
        submit_many(driver)
        driver.run()
        assert driver.engine.stats().preemptions > 0
        assert driver.kv.usage.used == 0
    assert len(ahead.ends) == 12
    assert ahead.texts == behind.texts
    for name, usage in ahead.ends.items():
        assert usage.completion_tokens == behind.ends[name].completion_tokens
    assert {name for name, _ in ahead.texts} == set(ahead.ends)


def test_results_come_a_step_later(tokenizer: Tokenizer) -> None:
    driver = Driver(tokenizer, hands_on=True)
    driver.submit("one", [301, 302], max_tokens=2)
    driver.step()
    assert (driver.runner.num_steps, driver.texts) == (1, {})
    driver.step()
    assert (driver.runner.num_steps, list(driver.texts)) == (2, [("one", 0)])
    # Both tokens are under way or here: there is nothing to submit any more.
    driver.step()
    assert driver.runner.num_steps == 2
    assert driver.ends["one"].completion_tokens == 2
    assert not driver.engine.has_work
    assert driver.engine.stats().completion_tokens == 2


def test_a_step_with_several_samples_is_not_overtaken(tokenizer: Tokenizer) -> None:
    driver = Driver(tokenizer, hands_on=True)
    driver.submit("two", [301, 302], max_tokens=3, n_choices=2)
    driver.step()
    assert set(driver.texts) == {("two", 0), ("two", 1)}
    driver.run()
    assert driver.ends["two"].completion_tokens == 6


def test_an_abort_while_a_step_is_under_way(tokenizer: Tokenizer) -> None:
    driver = Driver(tokenizer, hands_on=True)
    driver.submit("gone", [301] * 5)
    driver.submit("stays", [302] * 5, max_tokens=4)
    driver.step()
    event = driver.engine.abort("gone")
    assert event is not None
    assert event.usage is not None
    assert driver.kv.usage.used == 2
    driver.run()
    assert list(driver.ends) == ["stays"]
    assert driver.kv.usage.used == 0


def test_a_row_that_fails_after_its_successor_was_submitted(tokenizer: Tokenizer) -> None:
    def fails(prompt: Sequence[int], output: Sequence[int]) -> str | None:
        return "bad" if prompt[0] == 301 and len(output) == 2 else None

    driver = Driver(tokenizer, hands_on=True, row_failure=fails)
    driver.submit("bad", [301] * 5)
    driver.submit("good", [302] * 5, max_tokens=6)
    driver.run()
    assert isinstance(driver.ends["bad"], NumericalError)
    assert driver.ends["good"].completion_tokens == 6
    assert driver.kv.usage.used == 0


@pytest.mark.parametrize("hands_on", [True, False])
def test_choices_that_meet_a_stop_string_in_the_same_step(tokenizer: Tokenizer, *, hands_on: bool) -> None:
    driver = Driver(tokenizer, hands_on=hands_on, next_token=lambda prompt, output, choice_index: 350)
    text = tokenizer.decode([350])
    driver.submit("both", [301] * 5, stop=(text,), n_choices=2)
    driver.submit("other", [302] * 5, max_tokens=4)
    driver.run()
    assert driver.texts["both", 0] == driver.texts["both", 1] == ""
    assert driver.ends["both"].completion_tokens == 2
    assert driver.ends["other"].completion_tokens == 4
    assert driver.kv.usage.used == 0
