"""A session is over as soon as its client has gone, and leaves nothing to the event loop's end."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest

from paged_sdk.ray.sessions import Sessions
from paged_sdk.testing import fake_model


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_whoever_closes_a_stream_of_parcels_closes_all_that_it_is_made_of() -> None:
    left_to_the_loop: list[AsyncGenerator[Any, Any]] = []
    hooks = sys.get_asyncgen_hooks()
    async with fake_model("Hello!") as model:
        sys.set_asyncgen_hooks(finalizer=left_to_the_loop.append)
        try:
            said = Sessions("a", model._insides).listen("1", "a")
            assert len(await anext(said)) == 1  # what describes the model
            await anyio.wait_all_tasks_blocked()
            await said.aclose()
            del said
            gc.collect()
        finally:
            sys.set_asyncgen_hooks(*hooks)
    assert [repr(each) for each in left_to_the_loop] == []
