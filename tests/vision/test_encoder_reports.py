"""What transformers reports while image encoders are loaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from logging import Handler, LogRecord, getLogger

import pytest

from paged_sdk.vision.encoder import _quiet

pytest.importorskip("transformers")


class Kept(Handler):
    """Keeps what is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_two_encoders_that_load_at_once_leave_reports_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = getLogger("transformers.modeling_utils")
    kept = Kept()
    monkeypatch.setattr(logger, "handlers", [kept])
    with ThreadPoolExecutor(1) as other, ExitStack() as first, ExitStack() as second:
        first.enter_context(_quiet())
        logger.error("of the first")
        other.submit(logger.error, "of neither").result()
        other.submit(second.enter_context, _quiet()).result()
        other.submit(logger.error, "of the second").result()
        first.close()  # the one that began first ends first
        logger.error("after the first")
        second.close()
        other.submit(logger.error, "after the second").result()
    assert kept.messages == ["of neither", "after the first", "after the second"]
    assert not logger.filters
