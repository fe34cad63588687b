"""Lists the tokens that a step is to choose, and writes those that the host has chosen into its results."""

from __future__ import annotations

from collections.abc import Container, Sequence

from attrs import define

from paged_sdk.runner.output import RunnerOutput
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sampler import SampledRows
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["Target", "note_sampled", "targets_of"]


# Not frozen, which makes construction three times as slow: a step makes one per sequence.
@define(eq=False)
class Target:
    """Describes one token that a step is to choose.

    :ivar place: its index among the step's targets, those left out whose token is known without logits
    :ivar index: the index of its row in the step
    :ivar depth: how many drafts of the row precede it
    :ivar offset: the index of the token that it follows, among the row's new tokens
    """

    place: int
    index: int
    depth: int
    offset: int
    row: SampleRow


def targets_of(scheduled: Sequence[ScheduledSequence]) -> list[Target]:
    """List the tokens that a step is to choose, row by row: one after the known tokens and one after each draft."""
    targets: list[Target] = []
    for index, scheduled_row in enumerate(scheduled):
        if not scheduled_row.num_samples:
            continue
        sequence, drafts = scheduled_row.sequence, scheduled_row.draft_token_ids
        token_ids: list[int] = sequence.token_ids
        for depth in range(len(drafts) + 1):
            if depth:
                token_ids = [*sequence.token_ids, *drafts[:depth]]
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

    A row takes its sampled tokens as long as each equals the draft at its place: every token is drawn from its own
    distribution, given the text before it, so drafts change the time that a text takes and nothing else.

    :param forced: the targets that were left one token
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
