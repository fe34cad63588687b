"""The benchmark of what the server adds finds something to measure."""

from __future__ import annotations

import anyio
import pytest
from benchmarks.server_overhead import Overhead, measure

from paged_sdk.testing import fake_model


def test_both_ways_are_measured() -> None:
    async def main() -> Overhead:
        async with fake_model("abcd") as model:
            return await measure(model, streams=2, tokens=3, rounds=1, firsts=2)

    found = anyio.run(main)
    assert len(found.first_in_process) == len(found.first_served) == 2
    assert min(*found.in_process, *found.served, *found.first_in_process, *found.first_served) > 0
    assert found.without_client >= found.served
    assert found.share < 1


def test_what_is_added() -> None:
    found = Overhead(
        in_process=(10.0, 20.0, 30.0),
        served=(15.0, 17.0, 19.0),
        without_client=(16.0, 18.0, 20.0),
        first_in_process=(0.1, 0.2),
        first_served=(0.153, 0.153),
    )
    assert found.share == pytest.approx(0.1)
    assert found.added_ms == pytest.approx(3.0)
