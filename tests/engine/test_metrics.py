from __future__ import annotations

from paged_sdk.engine.metrics import WINDOW_SECONDS, Metrics


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
