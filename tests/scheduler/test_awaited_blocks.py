"""Sequences wait for stored blocks, and continue with what could be read."""

from __future__ import annotations

import random

import pytest
from fake_model import Harness

from fake_store import FakeStore
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.scheduler.sequence import SequenceStatus

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0]


def harness(*, num_blocks: int = 12, seats: int = 4, limit: int = 8, window: int | None = None) -> Harness:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=3,
        max_num_seqs=seats,
        max_num_batched_tokens=8,
        max_model_len=28,
        sliding_window=window,
    )
    return Harness(config, store=FakeStore(block_size=3, limit=limit))


def store_of(own: Harness) -> FakeStore:
    assert own.store is not None
    return own.store


def after_a_restart(own: Harness, prompt: list[int] = PROMPT) -> None:
    """Store a prompt's blocks, and forget them in the pool."""
    own.add(prompt, max_tokens=1)
    own.run()
    own.manager.reset_prefix_cache()


def test_a_prompt_is_read_instead_of_computed() -> None:
    own = harness()
    after_a_restart(own)
    before = own.num_prompt_tokens_computed
    again = own.add(PROMPT, max_tokens=3)
    own.step()
    assert again.status is SequenceStatus.AWAITING_BLOCKS
    assert own.scheduler.num_waiting == 1
    own.run()
    assert own.num_prompt_tokens_computed - before == 1
    assert again.num_cached_tokens == own.manager.prefix_restored == 12
    own.check_end()


def test_a_running_sequence_goes_on_meanwhile() -> None:
    own = harness()
    after_a_restart(own)
    other = own.add([0, 0, 0], max_tokens=9)
    own.step()
    again = own.add(PROMPT, max_tokens=3)
    for _ in range(4):
        own.step()
    assert (again.status, other.status) == (SequenceStatus.AWAITING_BLOCKS, SequenceStatus.RUNNING)
    assert other.num_output_tokens == 5
    assert not own.scheduler.is_stalled
    store_of(own).answer()
    own.step()
    assert again.status is SequenceStatus.RUNNING
    own.run()
    own.check_end()


def test_prompts_that_share_blocks_read_them_once() -> None:
    own = harness()
    after_a_restart(own)
    several = [own.add([*PROMPT, tail], max_tokens=2) for tail in (0, 1, 1)]
    own.step()
    assert len(store_of(own).to_read) <= 1
    own.run()
    assert store_of(own).num_reads == 1
    assert [each.num_cached_tokens for each in several] == [12, 12, 12]
    own.check_end()


def test_a_long_prompt_is_read_in_parts() -> None:
    own = harness(limit=1)
    after_a_restart(own)
    again = own.add(PROMPT, max_tokens=2)
    own.run()
    assert store_of(own).num_reads == 4
    assert again.num_cached_tokens == 12
    own.check_end()


def test_what_cannot_be_read_is_computed() -> None:
    own = harness()
    after_a_restart(own)
    again = own.add(PROMPT, max_tokens=2)
    own.step()  # asks for the blocks, and the store answers nothing: it has lost them
    store_of(own).content.clear()
    store_of(own).ready.clear()
    store_of(own).ready.append({})
    own.run()
    assert again.num_cached_tokens == 0
    assert again.finish_reason is not None
    own.check_end()


def test_a_store_that_cannot_read_is_asked_once() -> None:
    own = harness(limit=0)
    after_a_restart(own)
    again = own.add(PROMPT, max_tokens=2)
    own.run(max_steps=50)
    assert (again.num_cached_tokens, store_of(own).num_reads) == (0, 1)
    own.check_end()


def test_a_seat_is_kept_while_blocks_are_read() -> None:
    own = harness(seats=1)
    after_a_restart(own)
    again, later = own.add(PROMPT, max_tokens=3), own.add([0, 0, 1], max_tokens=3)
    assert not own.scheduler.schedule().scheduled
    assert not own.scheduler.schedule().scheduled
    assert (again.status, later.status) == (SequenceStatus.AWAITING_BLOCKS, SequenceStatus.WAITING)
    assert own.scheduler.is_stalled
    own.scheduler.finish(again, "canceled")
    assert not own.scheduler.is_stalled
    assert [row.sequence for row in own.schedule().scheduled] == [later]
    assert len(store_of(own).to_read) == 1


def test_nothing_is_read_before_there_is_memory_for_it() -> None:
    own = harness(num_blocks=8)
    after_a_restart(own)
    running = own.add([0] * 10, max_tokens=12)
    own.step()
    again = own.add(PROMPT, max_tokens=3)
    while running.num_output_tokens < 6:
        own.step()
    assert store_of(own).num_reads == 0
    assert again.status is SequenceStatus.WAITING
    own.run()
    assert store_of(own).num_reads == 1
    assert again.num_cached_tokens == 12
    own.check_end()


@pytest.mark.parametrize("are_early", [False, True])
def test_prompts_that_come_at_once_do_not_displace_each_other(are_early: bool) -> None:
    """The memory is that of two of them, and all answers may come before the first is admitted."""
    own = harness(num_blocks=14, seats=6)
    prompts = [[first, second, *PROMPT[2:]] for first in (0, 1, 2) for second in (0, 1)]
    for prompt in prompts:
        after_a_restart(own, prompt)
    several = [own.add(prompt, max_tokens=8) for prompt in prompts]
    while own.has_work or own.flight is not None:
        own.step()
        while are_early and store_of(own).to_read:
            store_of(own).answer()
    assert [each.num_cached_tokens for each in several] == [12] * 6
    own.check_end()


def test_a_read_that_nobody_waits_for_still_serves_the_next() -> None:
    own = harness()
    after_a_restart(own)
    first = own.add(PROMPT, max_tokens=3)
    own.schedule()
    own.scheduler.finish(first, "canceled")
    second = own.add(PROMPT, max_tokens=3)
    own.run()
    assert second.num_cached_tokens == 12
    assert store_of(own).num_reads == 1
    own.check_end()


def test_a_salted_prompt_reads_only_its_own() -> None:
    own = harness()
    after_a_restart(own)
    other = own.add(PROMPT, max_tokens=2, cache_keys=(CacheKey(b"salt"),))
    own.run()
    assert (other.num_cached_tokens, store_of(own).num_reads) == (0, 0)
    own.check_end()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(6))
def test_texts_are_right_whatever_is_read_and_lost(seed: int, window: int | None) -> None:
    """Prompts of a few families come, go and come back, on a pool that forgets, with a store that answers late."""
    generator = random.Random(seed)
    own = harness(num_blocks=9, limit=generator.choice([1, 2, 8]), window=window)
    bases = [[generator.randint(0, 1) for _ in range(15)] for _ in range(4)]
    for _ in range(250):
        match generator.randint(0, 9):
            case 0 | 1 | 2:
                base = generator.choice(bases)[: generator.randint(4, 15)]
                own.add(
                    base + [generator.randint(0, 1) for _ in range(generator.randint(0, 3))],
                    max_tokens=generator.randint(1, 6),
                    num_choices=generator.choice([1, 1, 2]),
                    priority=generator.choice([0, 0, 1]),
                )
            case 3:
                own.manager.reset_prefix_cache()
            case 4:
                store_of(own).answer()
            case 5 if store_of(own).content and generator.random() < 0.5:
                del store_of(own).content[generator.choice(sorted(store_of(own).content))]
            case 6 if own.sequences and generator.random() < 0.3:
                own.scheduler.finish(generator.choice(list(own.sequences.values())), "canceled")
            case _:
                own.step(ahead=generator.random() < 0.5, host=generator.choice([None, range(0, 1000, 2)]))
    own.run()
    assert own.manager.prefix_restored > 60
    own.check_end()
