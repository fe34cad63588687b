"""What listeners are told, step by step."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from engine_driver import STOP, VOCAB, Driver

from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.engine.events import Outbox
from paged_sdk.errors import NumericalError


def counting(prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
    """Say 300, 301 ..., in the second choice 310, 311 ..."""
    return 300 + len(output) + 10 * choice_index


def stopping(prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
    """Say the same, but stop the second choice after two tokens."""
    return STOP if choice_index == 1 and len(output) == 2 else counting(prompt, output, choice_index)


def test_a_text_that_goes_on_is_tokens_and_nothing_else(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, next_token=counting)
    listener = driver.submit("one", [5, 6, 7], max_tokens=6)
    for _ in range(5):
        driver.step()
    assert listener.token_ids == [[300, 301, 302, 303, 304]]
    assert listener.events == []
    assert listener.start is not None
    assert (listener.start.prompt_tokens, listener.start.cached_tokens) == (3, 0)
    driver.step()
    assert listener.token_ids == [[300, 301, 302, 303, 304, 305]]
    (event,) = listener.events
    assert event.finish_reason == "length"
    assert event.usage is not None
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (3, 6)
    assert not driver.engine.has_work


def test_the_token_that_ends_a_text_is_counted_but_not_told(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, next_token=stopping)
    listener = driver.submit("two", [5, 6, 7], max_tokens=4, n_choices=2)
    driver.run()
    assert listener.token_ids == [[300, 301, 302, 303], [310, 311]]
    ends = [(event.index, event.finish_reason, event.usage is None) for event in listener.events]
    assert ends == [(1, "stop", True), (0, "length", False)]
    assert driver.ends["two"].completion_tokens == 4 + 3


def test_every_token_comes_with_its_logprobs(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, next_token=stopping)
    listener = driver.submit("two", [5, 6, 7], max_tokens=4, n_choices=2, top_n_logprobs=1)
    while driver.engine.has_work:
        driver.step()
        for index, token_ids in enumerate(listener.token_ids):
            told = [raw.token_id for event in listener.events if event.index == index for raw in event.logprobs]
            # The token that ends a text has logprobs too.
            assert told in (token_ids, [*token_ids, STOP])
            assert all(raw.top for event in listener.events for raw in event.logprobs)


def test_prompt_logprobs_come_once_with_the_first_token(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, next_token=counting)
    prompt = [*range(5, 45)]
    listener = driver.submit("long", prompt, max_tokens=3, prompt_logprobs=1)
    for _ in range(2):  # 16 tokens a step
        driver.step()
        assert listener.events == []
    driver.run()
    first, *others = listener.events
    assert [raw.token_id for raw in first.prompt_logprobs] == prompt[1:]
    assert not any(event.prompt_logprobs for event in others)


def test_a_stop_string_ends_one_choice_and_its_sequence(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, next_token=counting)
    stop = smollm2_text.tokenizer.decode([301, 302])
    listener = driver.submit("two", [5, 6, 7], max_tokens=8, n_choices=2, stop=(stop,))
    driver.run()
    assert [(event.index, event.finish_reason) for event in listener.events] == [(0, "stop"), (1, "length")]
    assert listener.token_ids[0] == [300, 301, 302]
    assert listener.texts == {
        0: smollm2_text.tokenizer.decode([300]),
        1: smollm2_text.tokenizer.decode(range(310, 318)),
    }
    assert driver.ends["two"].completion_tokens == 3 + 8
    assert driver.kv.usage.used == 0


def test_cancelling_ends_every_choice_once(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, next_token=stopping)
    listener = driver.submit("two", [5, 6, 7], max_tokens=100, n_choices=2)
    for _ in range(4):
        driver.step()
    driver.engine.abort("two")
    driver.engine.abort("two")
    driver.engine.abort("never heard of")
    driver.deliver()
    assert [(event.index, event.finish_reason) for event in listener.events] == [(1, "stop"), (0, "canceled")]
    assert driver.ends["two"].completion_tokens == 4 + 3
    assert not driver.engine.has_work
    assert driver.kv.usage.used == 0


def test_a_request_fails_once_with_all_its_choices(smollm2_text: TextProcessor) -> None:
    def fails(prompt: Sequence[int], output: Sequence[int]) -> str | None:
        return "not finite" if len(output) == 2 else None

    driver = Driver(smollm2_text.tokenizer, next_token=counting, row_failure=fails)
    listener = driver.submit("two", [5, 6, 7], n_choices=2)
    driver.run()
    (event,) = listener.events
    assert isinstance(event.error, NumericalError)
    assert event.error.request_id == "two"
    assert listener.token_ids == [[300, 301], [310, 311]]
    assert driver.kv.usage.used == 0


def test_an_outbox_is_empty_once_taken(smollm2_text: TextProcessor) -> None:
    outbox = Outbox()
    assert not outbox
    driver = Driver(smollm2_text.tokenizer, next_token=counting)
    listener = driver.submit("one", [5, 6, 7], max_tokens=2)
    driver.engine.step()
    taken = driver.outbox.take()
    assert taken
    assert not driver.outbox
    assert listener.token_ids == [[]]
    taken.deliver()
    assert listener.token_ids == [[300]]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_requests_leave_no_garbage(smollm2_text: TextProcessor, num_choices: int) -> None:
    """What a request leaves is freed at once: for a collection, a process with torch in it stops for 0.1 s."""
    driver = Driver(smollm2_text.tokenizer, next_token=lambda prompt, output, choice_index: len(output) % (VOCAB - 1))

    def garbage_of(name: str) -> int:
        gc.collect()
        driver.submit(name, [5, 6, 7], n_choices=num_choices, stop=("never",))
        driver.run()
        driver.listeners.clear()
        return gc.collect()

    garbage_of("first")
    # Threads that earlier tests have left may make some meanwhile; a request's own would be there every time.
    assert 0 in (garbage_of(f"measured {number}") for number in range(5))
