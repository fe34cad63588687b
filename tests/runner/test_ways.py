"""Which steps recorded graphs run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve

from paged_sdk.runner.device_decoding import DeviceDecoding, Way
from paged_sdk.runner.mixed_graphs import LONGEST_CHUNK_CONTEXT
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.types.step import StepRow
from sequences import make_sequence

PROMPT: Final = tuple(range(5))
LAST_PROMPT: Final = tuple(range(LONGEST_CHUNK_CONTEXT + 8))


def path(*, held: int | None = None, largest: int = 3, mixed: int | None = 40) -> DeviceDecoding:
    """Make one whose graphs are those of so many rows, and of so many tokens.

    :param held: the number of the only adapter that tables hold
    """
    device = torch.device("cpu")
    slots: Any = None if held is None else SimpleNamespace(place=lambda number: 0 if number == held else None)
    graphs: Any = SimpleNamespace(largest=largest)
    mixed_graphs: Any = None if mixed is None else SimpleNamespace(largest=mixed)
    sampler = DeviceSampler((), 4, 8, device)
    return DeviceDecoding(sampler, OverlapTokens(4, device), graphs, mixed_graphs, slots)


def row(
    start: int = 5,
    count: int = 1,
    *,
    seq_id: int = 0,
    prompt: tuple[int, ...] = PROMPT,
    sampled: bool = True,
    **request: Any,
) -> ScheduledSequence:
    sequence: Any = make_sequence(seq_id, prompt)
    sequence.request = evolve(sequence.request, **request)
    return ScheduledSequence(sequence, start, count, int(sampled), [0], 0)


def media(*, has_positions: bool) -> Any:
    return SimpleNamespace(positions=np.zeros((3, 5)) if has_positions else None)


def adapter(number: int) -> Any:
    return SimpleNamespace(number=number)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], Way.LAUNCHED),
        ([row(), row()], Way.RECORDED),
        ([row(0, 5)], Way.MIXED),
        ([row(), row(0, 3, sampled=False)], Way.MIXED),
        ([row(), row(2, 1, sampled=False)], Way.MIXED),
        ([row(), row(), row(), row()], Way.MIXED),  # more rows than decode graphs have
        ([row(0, 40)], Way.MIXED),
        ([row(), row(0, 40)], Way.LAUNCHED),
        ([row(LONGEST_CHUNK_CONTEXT - 4, 4, prompt=LAST_PROMPT)], Way.MIXED),
        ([row(LONGEST_CHUNK_CONTEXT - 4, 5, prompt=LAST_PROMPT)], Way.LAUNCHED),
        ([row(LONGEST_CHUNK_CONTEXT, 1, prompt=LAST_PROMPT), row(0, 5)], Way.MIXED),
        ([row(adapter=adapter(7))], Way.RECORDED),
        ([row(0, 5, adapter=adapter(7))], Way.MIXED),
        ([row(adapter=adapter(8))], Way.LAUNCHED),
        ([row(0, 5, adapter=adapter(8)), row()], Way.LAUNCHED),
        ([row(media=media(has_positions=False))], Way.RECORDED),
        ([row(media=media(has_positions=False)), row(0, 5)], Way.MIXED),
        ([row(4, 1, media=media(has_positions=False))], Way.LAUNCHED),  # the last token of the prompt
        ([row(0, 5, media=media(has_positions=False))], Way.LAUNCHED),
        ([row(media=media(has_positions=True))], Way.LAUNCHED),
    ],
)
def test_what_a_step_has_decides(rows: list[ScheduledSequence], expected: Way) -> None:
    assert path(held=7).way(rows) is expected


def test_texts_that_have_outgrown_the_trained_context() -> None:
    """Their last token alone says so by its position."""
    for long, expected in ((row(), Way.RECORDED), (row(0, 5), Way.LAUNCHED), (row(3, 1, sampled=False), Way.LAUNCHED)):
        long.sequence.is_long = True
        assert path().way([long]) is expected
        assert path().way([row(0, 5), long]) is (Way.MIXED if expected is Way.RECORDED else expected)


def test_without_recorded_steps() -> None:
    assert path(mixed=None).way([row(0, 5)]) is Way.LAUNCHED
    assert path(mixed=None).way([row()]) is Way.RECORDED


def sample(own: DeviceDecoding, rows: list[ScheduledSequence]) -> None:
    asked = [
        SampleRow(each.sequence.seq_id, each.sequence.request, each.sequence.token_ids, each.end, 0, 1) for each in rows
    ]
    own.sample(torch.zeros(len(rows), 8), rows, asked)


def test_the_same_rows_again_are_a_repetition() -> None:
    own = path(held=7)
    rows = [row(seq_id=0), row(seq_id=1, adapter=adapter(7))]
    assert own.way(rows) is Way.RECORDED
    sample(own, rows)
    again = [ScheduledSequence(each.sequence, 6, 1, 1, [0], 0) for each in rows]
    assert own.way(again) is Way.REPEATED
    assert own.way(again[:1]) is Way.RECORDED
    assert own.way(rows) is Way.RECORDED  # they were preempted
    again[0].num_new_tokens = 3
    assert own.way(again) is Way.MIXED
    own.forget_step()
    again[0].num_new_tokens = 1
    assert own.way(again) is Way.RECORDED


def test_no_step_repeats_one_that_could_not_be_recorded() -> None:
    own = path()
    rows = [row(adapter=adapter(8))]
    assert own.way(rows) is Way.LAUNCHED
    sample(own, rows)
    assert own.way([ScheduledSequence(rows[0].sequence, 6, 1, 1, [0], 0)]) is Way.LAUNCHED


def test_no_step_repeats_one_whose_tokens_others_have_replaced() -> None:
    """A recorded step that samples nothing on the device leaves its likeliest tokens there all the same."""
    own = path()
    graphs: Any = own._graphs
    graphs.forward = lambda *arguments: None
    rows = [row(seq_id=0)]
    assert own.way(rows) is Way.RECORDED
    sample(own, rows)
    beside = StepRow(1, 5, [3], [0], 5, 0, 1)
    assert own.way([row(seq_id=1)]) is Way.RECORDED
    own.run(Way.RECORDED, [beside])
    assert own.way([ScheduledSequence(rows[0].sequence, 6, 1, 1, [0], 0)]) is Way.RECORDED


def test_who_waits_for_the_host() -> None:
    """Texts that are withheld in turn count together."""
    own = path()
    found = []
    for num_rows, num_drawn in ((0, 3), (3, 3), (0, 3), (2, 3), (2, 3), (1, 3), (3, 3), (4, 3), (3, 3)):
        own.way([])
        found.append(own.may_withhold(num_rows, num_drawn))
    assert found == [False, True, False, True, False, True, False, False, True]
