"""Images are encoded in the order of their sequences, once each, within a bound of memory, at a pace."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Tokens

import numpy as np
import pytest
from attrs import evolve

from paged_sdk.config.engine import EngineConfig
from paged_sdk.errors import RequestFailedError
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.runner.image_queue import AbandonedError, ImageQueue
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from paged_sdk.types.media import ImageSpan, PromptMedia
from sequences import make_sequence

IMAGE_TOKENS = 4


def with_images(seq_id: int, names: Tokens[bytes], *, priority: int = 0) -> Sequence:
    """Make a sequence of images and a last token; an image has four tokens."""
    spans = tuple(
        ImageSpan(
            first_token=index * IMAGE_TOKENS,
            num_tokens=IMAGE_TOKENS,
            places=np.arange(index * IMAGE_TOKENS, (index + 1) * IMAGE_TOKENS),
            digest=name,
            inputs={},
        )
        for index, name in enumerate(names)
    )
    plain = make_sequence(seq_id, [seq_id + 2] * (len(names) * IMAGE_TOKENS + 1), priority=priority)
    return Sequence(seq_id, evolve(plain.request, media=PromptMedia(spans=spans)))


def encode_next(queue: ImageQueue[str]) -> str:
    span = queue.next()
    assert span is not None
    name = span.digest.decode()
    queue.done(name)
    return name


def test_order_and_sharing() -> None:
    queue = ImageQueue[str](1)
    called: list[int] = []
    queue.on_ready = lambda: called.append(1)
    first, second, third = (
        with_images(0, [b"a", b"b"]),
        with_images(1, [b"b", b"c"]),
        with_images(2, [b"d"], priority=1),
    )
    assert not queue.ask(first, 0)
    assert not queue.ask(second, 0)
    assert encode_next(queue) == "a"
    assert not queue.ask(third, 0)
    assert encode_next(queue) == "d"  # of a higher priority
    assert queue.take_ready() == [third]
    assert encode_next(queue) == "b"
    assert queue.take_ready() == [first]
    assert encode_next(queue) == "c"  # the other of the second's was there
    assert queue.take_ready() == [second]
    assert not queue.has_ready
    assert len(called) == 3
    assert [queue.take(each) for each in (b"a", b"b", b"c", b"d")] == ["a", "b", "c", "d"]
    late = with_images(3, [b"d", b"a"])
    assert queue.ask(late, 0)
    assert queue.ask(with_images(4, [b"z"]), IMAGE_TOKENS)  # its image lies in the prefix that is there


def test_memory_is_bounded_and_nobody_starves() -> None:
    queue = ImageQueue[str](10, most_bytes=100)  # two images and a half
    large = [with_images(seq_id, [b"%d" % seq_id, b"%d+" % seq_id]) for seq_id in range(3)]
    for sequence in large:
        assert not queue.ask(sequence, 0)
    same, small = with_images(3, [b"0"]), with_images(4, [b"small"])
    assert not queue.ask(same, 0)
    assert not queue.ask(small, 0)
    assert [encode_next(queue), encode_next(queue)] == ["0", "0+"]
    assert queue.take_ready() == [same, large[0]]  # the former needs no memory of its own
    queue.let_go(0)
    queue.let_go(3)
    assert [encode_next(queue), encode_next(queue)] == ["1", "1+"]  # not the small one, which came later
    queue.let_go(1)
    assert [encode_next(queue), encode_next(queue)] == ["2", "2+"]
    assert queue.take_ready() == large[1:]
    with pytest.raises(KeyError):
        queue.take(b"0")  # made room
    huge = with_images(5, [b"%d" % index for index in range(10, 20)])
    assert not queue.ask(huge, 0)  # larger than the bound: it gets its turn when nobody else has memory
    queue.let_go(2)
    assert encode_next(queue) == "small"
    queue.let_go(4)
    assert [encode_next(queue) for _ in range(10)] == [str(index) for index in range(10, 20)]
    assert queue.take_ready() == [small, huge]


def test_what_failed_is_tried_again_for_others() -> None:
    queue = ImageQueue[str](1)
    one, two, later = (with_images(seq_id, [b"a"]) for seq_id in range(3))
    assert not queue.ask(one, 0)
    assert not queue.ask(two, 0)
    queue.next()
    queue.done(error=RuntimeError("broken"))
    assert queue.take_ready() == [one, two]
    errors = []
    for sequence in (one, two):
        with pytest.raises(RequestFailedError, match="broken") as caught:
            queue.take(b"a")
        errors.append(caught.value)
        queue.let_go(sequence.seq_id)
    assert errors[0] is not errors[1]
    assert not queue.ask(later, 0)
    assert encode_next(queue) == "a"


def test_an_image_that_nobody_wants_any_more_is_abandoned() -> None:
    queue = ImageQueue[str](1)
    one, two = with_images(0, [b"a"]), with_images(1, [b"a"])
    assert not queue.ask(one, 0)
    assert not queue.ask(two, 0)
    queue.next()
    queue.let_go(0)
    queue.wait_for_turn()
    queue.let_go(1)
    with pytest.raises(AbandonedError):
        queue.wait_for_turn()
    queue.done()
    again = with_images(2, [b"a"])
    assert not queue.ask(again, 0)
    queue.next()
    queue.close()
    with pytest.raises(AbandonedError):
        queue.wait_for_turn()
    queue.done()
    assert queue.next() is None


class WatchedCondition(threading.Condition):
    """Tells when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


@pytest.mark.parametrize(("max_slowdown", "between"), [(1.5, 1), (1.25, 3), (1.2, 4), (2.0, 0), (3.0, 0), (0.0, 0)])
def test_texts_keep_their_pace_beside_an_encoder(max_slowdown: float, between: int) -> None:
    """With a step beside each part of an encoder and n without, tokens take (2 + n) / (1 + n) times as long."""
    queue = ImageQueue[str](1, max_slowdown=max_slowdown)
    queue._changed = changed = WatchedCondition()
    assert not queue.ask(with_images(0, [b"a"]), 0)
    queue.next()
    for _ in range(3):
        changed.is_awaited.clear()
        queue.note_step(5)  # while a part is computed
        part = threading.Thread(target=queue.wait_for_turn)
        part.start()
        assert not between or changed.is_awaited.wait(60)  # it knows of the steps before
        for _ in range(between):
            assert part.is_alive()  # it cannot go on before the last of these steps
            queue.note_step(5)
        part.join()
    for _ in range(10):
        queue.note_step(5)
    queue.note_step(0)  # no texts: nobody to wait for
    queue.wait_for_turn()


def scheduler_with(queue: ImageQueue[str], num_blocks: int = 32) -> tuple[Scheduler, KvCacheManager]:
    kv = KvCacheManager(num_blocks, 4)
    config = EngineConfig(num_blocks=num_blocks, block_size=4, max_num_seqs=2, max_num_batched_tokens=32)
    return Scheduler(config, kv, queue), kv


def scheduler_step(scheduler: Scheduler) -> list[ScheduledSequence]:
    output = scheduler.schedule()
    scheduler.update(output, [[9]] * len(output.scheduled))
    return output.scheduled


def test_a_scheduler_goes_on_beside_images() -> None:
    queue = ImageQueue[str](1)
    scheduler, kv = scheduler_with(queue)
    image, text, other = with_images(0, [b"a"]), make_sequence(1, [1] * 5), with_images(2, [b"b"])
    for sequence in (image, text, other):
        scheduler.add(sequence)
    assert image.status is other.status is SequenceStatus.AWAITING_IMAGES
    assert (scheduler.num_waiting, scheduler.num_awaiting_images) == (3, 2)
    assert not scheduler.is_stalled
    for _ in range(12):
        assert [row.sequence for row in scheduler_step(scheduler)] == [text]
    assert text.status is SequenceStatus.FINISHED
    assert kv.usage.used == 0  # those that wait hold nothing
    assert not scheduler_step(scheduler)
    assert scheduler.is_stalled
    encode_next(queue)
    assert not scheduler.is_stalled
    assert [row.sequence for row in scheduler_step(scheduler)] == [image]
    scheduler.finish(other, "canceled")
    assert scheduler.num_waiting == 0
    scheduler.finish(image, "canceled")
    assert not queue.is_wanted_by(0)
    assert not queue.is_wanted_by(2)


def test_an_image_whose_prefix_is_gone_is_encoded_again() -> None:
    queue = ImageQueue[str](1, most_bytes=1)
    scheduler, kv = scheduler_with(queue)
    first = with_images(0, [b"a"])
    scheduler.add(first)
    encode_next(queue)
    while first.status is not SequenceStatus.FINISHED:
        scheduler_step(scheduler)
    blockers = [make_sequence(seq_id, [7, seq_id]) for seq_id in (10, 11)]
    for sequence in blockers:
        scheduler.add(sequence)
    scheduler_step(scheduler)
    second = Sequence(1, first.request)
    scheduler.add(second)
    assert second.status is SequenceStatus.WAITING  # for a seat: its image lies in the prefix cache
    kv.reset_prefix_cache()
    third = with_images(2, [b"c"])
    scheduler.add(third)  # its image takes the memory of the first's
    encode_next(queue)
    scheduler.finish(third, "canceled")
    while any(sequence.status is SequenceStatus.RUNNING for sequence in blockers):
        scheduler_step(scheduler)
    scheduler_step(scheduler)
    assert scheduler.num_awaiting_images == scheduler.num_waiting == 1
    assert encode_next(queue) == "a"
    assert second in [row.sequence for row in scheduler_step(scheduler)]
