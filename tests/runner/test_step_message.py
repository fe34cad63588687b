"""A step crosses a process boundary: what a second runner needs is in its message, and nothing else."""

from __future__ import annotations

import pickle

import pytest
import torch
from test_model_runner import CPU, Harness, build, reference

from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.kernels.step import StepContext
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.types.step import AWAITED, Step


def test_a_follower_computes_the_same_from_pickled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes, drafts, shared prefixes, forks with copies: a follower with a pool of its own keeps up."""
    model = build(reference())
    leader = Harness(model, max_num_batched_tokens=16)
    pool = PoolSettings(block_size=8, dtype=model.dtype, device=CPU)
    follower = PagedBackend(model.config, pool, leader.kv.usage.total)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    leader.add(prompt)
    leader.add(prompt[:17], num_choices=2)
    computed: list[torch.Tensor] = []
    forward = type(model).forward

    def watched(self: object, *arguments: object) -> torch.Tensor:
        computed.append(forward(model, *arguments))  # type: ignore[arg-type]
        return computed[-1]

    schedule = leader.scheduler.schedule
    num_copies = num_drafts = 0
    while leader.scheduler.num_running or leader.scheduler.num_waiting:
        for sequence in leader.scheduler.decoding:
            sequence.draft_token_ids = [7, 8]
        output = schedule()
        sent = pickle.dumps(output.message())
        monkeypatch.setattr(leader.scheduler, "schedule", lambda output=output: output)
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "forward", watched)
            leader.step()
        step = pickle.loads(sent)
        assert isinstance(step, Step)
        with torch.inference_mode():
            if step.copies:
                follower.copy(step.copies)
            batch = make_input_batch(step.rows, CPU)
            context = StepContext(attention=follower.prepare(step.rows))
            hidden = model.forward(batch.token_ids, batch.positions, context)
        assert torch.equal(hidden, computed[-1])
        num_copies += len(step.copies)
        num_drafts += sum(row.num_logits == 3 for row in step.rows)
    assert num_copies > 0
    assert num_drafts > 0


def test_a_token_that_only_the_device_knows_is_awaited() -> None:
    harness = Harness(build(reference()))
    harness.add([1, 2, 3])
    first = harness.scheduler.schedule()
    assert first.message().rows[0].token_ids == [1, 2, 3]
    second = harness.scheduler.schedule()
    (row,) = second.message().rows
    assert (row.start, row.token_ids, row.num_logits) == (3, [AWAITED], 1)
