"""What is left of sequences for which drafts were proposed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_model import Harness

from drafting import drafting
from paged_sdk.config.engine import EngineConfig


@pytest.mark.parametrize("paged", [True, False])
def test_nothing_is_left_behind(paged: bool) -> None:
    """Preemption, choices, cancelling and the end of a text: the last steps forget them all."""
    harness = Harness(
        EngineConfig(
            paged=paged, num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64
        )
    )
    speculation = drafting(4)

    def step(after: Callable[[], object] = lambda: None) -> None:
        sequences = harness.scheduler.decoding
        for sequence, drafts in zip(sequences, speculation.propose(sequences), strict=True):
            sequence.draft_token_ids = drafts
        after()
        speculation.forget(harness.step().finished_seq_ids)

    sequences = [harness.add([1, 2, 3] * 3, max_tokens=14, num_choices=1 + index % 2) for index in range(5)]
    for _ in range(6):
        step()
    assert speculation.num_followed > 1
    step(lambda: harness.scheduler.finish(sequences[0], "canceled"))
    while harness.has_work:
        step()
    assert harness.scheduler.costs.drafts.num_accepted > 0
    harness.check_end()
    harness.add([1], max_tokens=3)
    step()  # a step after the last text has ended tells of it
    assert speculation.num_followed == 0
