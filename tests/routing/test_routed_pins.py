"""Prefixes that are pinned in several engines at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

import tiny
from paged_sdk import EngineDeadError, PinLimitError, ReplicaSet
from paged_sdk.routing.replica import Replica
from paged_sdk.routing.replica_set import ReplicatedModel
from paged_sdk.routing.waiting_room import WaitingRoom
from paged_sdk.testing import fake_model
from pinning import BLOCK, MESSAGES, SYSTEM, answer, asked, cached, fill, pooled
from talk import said, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("elsewhere"))


async def test_every_replica_holds_it(checkpoint: Path) -> None:
    async with ReplicaSet([pooled(checkpoint)] * 2) as model:
        async with await model.pin(MESSAGES) as pin:
            assert [each.blocks_pinned * BLOCK for each in model.replica_stats()] == [pin.num_tokens] * 2
            assert model.stats().blocks_pinned * BLOCK == 2 * pin.num_tokens
            for replica in model.replicas:
                await fill(replica)
            found = [await cached(model, asked(str(number))) for number in range(4)]
            assert found == [pin.num_tokens] * 4
            computed = [each.prompt_tokens for each in model.replica_stats()]
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(answer, model, asked(f"At once, {number}?"))
            assert all(new.prompt_tokens > old for new, old in zip(model.replica_stats(), computed, strict=True))
        assert model.stats().blocks_pinned == 0


async def test_a_replica_without_room_for_it_is_left_out(checkpoint: Path) -> None:
    small = pooled(checkpoint, tokens=256)  # 64 blocks
    large = pooled(checkpoint)
    async with ReplicaSet([small, large]) as model:
        first = await model.pin(MESSAGES)
        second = await model.pin([{"role": "system", "content": f"Another. {SYSTEM}"}])
        assert [each.blocks_pinned < 2 * first.num_tokens // BLOCK for each in model.replica_stats()] == [True, False]
        third = await model.pin([{"role": "system", "content": f"A third. {SYSTEM}"}])
        with pytest.raises(PinLimitError):
            await model.pin([{"role": "system", "content": f"A fourth. {SYSTEM}"}])
        for pin in (first, second, third):
            await pin.aclose()
        assert model.stats().blocks_pinned == 0


async def test_it_outlives_replicas_and_comes_to_new_ones() -> None:
    dying = fake_model("x", error=RuntimeError("the device is gone"))
    living, joining = fake_model("Still here."), fake_model("Here, too.")
    async with joining, ReplicaSet([dying, living]) as model:
        pin = await model.pin(MESSAGES)
        num_blocks = living.stats().blocks_pinned
        assert num_blocks == dying.stats().blocks_pinned > 0
        with pytest.raises(EngineDeadError):
            await said(dying)
        assert not pin.is_released
        number = model._routed.add(Replica(joining._insides.worker, joining._insides.adapters, 4096))
        await until(lambda: joining.stats().blocks_pinned == num_blocks)
        model._routed.remove(number)
        await until(lambda: joining.stats().blocks_pinned == 0)
        assert living.stats().blocks_pinned == num_blocks
        await pin.aclose()
        assert living.stats().blocks_pinned == 0


async def test_the_last_replica_takes_it_along() -> None:
    dying = fake_model("x", error=RuntimeError("the device is gone"))
    async with ReplicaSet([dying]) as model:
        pin = await model.pin(MESSAGES)
        with pytest.raises(EngineDeadError):
            await said(dying)
        await until(lambda: pin.is_released)
        await pin.aclose()
        with pytest.raises(EngineDeadError):
            await model.pin(MESSAGES)


async def test_where_replicas_are_replaced_it_waits_for_the_next() -> None:
    """As under Ray Serve, which may end all replicas and start others."""
    first, second = fake_model("One."), fake_model("Two.")
    room: WaitingRoom[Any] = WaitingRoom(60, lambda seconds, act: None, limit=4)
    async with first, second:
        model = ReplicatedModel([first], waiting=room)
        pin = await model.pin(MESSAGES)
        model._routed.remove(0)
        await until(lambda: first.stats().blocks_pinned == 0)
        assert not pin.is_released
        model._routed.add(Replica(second._insides.worker, second._insides.adapters, 4096))
        await until(lambda: second.stats().blocks_pinned > 0)
        model._routed.remove(1)
        await until(lambda: second.stats().blocks_pinned == 0)
        assert not pin.is_released
        with anyio.fail_after(20):
            await pin.aclose()
        model._routed.add(Replica(first._insides.worker, first._insides.adapters, 4096))
        assert await said(model) == "One."
        assert first.stats().blocks_pinned == 0
        await model.aclose()
