from __future__ import annotations

import itertools
import time
from functools import partial

import pytest
from fake_model import VOCAB, Harness

from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import ContextLengthError, InvalidRequestError, QueueFullError
from paged_sdk.scheduler.pace import FIRST_CHUNK
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.scheduler.waiting_queue import MAX_TIMES_PASSED


def make(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    seats: int = 8,
    budget: int = 64,
    max_model_len: int = 400,
    cache: int = 16,
    max_queue: int = 1000,
    paged: bool = True,
    rope_switch: int | None = None,
    max_slowdown: float = 0.0,
) -> Harness:
    return Harness(
        EngineConfig(
            paged=paged,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_cache_n=cache,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            max_queue=max_queue,
            rope_switch=rope_switch,
            max_slowdown=max_slowdown,
        )
    )


def rows(harness: Harness) -> list[tuple[int, int, int, int]]:
    """Return (id, start, new tokens, samples) of the next step, which is executed."""
    output = harness.schedule()
    found = [(row.sequence.seq_id, row.start, row.num_new_tokens, row.num_samples) for row in output.scheduled]
    harness.update(output, harness.execute(output))
    return found


def test_a_step_mixes_decodes_and_chunks_under_one_budget() -> None:
    harness = make(budget=10)
    harness.add([1] * 3)
    assert rows(harness) == [(0, 0, 3, 1)]
    harness.add([2] * 14)
    harness.add([3] * 5)
    assert rows(harness) == [(0, 3, 1, 1), (1, 0, 9, 0)]
    assert rows(harness) == [(0, 4, 1, 1), (1, 9, 5, 1), (2, 0, 4, 0)]
    # The generating ones have their token each, even where a chunk of an older prompt is before them.
    assert rows(harness) == [(0, 5, 1, 1), (1, 14, 1, 1), (2, 4, 1, 1)]
    harness.run()
    harness.check_end()


def test_a_prompt_of_higher_rank_leaves_the_decodes_their_tokens() -> None:
    harness = make(budget=4)
    harness.add([1, 1])
    harness.add([2, 2])
    assert rows(harness) == [(0, 0, 2, 1), (1, 0, 2, 1)]
    long = harness.add([3] * 30, priority=1)
    assert rows(harness) == [(0, 2, 1, 1), (1, 2, 1, 1), (2, 0, 2, 0)]
    assert rows(harness) == [(0, 3, 1, 1), (1, 3, 1, 1), (2, 2, 2, 0)]
    harness.scheduler.finish(long, "canceled")
    assert rows(harness) == [(0, 4, 1, 1), (1, 4, 1, 1)]


def test_a_budget_smaller_than_the_seats_serves_the_first() -> None:
    harness = make(budget=2, seats=4)
    harness.add([1], num_choices=4, max_tokens=3)
    assert rows(harness) == [(0, 0, 1, 4)]
    assert rows(harness) == [(0, 1, 1, 1), (1, 1, 1, 1)]
    harness.run()
    harness.check_end()


def test_choices_share_the_prompt_and_go_their_own_ways() -> None:
    harness = make(seats=4)
    root = harness.add([1, 2, 3, 4, 5, 6], num_choices=3, max_tokens=9)
    other = harness.add([9] * 3)
    assert rows(harness) == [(0, 0, 6, 3), (3, 0, 3, 1)]
    assert harness.scheduler.num_running == 4
    assert [harness.sequences[i].choice_index for i in range(3)] == [0, 1, 2]
    assert (root.num_choices, other.num_choices) == (1, 1)
    assert harness.num_prompt_tokens_computed == 9
    harness.step()
    assert harness.shadow.num_copies == 2
    harness.run()
    harness.check_end()


def test_a_request_with_choices_waits_for_all_its_seats() -> None:
    harness = make(seats=4)
    harness.add([1], max_tokens=2)
    harness.add([2], max_tokens=9)
    harness.add([3], num_choices=3)
    harness.add([4])
    assert [row[0] for row in rows(harness)] == [0, 1, 5]
    assert [row[0] for row in rows(harness)] == [0, 1, 5]
    assert [row[0] for row in rows(harness)] == [1, 5]
    harness.run()
    harness.check_end()


@pytest.mark.parametrize("paged", [True, False])
def test_stop_tokens_max_tokens_and_the_context_end_a_text(paged: bool) -> None:
    harness = make(max_model_len=20, paged=paged)
    stopping = [harness.add([1, i], max_tokens=50, stops=True) for i in range(6)]
    counted = harness.add([1, 2, 3], max_tokens=4)
    full = harness.add([4] * 12, max_tokens=50)
    harness.run()
    harness.check_end()
    assert "stop" in {sequence.finish_reason for sequence in stopping}
    assert (counted.finish_reason, counted.num_output_tokens) == ("length", 4)
    assert (full.finish_reason, len(full.token_ids)) == ("length", 20)
    assert sorted(harness.ended) == list(range(8))


def test_what_can_never_run_is_refused() -> None:
    harness = make(num_blocks=4, seats=2, max_queue=2)
    with pytest.raises(ContextLengthError) as too_long:
        harness.add([1] * 17)
    assert (too_long.value.num_tokens, too_long.value.limit, too_long.value.request_id) == (17, 16, "request-0")
    with pytest.raises(ContextLengthError) as no_room_for_output:
        make(max_model_len=10).add([1] * 10)
    assert no_room_for_output.value.limit == 9
    with pytest.raises(InvalidRequestError):
        harness.add([])
    with pytest.raises(InvalidRequestError):
        harness.add([1], num_choices=3)
    harness.add([1])
    harness.add([1])
    with pytest.raises(QueueFullError) as full:
        harness.add([1])
    assert full.value.limit == 2
    assert harness.scheduler.num_waiting == 2
    harness.step()
    harness.add([1])


def test_timing_and_cached_tokens_are_those_of_the_first_admission() -> None:
    harness = make()
    before = time.monotonic()
    first = harness.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert first.first_scheduled_at is None
    harness.step()
    second = harness.add([1, 2, 3, 4, 5, 6, 7, 8, 9], num_choices=2)
    harness.step()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.first_scheduled_at is not None
    assert second.first_scheduled_at is not None
    assert before <= first.first_scheduled_at <= second.first_scheduled_at <= time.monotonic()
    assert harness.sequences[2].num_cached_tokens == 8


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    harness = make(num_blocks=200, seats=16, budget=32)
    prefix = list(range(100, 202))
    for index in range(16):
        harness.add([*prefix, index], max_tokens=5)
    harness.run()
    harness.check_end()
    # Of the 102 common tokens 25 full blocks of 4 once, and by each the 2 behind them and its own.
    assert harness.num_prompt_tokens_computed == 100 + 16 * 3
    assert harness.manager.prefix_hits == 15 * 100


def test_a_follower_takes_over_when_its_leader_goes() -> None:
    harness = make(budget=8)
    prompt = list(range(40))
    leader = harness.add(prompt)
    followers = [harness.add([*prompt, index]) for index in range(3)]
    stranger = harness.add([99])
    assert rows(harness) == [(0, 0, 8, 0)]
    harness.scheduler.finish(leader, "canceled")
    assert rows(harness) == [(1, 8, 8, 0)]
    harness.step()
    assert [sequence.status for sequence in followers[1:]] == [SequenceStatus.WAITING] * 2
    harness.run()
    harness.check_end()
    assert harness.num_prompt_tokens_computed == 40 + 3 + 1
    assert stranger.finish_reason == "length"


def test_others_pass_those_that_wait_for_a_leader() -> None:
    harness = make(budget=45)
    prompt = list(range(40))
    for index in range(3):
        harness.add([*prompt, index])
    harness.add([99])
    assert rows(harness) == [(0, 0, 41, 1), (3, 0, 1, 1)]
    assert rows(harness) == [(0, 41, 1, 1), (3, 1, 1, 1), (1, 40, 1, 1), (2, 40, 1, 1)]


def test_one_that_needs_all_logits_waits_for_nobody() -> None:
    harness = make()
    prompt = list(range(12))
    harness.add(prompt)
    harness.add(prompt, skip_prefix_cache=True)
    harness.add([*prompt, 1])
    assert rows(harness) == [(0, 0, 12, 1), (1, 0, 12, 1)]
    assert rows(harness)[2] == (2, 12, 1, 1)


def test_64_requests_on_a_pool_for_8() -> None:
    harness = make(num_blocks=40, seats=32, budget=64)
    for index in range(64):
        harness.add([index] * 12, max_tokens=8)
    harness.run()
    harness.check_end()
    assert sorted(harness.ended) == list(range(64))
    assert harness.forgotten == harness.ended[: len(harness.forgotten)]
    # Equal requests: first come, first admitted; and nobody ends far from its turn.
    assert harness.admitted == sorted(harness.admitted)
    assert all(abs(place - seq_id) <= 8 for place, seq_id in enumerate(harness.ended))
    usage = harness.manager.usage
    assert usage.free + usage.cached == 40


@pytest.mark.parametrize("cache", [0, 16])
@pytest.mark.parametrize("num_blocks", [21, 35])
def test_preemption_storms_change_no_text(num_blocks: int, cache: int) -> None:
    """Short prompts with long outputs: many are admitted, and then outgrow the memory together."""
    harness = make(num_blocks=num_blocks, block_size=1, seats=16, budget=48, cache=cache)
    for index in range(100):
        harness.add([index % 7] * (index % 3 + 1), max_tokens=12 + index % 7, num_choices=1 + (index % 10 == 0))
    harness.run()
    # Compares each text with the one that it has alone.
    harness.check_end()
    assert harness.scheduler.num_preemptions > 200


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    harness = make(num_blocks=8, block_size=2, seats=4)
    first, second, third = (harness.add([index] * 4, max_tokens=6) for index in range(3))
    late = harness.add([9] * 4, max_tokens=6)
    harness.step()
    assert [s.status for s in (first, second, third)] == [SequenceStatus.RUNNING] * 3
    assert rows(harness) == [(0, 4, 1, 1), (1, 4, 1, 1)]
    assert harness.scheduler.num_preemptions == 1
    assert third.status is SequenceStatus.WAITING
    assert third.num_computed_tokens == 0
    assert third.table.ids == []
    first_scheduled_at = third.first_scheduled_at
    while third.status is SequenceStatus.WAITING:
        assert late.status is SequenceStatus.WAITING
        harness.step()
    assert third.first_scheduled_at == first_scheduled_at
    harness.run()
    harness.check_end()


def test_a_low_priority_is_preempted_before_a_younger_one() -> None:
    harness = make(num_blocks=6, block_size=2)
    low = harness.add([1] * 4, priority=-1)
    harness.step()
    high = harness.add([2] * 3)
    harness.step()
    assert harness.scheduler.num_running == 2
    while not harness.scheduler.num_preemptions:
        harness.step()
    assert (low.status, high.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)


def test_one_that_outgrows_the_memory_ends_with_its_text() -> None:
    harness = make(num_blocks=3)
    sequence = harness.add([1, 2, 3], max_tokens=100)
    while sequence.finish_reason is None:
        output = harness.step()
    assert output.dropped == [sequence]
    assert output.scheduled == []
    assert sequence.finish_reason == "length"
    assert len(sequence.token_ids) == 13
    harness.check_end()


def test_choices_that_outgrow_the_memory_all_end() -> None:
    harness = make(num_blocks=3)
    harness.add([1] * 12, num_choices=3, max_tokens=100)
    harness.add([5], max_tokens=3)
    harness.run()
    harness.check_end()
    assert [len(harness.sequences[index].token_ids) for index in range(3)] == [13] * 3


def test_higher_priority_goes_first() -> None:
    harness = make(seats=1)
    for priority in (0, 2, 1, 2):
        harness.add([priority], priority=priority, max_tokens=2)
    harness.run()
    assert harness.admitted == [1, 3, 2, 0]


def test_a_stream_of_higher_priorities_passes_a_request_a_bounded_number_of_times() -> None:
    harness = make(seats=1)
    low = harness.add([1], priority=-5, max_tokens=2)
    while low.first_scheduled_at is None:
        harness.add([2, harness.next_id], priority=3, max_tokens=1)
        harness.step()
    assert harness.admitted.index(low.seq_id) == MAX_TIMES_PASSED


def test_a_crowd_of_low_priority_has_its_share_and_no_more() -> None:
    harness = make(seats=1)
    for _ in range(5):
        harness.add([1], priority=-1, max_tokens=1)
    for _ in range(200):
        harness.add([2], priority=1, max_tokens=1)
        harness.step()
    places = [harness.admitted.index(seq_id) for seq_id in range(5)]
    assert places == [MAX_TIMES_PASSED + index * (MAX_TIMES_PASSED + 1) for index in range(5)]


def test_small_ones_pass_a_large_one_a_bounded_number_of_times() -> None:
    harness = make(num_blocks=20, seats=10, budget=100)
    for _ in range(3):
        harness.add([1] * 4, max_tokens=4)
        harness.step()
    large = harness.add([2] * 72, max_tokens=2)
    while large.first_scheduled_at is None:
        harness.add([3, harness.next_id], max_tokens=5)
        harness.step()
        assert harness.num_steps < 100
    assert harness.admitted.index(large.seq_id) == 3 + MAX_TIMES_PASSED
    # It has waited its turn: the others do not push it out again.
    assert large.status is SequenceStatus.RUNNING
    harness.run()
    harness.check_end()


def test_an_overdue_one_is_not_pushed_out_by_higher_priorities() -> None:
    harness = make(num_blocks=8, block_size=2, seats=4)
    low = harness.add([1] * 6, priority=-1, max_tokens=8)
    steps = 0
    while low.finish_reason is None:
        if harness.scheduler.num_waiting < 4:
            harness.add([2, harness.next_id], priority=1, max_tokens=10)
        harness.step()
        steps += 1
        assert steps < 200
    assert low.num_output_tokens == 8


def test_a_long_queue_is_not_searched_to_its_end() -> None:
    harness = make(num_blocks=10, seats=10)
    harness.add([1] * 30, max_tokens=10)
    harness.step()
    for index in range(100):
        harness.add([index] * 30)
    tiny = harness.add([1])
    harness.step()
    assert tiny.first_scheduled_at is None


def test_a_cancel_in_flight_is_tolerated() -> None:
    harness = make()
    sequence, other = harness.add([1] * 6), harness.add([2] * 6)
    output = harness.schedule()
    sampled = harness.execute(output)
    harness.scheduler.finish(sequence, "canceled")
    assert harness.manager.usage.used == 2
    new_tokens = harness.update(output, sampled)
    assert new_tokens.sequences == [other]
    assert sequence.output_token_ids == []
    harness.scheduler.finish(sequence, "stop")
    assert sequence.finish_reason == "canceled"
    assert harness.schedule().finished_seq_ids == [0]


def test_a_failed_row_changes_nothing() -> None:
    harness = make()
    sequence, other = harness.add([1] * 9), harness.add([2] * 9)
    output = harness.schedule()
    sampled = harness.execute(output)
    new_tokens = harness.update(output, [[], sampled[1]])
    assert new_tokens.sequences == [other]
    assert (sequence.num_computed_tokens, sequence.output_token_ids) == (0, [])
    harness.scheduler.finish(sequence, "canceled")
    # What it computed is not offered to others.
    assert harness.add([1] * 9).num_cached_tokens == 0
    harness.run()
    harness.check_end()


def test_every_end_is_reported_once_to_the_runner() -> None:
    harness = make(num_blocks=6, seats=3)
    for index in range(10):
        harness.add([index] * 8, max_tokens=3, num_choices=1 + index % 2)
    harness.scheduler.finish(harness.sequences[3], "canceled")
    harness.run()
    harness.add([1])
    harness.step()
    assert sorted(harness.forgotten) == sorted(set(harness.sequences) - {harness.next_id - 1})


def test_an_idle_step_keeps_what_it_would_have_said() -> None:
    harness = make(paged=False, cache=0)
    sequence = harness.add([1])
    harness.step()
    harness.scheduler.finish(sequence, "canceled")
    idle = harness.scheduler.schedule()
    assert (idle.scheduled, idle.released, idle.finished_seq_ids) == ([], [], [])
    assert harness.scheduler.num_running == harness.scheduler.num_waiting == 0
    harness.add([2])
    output = harness.schedule()
    assert (output.released, output.finished_seq_ids) == ([0], [0])


def test_contiguous_memory_reuses_finished_sequences() -> None:
    harness = make(paged=False, cache=2, budget=100)
    first = harness.add([1, 2, 3, 4, 5], max_tokens=4)
    harness.run()
    turn = harness.add([*first.token_ids, 7, 8], max_tokens=4)
    branch = harness.add([1, 2, 3, 9], max_tokens=4, num_choices=2)
    harness.run()
    harness.check_end()
    # The last token of a text has no KV.
    assert turn.num_cached_tokens == 8
    assert branch.num_cached_tokens == 0
    again = harness.add([1, 2, 3, 9], max_tokens=4)
    harness.run()
    assert again.num_cached_tokens == 3
    harness.check_end()


def chat(harness: Harness, turns: int) -> list[Sequence]:
    token_ids, sequences = [1, 2, 3], []
    for turn in range(turns):
        sequence = harness.add(token_ids, max_tokens=6)
        harness.run()
        sequences.append(sequence)
        token_ids = [*sequence.token_ids, 50 + turn, 51 + turn]
    return sequences


@pytest.mark.parametrize(("paged", "expected"), [(True, [0, 8, 16, 24]), (False, [0, 8, 16, 24])])
def test_each_turn_of_a_chat_finds_all_before_it(paged: bool, expected: list[int]) -> None:
    harness = make(paged=paged)
    assert [sequence.num_cached_tokens for sequence in chat(harness, 4)] == expected


def test_a_step_ahead_continues_with_the_token_under_way() -> None:
    harness = make()
    sequence = harness.add([1] * 5, max_tokens=3)
    assert [(row.start, row.num_new_tokens) for row in harness.step(ahead=True).scheduled] == [(0, 5)]
    assert (sequence.num_computed_tokens, sequence.num_in_flight, sequence.num_awaited) == (0, 5, 1)
    assert [(row.start, row.num_new_tokens) for row in harness.step(ahead=True).scheduled] == [(5, 1)]
    assert (sequence.num_computed_tokens, sequence.num_in_flight, sequence.num_awaited) == (5, 1, 1)
    assert sequence.num_output_tokens == 1
    assert harness.step(ahead=True).scheduled[0].start == 6
    # The third token is under way, and whatever it is, it is the last.
    assert harness.step(ahead=True).scheduled == []
    assert sequence.finish_reason == "length"
    harness.check_end()


def test_a_row_scheduled_after_the_last_token_is_passed_over() -> None:
    harness = make()
    sequence = harness.add([3] * 4, stops=True, max_tokens=20)
    num_steps = 0
    while sequence.finish_reason is None:
        assert harness.step(ahead=True).scheduled
        num_steps += 1
    assert sequence.finish_reason == "stop"
    # Of the steps, one was under way when the token came that ended the text.
    assert num_steps == sequence.num_output_tokens + 1
    assert harness.flight is not None
    harness.run(ahead=True)
    harness.check_end()


def test_a_row_from_before_a_preemption_is_passed_over() -> None:
    harness = make()
    sequence, _ = harness.add([1] * 6), harness.add([2] * 6)
    output = harness.schedule()
    sampled = harness.execute(output)
    harness.scheduler._running.preempt(sequence)
    again = harness.schedule()
    assert [row.sequence for row in again.scheduled][-1] is sequence
    assert harness.update(output, sampled).sequences[0] is not sequence
    assert (sequence.num_computed_tokens, sequence.num_output_tokens) == (0, 0)
    harness.update(again, harness.execute(again))
    assert sequence.num_output_tokens == 1


@pytest.mark.parametrize("host", [None, range(0, 100, 2), range(100)])
@pytest.mark.parametrize("paged", [True, False])
def test_texts_are_the_same_a_step_ahead(host: range | None, *, paged: bool) -> None:
    """Those whose tokens are withheld, too, while the next step is scheduled."""
    harness = make(num_blocks=9, seats=4, paged=paged)
    for index in range(12):
        harness.add([index % 3] * (3 + index), max_tokens=9, stops=index % 2 == 0, num_choices=1 + index % 3)
    harness.run(ahead=True, host=host)
    assert harness.scheduler.num_preemptions > 0 or not paged
    harness.check_end()


def test_a_withheld_text_is_in_every_second_step() -> None:
    harness = make(num_blocks=64, budget=64)
    host, other = harness.add([1] * 6, max_tokens=5), harness.add([2] * 6, max_tokens=9)
    steps = []
    while harness.has_work:
        steps.append([row.sequence for row in harness.step(ahead=True, host=[host.seq_id]).scheduled])
    assert steps[:9] == [[host, other], [other]] * 4 + [[host, other]]
    assert not any(steps[9:])  # the last results are taken in
    harness.check_end()


def test_a_step_of_which_some_rows_are_taken_in_first() -> None:
    harness = make(num_blocks=64, budget=64)
    host, other = harness.add([1] * 6), harness.add([2] * 6)
    output = harness.schedule()
    sampled = harness.execute(output)
    harness.scheduler.withhold(output, [0])
    harness.update(output.part([1]), sampled[1:])
    assert [row.sequence for row in harness.schedule().scheduled] == [other]
    harness.update(output.part([0]), sampled[:1])
    assert (host.num_awaited, other.num_awaited) == (0, 1)


@pytest.mark.parametrize("is_preempted", [True, False])
def test_a_withheld_text_that_is_preempted_or_canceled(*, is_preempted: bool) -> None:
    harness = make(num_blocks=64, budget=64)
    host, other = harness.add([1] * 6), harness.add([2] * 6)
    harness.step(ahead=True, host=[host.seq_id])
    if is_preempted:
        harness.scheduler._running.preempt(host)
    else:
        harness.scheduler.finish(host, "canceled")
    again = harness.step(ahead=True, host=[host.seq_id])
    assert [row.sequence for row in again.scheduled] == [other, host][: 1 + is_preempted]
    assert host.num_output_tokens == 0
    harness.run(ahead=True, host=[host.seq_id])
    harness.check_end()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_window_in_the_smallest_pool_that_holds_it(*, ahead: bool) -> None:
    """A step ahead needs blocks that only the step under way lets go."""
    harness = Harness(
        EngineConfig(num_blocks=3, block_size=4, sliding_window=6, max_num_seqs=2, max_num_batched_tokens=8)
    )
    sequence = harness.add([1] * 30, max_tokens=10)
    harness.run(ahead=ahead)
    assert sequence.num_output_tokens == 10
    harness.check_end()


def partly_right(follows: list[int], *, num_right: int, num_wrong: int) -> list[int]:
    return follows[:num_right] + [VOCAB] * num_wrong


def test_right_drafts_are_accepted_and_the_first_wrong_one_ends_it() -> None:
    harness = make(budget=64)
    sequence = harness.add([1, 2, 3], max_tokens=20)
    harness.step()
    for num_right, num_wrong in ((3, 0), (2, 2), (0, 3)):
        before = sequence.num_output_tokens
        guess = partial(partly_right, num_right=num_right, num_wrong=num_wrong)
        harness.draft(guess)
        assert rows(harness) == [(0, 2 + before, 1 + num_right + num_wrong, 1)]
        assert sequence.num_output_tokens == before + num_right + 1
    assert harness.num_drafts_accepted == 5
    harness.run()
    harness.check_end()


def test_drafts_take_what_budget_memory_and_the_text_leave() -> None:
    harness = make(budget=4, num_blocks=3, block_size=4)
    sequence = harness.add([1, 2, 3], max_tokens=7)
    harness.step()
    harness.draft(lambda follows: [VOCAB] * 9)
    assert rows(harness) == [(0, 3, 4, 1)]  # the budget
    harness.draft(lambda follows: follows[:3])
    assert rows(harness) == [(0, 4, 4, 1)]
    assert sequence.num_output_tokens == 6
    harness.draft(lambda follows: [VOCAB])
    assert rows(harness) == [(0, 8, 1, 1)]  # the text's last token needs no draft
    harness.check_end()


def test_while_requests_wait_drafts_take_no_new_block() -> None:
    harness = make(num_blocks=4, block_size=4)
    harness.add([1] * 5, max_tokens=8)
    harness.add([2] * 5, max_tokens=8)
    harness.step()
    harness.draft(lambda follows: [VOCAB] * 6)
    assert rows(harness) == [(0, 5, 3, 1)]  # the other one waits for the blocks that are free
    harness.run()
    harness.check_end()


def test_nobody_waiting_drafts_take_what_is_free() -> None:
    harness = make(num_blocks=6, block_size=4)
    for prompt in ([1] * 5, [2] * 5):
        harness.add(prompt, max_tokens=8)
    harness.step()
    harness.draft(lambda follows: [VOCAB] * 6)
    assert rows(harness) == [(0, 5, 7, 1), (1, 5, 7, 1)]
    harness.draft(lambda follows: [VOCAB] * 6)
    assert rows(harness) == [(0, 6, 6, 1), (1, 6, 6, 1)]
    assert harness.scheduler.num_preemptions == 0


def test_rejected_drafts_are_never_found_in_the_prefix_cache() -> None:
    harness = make(block_size=4)
    sequence = harness.add([1, 2, 3], max_tokens=3)
    harness.step()
    harness.draft(lambda follows: [4] * 6)
    harness.run()
    harness.check_end()
    guessed = [*sequence.token_ids[:4], 4, 4, 4, 4, 4]
    harness.add(guessed, max_tokens=1)
    harness.run()
    harness.check_end()
    assert harness.manager.prefix_hits <= 4


def test_a_text_that_is_being_verified_waits_for_the_result() -> None:
    harness = make()
    harness.add([1, 2, 3], max_tokens=20)
    harness.step()
    harness.draft(lambda follows: follows[:2])
    harness.step(ahead=True)
    assert harness.schedule().scheduled == []
    harness.land()
    harness.run(ahead=True)
    harness.check_end()


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    harness = make(num_blocks=300, budget=16, max_model_len=1000)
    long = [harness.add([1] * 200), harness.add([2] * 200)]
    assert rows(harness) == [(0, 0, 16, 0)]
    harness.add([3, 3, 3], max_tokens=2)
    assert rows(harness) == [(0, 16, 13, 0), (2, 0, 3, 1)]
    assert rows(harness) == [(2, 3, 1, 1), (0, 29, 15, 0)]
    harness.run()
    harness.check_end()
    assert harness.ended == [2, 0, 1]
    assert [sequence.times_passed for sequence in long] == [0, 1]


def test_a_crowd_of_short_prompts_takes_a_quarter_of_the_steps() -> None:
    harness = make(num_blocks=300, budget=16, max_model_len=1000, seats=40)
    harness.add([1] * 200)
    harness.step()
    for prompt in range(60):
        harness.add([prompt % 5, prompt // 5, 1, 2], max_tokens=1)
    computed = [harness.sequences[0].num_computed_tokens]
    while computed[-1] < 200:
        harness.step()
        computed.append(harness.sequences[0].num_computed_tokens)
    gained = [after - before for before, after in itertools.pairwise(computed)]
    assert set(gained[:-1]) == {12}
    assert len(harness.ended) == len(gained) - 1 + 3  # its last 4 tokens left room for three
    harness.run()
    harness.check_end()


def test_a_long_prompt_whose_prefix_is_cached_is_short() -> None:
    harness = make(num_blocks=300, budget=16, max_model_len=1000)
    harness.add([3] * 40, max_tokens=1)
    harness.run()
    harness.add([1] * 200)
    harness.step()
    harness.add([3] * 42, max_tokens=1)
    assert rows(harness) == [(1, 16, 14, 0), (2, 40, 2, 1)]


def test_a_short_prompt_has_no_share_of_one_of_higher_priority() -> None:
    harness = make(num_blocks=300, budget=16, max_model_len=1000)
    harness.add([1] * 40, priority=1)
    harness.step()
    harness.add([3, 3, 3])
    assert rows(harness) == [(0, 16, 16, 0)]
    assert rows(harness) == [(0, 32, 8, 1), (1, 0, 3, 1)]


def test_a_long_prompt_of_low_priority_that_is_overdue_does_not_end_the_share_of_short_ones() -> None:
    harness = make(num_blocks=300, budget=16, max_model_len=1000)
    harness.add([1] * 400, priority=1)
    harness.step()
    low = harness.add([2] * 200)
    low.times_passed = MAX_TIMES_PASSED
    harness.add([3, 3, 3], priority=1)
    assert rows(harness) == [(0, 16, 13, 0), (2, 0, 3, 1)]
    harness.scheduler.finish(low, "canceled")
    short = harness.add([2, 2])
    short.times_passed = MAX_TIMES_PASSED
    assert (3, 0, 2, 1) in rows(harness)


def test_no_budget_is_reserved_for_a_text_that_has_outgrown_its_frequencies() -> None:
    harness = make(num_blocks=6, block_size=3, seats=3, budget=1, max_model_len=28, rope_switch=8)
    low = harness.add([0] * 6, max_tokens=4, priority=-1)
    harness.add([0] * 6, max_tokens=4)
    harness.step(ahead=True)
    low.times_passed = MAX_TIMES_PASSED
    harness.run(ahead=True)  # each step has a row: the harness checks it
    harness.check_end()


def test_a_short_prompt_that_the_memory_cannot_hold_waits_without_being_preempted() -> None:
    harness = make(num_blocks=14, budget=16, max_model_len=60)
    harness.add([1] * 50, max_tokens=4)
    harness.step()
    harness.step()
    for _ in range(3):
        harness.add([3, 3, 3], max_tokens=3)
    harness.run()
    harness.check_end()
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("times_passed", [0, MAX_TIMES_PASSED])
def test_short_prompts_pass_one_that_waits_for_its_share_but_not_one_that_waits_for_memory(times_passed: int) -> None:
    harness = make(num_blocks=60, budget=16, max_model_len=240)
    harness.add([1] * 100)
    harness.step()
    waiting = harness.add([2] * 100)
    waiting.times_passed = times_passed
    harness.add([3, 3])
    assert {row[0] for row in rows(harness)} == {0, 2}
    too_large = harness.add([4] * 200)
    harness.scheduler.finish(waiting, "canceled")
    too_large.times_passed = times_passed
    harness.add([3, 4])
    assert {row[0] for row in rows(harness)} == ({0, 2} if times_passed else {0, 2, 4})


def test_a_prompt_beside_texts_is_cut_by_the_times_of_steps() -> None:
    """A step without prompts takes 2 ms, and so much the tokens of a chunk may take twice over."""
    harness = make(num_blocks=400, budget=200, max_slowdown=3.0)
    harness.token_seconds = 1e-4
    text = harness.add([1], max_tokens=100)
    for _ in range(4):
        rows(harness)
    harness.add([2] * 300, max_tokens=1)
    chunks = [[row[2] for row in rows(harness)] for _ in range(9)]
    assert [chunk[0] for chunk in chunks] == [1] * 9, "the text gets a token in every step"
    lengths = [chunk[1] for chunk in chunks if len(chunk) > 1]
    assert lengths[0] == FIRST_CHUNK
    assert all(length == pytest.approx(42, abs=6) for length in lengths[1:-1])
    # Nobody else waits for tokens now: the budget is the steps'.
    harness.scheduler.finish(text, "canceled")
    harness.add([3] * 300, max_tokens=1)
    while harness.sequences[1].status is SequenceStatus.RUNNING:
        rows(harness)
    assert max(row[2] for row in rows(harness)) > 90
    harness.run()
    harness.check_end()


@pytest.mark.parametrize("ahead", [False, True])
def test_texts_are_the_same_whatever_the_steps_take(*, ahead: bool) -> None:
    results = set()
    for slowdown, seconds in ((0.0, 1e-3), (1.1, 1e-3), (3.0, 1e-5), (3.0, 1e-2)):
        harness = make(num_blocks=60, budget=48, max_slowdown=slowdown)
        harness.token_seconds = seconds
        for index in range(7):
            harness.add([index, *range(5 + 11 * index)], max_tokens=9 + index)
        for _ in range(5):
            harness.step(ahead=ahead)
            harness.token_seconds *= 1.5
        harness.add([9] * 90)
        harness.run(ahead=ahead)
        harness.check_end()
        results.add(str([sequence.output_token_ids for sequence in harness.sequences.values()]))
    assert len(results) == 1


def test_a_prompt_that_is_pinned_gets_no_drafts() -> None:
    """Whoever proposes them would follow it for as long as it is pinned."""
    harness = Harness(EngineConfig(num_blocks=16, block_size=4, max_num_batched_tokens=8, max_model_len=32))
    pinned = harness.add(list(range(9)), is_pinned=True)
    harness.step()
    assert pinned.num_computed_tokens == 8
    assert harness.scheduler.decoding == []
    harness.step()
    assert pinned.status is SequenceStatus.PINNED
    harness.release_pins()
    harness.check_end()
