"""Prefixes that are pinned in an engine elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback import remotely

import tiny
from pinning import BLOCK, MESSAGES, cached, fill, pooled
from talk import until

pytestmark = pytest.mark.anyio


async def test_an_engine_elsewhere_holds_it(tmp_path: Path) -> None:
    own = await pooled(tiny.make_checkpoint("llama", tmp_path)).build()
    async with remotely(own) as (model, _):
        async with await model.pin(MESSAGES) as pin:
            await until(lambda: model.stats().blocks_pinned * BLOCK == pin.num_tokens)
            assert own.stats().blocks_pinned == model.stats().blocks_pinned
            await fill(own)
            assert await cached(model) == pin.num_tokens >= 100
        assert pin.is_released
        assert own.stats().blocks_pinned == 0
        left = await model.pin(MESSAGES)
    await until(lambda: left.is_released)
