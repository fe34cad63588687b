"""Compare an engine whose device overlaps steps with one that has each step's results before the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from engine_driver import STOP, Driver

from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.errors import NumericalError
from paged_sdk.scheduler.sequence import Sequence as TokenSequence


def submit_many(driver: Driver) -> None:
    """Submit many requests, of which some have to be sampled on the host."""
    for index in range(12):
        stop = ("e",) if index % 4 == 3 else ()
        bias = {5: 1.0} if index % 5 == 2 else None
        prompt, n_choices = [300 + index] * (3 + 2 * index), 1 + index % 3 // 2
        driver.submit(f"request {index}", prompt, stop=stop, n_choices=n_choices, logits_bias=bias)


def test_texts_and_usage_are_the_same(smollm2_text: TextProcessor) -> None:
    """In chunks, with preemptions, choices, stop tokens and stop strings."""
    ahead, behind = (Driver(smollm2_text.tokenizer, num_blocks=24, overlaps=overlaps) for overlaps in (True, False))
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


def test_results_come_a_step_later(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, overlaps=True)
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


def test_rows_that_the_host_samples_hold_nobody_up(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, overlaps=True)
    on_device = driver.submit("device", [301, 302], max_tokens=4)
    on_host = driver.submit("host", [303, 304], max_tokens=4, logits_bias={5: 1.0})
    lengths = []
    while driver.engine.has_work:
        driver.step()
        lengths.append((len(on_device.token_ids[0]), len(on_host.token_ids[0])))
    # Every step is submitted before the host has sampled, so that its text is in every second one. When the device's
    # text has its tokens, nothing overlaps with the last step.
    assert lengths == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 3), (4, 4)]
    assert driver.runner.num_steps == 6
    stats = driver.engine.stats()
    assert (stats.steps, stats.prompt_tokens, stats.completion_tokens) == (6, 4, 8)


def test_most_of_the_rows_are_waited_for(smollm2_text: TextProcessor) -> None:
    """A token in every second step would be too little for three texts, so that one does not wait for the host."""
    driver = Driver(smollm2_text.tokenizer, overlaps=True)
    on_device = driver.submit("device", [301, 302], max_tokens=4)
    on_host = [driver.submit(f"host {index}", [303, 304], max_tokens=4, logits_bias={5: 1.0}) for index in range(3)]
    lengths = []
    while driver.engine.has_work:
        driver.step()
        lengths.append((len(on_device.token_ids[0]), *(len(each.token_ids[0]) for each in on_host)))
    # The host's tokens are there at once, the device's when the next step has been submitted.
    assert lengths == [(0, 1, 1, 1), (1, 2, 2, 2), (2, 3, 3, 3), (3, 4, 4, 4), (4, 4, 4, 4)]
    assert driver.runner.num_steps == 4


def test_a_step_with_several_samples_is_not_overtaken(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, overlaps=True)
    driver.submit("two", [301, 302], max_tokens=3, n_choices=2)
    driver.step()
    assert set(driver.texts) == {("two", 0), ("two", 1)}
    driver.run()
    assert driver.ends["two"].completion_tokens == 6


def test_an_abort_while_a_step_is_under_way(smollm2_text: TextProcessor) -> None:
    driver = Driver(smollm2_text.tokenizer, overlaps=True)
    driver.submit("gone", [301] * 5)
    driver.submit("stays", [302] * 5, max_tokens=4)
    driver.step()
    driver.engine.abort("gone")
    driver.deliver()
    assert driver.ends["gone"].completion_tokens == 0
    assert driver.kv.usage.used == 2
    driver.run()
    assert driver.ends["stays"].completion_tokens == 4
    assert driver.kv.usage.used == 0


def test_a_row_that_fails_after_its_successor_was_submitted(smollm2_text: TextProcessor) -> None:
    def fails(prompt: Sequence[int], output: Sequence[int]) -> str | None:
        return "bad" if prompt[0] == 301 and len(output) == 2 else None

    driver = Driver(smollm2_text.tokenizer, overlaps=True, row_failure=fails)
    driver.submit("bad", [301] * 5)
    driver.submit("good", [302] * 5, max_tokens=6)
    driver.run()
    assert isinstance(driver.ends["bad"], NumericalError)
    assert driver.ends["good"].completion_tokens == 6
    assert driver.kv.usage.used == 0


@pytest.mark.parametrize("overlaps", [True, False])
def test_choices_that_meet_a_stop_string_in_the_same_step(smollm2_text: TextProcessor, *, overlaps: bool) -> None:
    driver = Driver(smollm2_text.tokenizer, overlaps=overlaps, next_token=lambda prompt, output, choice_index: 350)
    text = smollm2_text.tokenizer.decode([350])
    driver.submit("both", [301] * 5, stop=(text,), n_choices=2)
    driver.submit("other", [302] * 5, max_tokens=4)
    driver.run()
    assert driver.texts["both", 0] == driver.texts["both", 1] == ""
    assert driver.ends["both"].completion_tokens == 2
    assert driver.ends["other"].completion_tokens == 4
    assert driver.kv.usage.used == 0


def test_a_row_that_fails_when_its_text_has_ended_already(smollm2_text: TextProcessor) -> None:
    """It was scheduled before the text was known to end; the request's other choice goes on."""

    def next_token(prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
        return STOP if choice_index == 0 and len(output) == 2 else 350

    def fails(prompt: Sequence[int], output: Sequence[int]) -> str | None:
        return "bad" if output and output[-1] == STOP else None

    driver = Driver(smollm2_text.tokenizer, overlaps=True, next_token=next_token, row_failure=fails)
    driver.submit("two", [301] * 5, max_tokens=6, n_choices=2)
    driver.run()
    assert driver.ends["two"].completion_tokens == 3 + 6
    assert driver.kv.usage.used == 0


@pytest.mark.parametrize("overlaps", [True, False])
def test_texts_are_the_same_whatever_steps_take(smollm2_text: TextProcessor, *, overlaps: bool) -> None:
    """Prompts are cut by the times of steps, which differ from run to run; one of them comes while others generate."""
    texts = []
    for slowdown in (0.0, 1.1, 3.0):
        driver = Driver(smollm2_text.tokenizer, num_blocks=40, overlaps=overlaps, max_slowdown=slowdown)
        submit_many(driver)
        for _ in range(8):
            driver.step()
        driver.submit("late", [7] * 90, max_tokens=5)
        driver.run()
        assert driver.kv.usage.used == 0
        texts.append(driver.texts)
    assert len(texts[0]) > 12
    assert texts[0] == texts[1] == texts[2]


class Known:
    """Guesses what texts are known to have been, every fifth token wrong.

    :ivar asked: the requests whose texts it was asked for
    """

    def __init__(self, texts: Mapping[str, Sequence[list[int]]]) -> None:
        self.asked: set[str] = set()
        self._texts = texts

    def propose(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        found = []
        for sequence in sequences:
            assert sequence.num_awaited == 0
            name, first = sequence.request.request_id, sequence.num_output_tokens
            self.asked.add(name)
            guesses = self._texts[name][sequence.choice_index][first : first + 3]
            found.append([token if place % 5 else 300 for place, token in enumerate(guesses, start=first)])
        return found

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop nothing: nothing is kept of sequences."""

    def reset(self) -> None:
        """Forget nothing."""


@pytest.mark.parametrize("num_blocks", [24, 64])
def test_only_rows_of_the_host_have_drafts_while_steps_overlap(smollm2_text: TextProcessor, num_blocks: int) -> None:
    """What the device samples is not known when the next step is chosen, so nothing can be guessed after it. Choices
    were sampled by the host when they parted, so that guesses may go on from there."""
    plain = Driver(smollm2_text.tokenizer, num_blocks=num_blocks)
    submit_many(plain)
    plain.run()
    proposer = Known({name: listener.token_ids for name, listener in plain.listeners.items()})
    drivers = [
        Driver(smollm2_text.tokenizer, num_blocks=num_blocks, overlaps=overlaps, proposer=proposer if drafts else None)
        for overlaps, drafts in ((True, True), (True, False))
    ]
    for driver in drivers:
        submit_many(driver)
        driver.run()
        assert driver.texts == plain.texts
        assert driver.kv.usage.used == 0
    host = {f"request {index}" for index in range(12) if index % 5 == 2}
    assert host <= proposer.asked
    assert not proposer.asked & {f"request {index}" for index in range(12) if index % 5 != 2 and index % 3 != 2}
    drafts = drivers[0].engine.stats()
    assert drafts.drafted_tokens > drafts.accepted_tokens > 0
    assert drivers[0].runner.num_steps <= drivers[1].runner.num_steps
