from __future__ import annotations

from paged_sdk.engine.events import ChoiceDelta, RequestEvent
from paged_sdk.engine.metrics import WINDOW_SECONDS, Metrics
from paged_sdk.types.response import Usage

USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)


def event(*deltas: ChoiceDelta, usage: Usage | None = None) -> RequestEvent:
    return RequestEvent(request_id="r", choices=deltas, usage=usage)


def test_a_slow_readers_events_merge_choice_by_choice() -> None:
    merged = RequestEvent.merge(
        [
            event(ChoiceDelta(index=0, text="a"), ChoiceDelta(index=1, text="x")),
            event(ChoiceDelta(index=1, text="y", finish_reason="stop")),
            event(ChoiceDelta(index=0, text="b", finish_reason="length"), usage=USAGE),
        ]
    )
    assert merged == event(
        ChoiceDelta(index=0, text="ab", finish_reason="length"),
        ChoiceDelta(index=1, text="xy", finish_reason="stop"),
        usage=USAGE,
    )
    assert merged.is_last


def test_one_event_stays_itself() -> None:
    only = event(ChoiceDelta(index=0, text="a"))
    assert RequestEvent.merge([only]) is only
    assert not only.is_last


def test_an_error_survives_merging() -> None:
    error = RuntimeError("no")
    merged = RequestEvent.merge([event(ChoiceDelta(index=0, text="a")), RequestEvent(request_id="r", error=error)])
    assert merged.error is error
    assert merged.choices == (ChoiceDelta(index=0, text="a"),)


def test_rates_look_back_over_recent_work_only() -> None:
    metrics = Metrics()
    assert metrics.prompt_tok_per_sec == metrics.completion_tok_per_sec == 0
    metrics.add_step(start=0.0, end=1.0, prompt_tokens=100, completion_tokens=1)
    assert metrics.prompt_tok_per_sec == 100
    start = 1.5 + WINDOW_SECONDS
    metrics.add_step(start=start, end=start + 0.5, prompt_tokens=0, completion_tokens=10)
    assert metrics.prompt_tok_per_sec == 0
    assert metrics.completion_tok_per_sec == 20
    assert (metrics.steps, metrics.prompt_tokens, metrics.completion_tokens) == (2, 100, 11)
