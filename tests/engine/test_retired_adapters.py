"""An adapter goes when no request goes through it any more, and never before."""

from __future__ import annotations

import pytest
from engine_driver import Driver

from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.adapter import AdapterUse

USES = [AdapterUse(number, f"adapter {number}", bytes([number])) for number in range(2)]


@pytest.fixture
def driver(smollm2_text: TextProcessor) -> Driver:
    return Driver(smollm2_text.tokenizer)


def test_it_waits_for_every_request_of_its_own(driver: Driver) -> None:
    gone: list[int] = []
    first = driver.submit("first", range(5), 6, adapter=USES[0])
    second = driver.submit("second", range(9), 12, adapter=USES[0])
    driver.submit("other", range(7), 30, adapter=USES[1])
    driver.step()
    driver.engine.retire_adapter(0, lambda: gone.append(0))
    while not gone:
        assert not second.has_ended
        driver.step()
    assert first.has_ended
    assert second.has_ended
    assert len(second.token_ids[0]) == 12
    assert driver.engine.has_work  # the other adapter's request goes on
    with pytest.raises(InvalidRequestError, match="'adapter 0'"):
        driver.submit("late", range(5), adapter=USES[0])
    driver.run()
    assert gone == [0]


def test_without_requests_it_goes_at_once(driver: Driver) -> None:
    gone: list[int] = []
    driver.engine.retire_adapter(1, lambda: gone.append(1))
    assert gone == [1]


def test_aborted_requests_hold_none(driver: Driver) -> None:
    gone: list[int] = []
    driver.submit("first", range(5), 30, adapter=USES[0])
    driver.step()
    driver.engine.retire_adapter(0, lambda: gone.append(0))
    driver.engine.abort("first")
    assert gone == [0]


def test_closing_waits_for_nobody(driver: Driver) -> None:
    gone: list[int] = []
    driver.submit("first", range(5), 30, adapter=USES[0])
    driver.engine.retire_adapter(0, lambda: gone.append(0))
    driver.engine.close()
    assert gone == [0]
