"""Lists the tokens that a step must sample, and writes tokens sampled on the host into the step's results."""

from __future__ import annotations

from collections.abc import Container, Sequence

from attrs import define

from paged_sdk.runner.output import RunnerOutput
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sampler import SampledRows
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["Target", "note_sampled", "targets_of"]


# Not frozen: that makes construction three times as slow, and each step makes one per sequence.
@define(eq=False)
class Target:
    """Describes one token that a step must sample.

    :ivar place: index of its logits among the step's targets; targets whose token is known without logits do not count
    :ivar index: index of its row in the step
    :ivar depth: number of the row's drafts before it
    :ivar offset: index, among the row's new tokens, of the token that it follows
    """

    place: int
    index: int
    depth: int
    offset: int
    row: SampleRow


def targets_of(scheduled: Sequence[ScheduledSequence]) -> list[Target]:
    """List the tokens that a step must sample, row by row: one after the known tokens and one after each draft."""
    targets: list[Target] = []
    for index, scheduled_row in enumerate(scheduled):
        if not scheduled_row.num_samples:
            continue
        sequence, drafts = scheduled_row.sequence, scheduled_row.draft_token_ids
        token_ids = [*sequence.token_ids, *drafts] if drafts else sequence.token_ids
        for depth in range(len(drafts) + 1):
            row = SampleRow(
                sequence.seq_id,
                sequence.request,
                token_ids,
                scheduled_row.known_end + depth,
                sequence.choice_index,
                scheduled_row.num_samples,
                len(drafts),
            )
            offset = scheduled_row.num_new_tokens - len(drafts) + depth - 1
            targets.append(Target(len(targets), index, depth, offset, row))
    return targets


def note_sampled(
    scheduled: Sequence[ScheduledSequence],
    targets: Sequence[Target],
    sampled: SampledRows,
    forced: Container[int],
    result: RunnerOutput,
) -> None:
    """Write the tokens that the host has sampled into the result.

    A row keeps the sampled tokens up to the first that differs from the draft at its place. Every token is drawn from
    the target's distribution given the tokens before it, so drafts change the speed and never the output.

    :param forced: places of the targets whose token the constraint forced
    """
    for place, target in enumerate(targets):
        index, depth = target.index, target.depth
        token_ids, logprobs = sampled.token_ids[place], sampled.logprobs[place]
        if not depth:
            result.token_ids[index], result.logprobs[index] = token_ids, logprobs
            if place in sampled.failed:
                result.failed.setdefault(index, sampled.failed[place])
        elif result.token_ids[index] == list(scheduled[index].draft_token_ids[:depth]):
            result.token_ids[index] += token_ids
            if logprobs is not None:
                result.logprobs[index] = [*(result.logprobs[index] or ()), *logprobs]
        else:
            continue
        if place in forced:
            result.forced.setdefault(index, []).extend(range(depth, depth + len(token_ids)))
