"""Measure the router's cost: time per request, and memory when it remembers the maximum number of prefixes.

    python -m benchmarks.router_cost

Prompts have 2,048 tokens in 64 blocks: 40 of one of 100 tenants, and 24 new ones. A request is routed, starts, and
ends. Each figure is the median over many requests, and the best of three runs.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections import deque
from random import Random

from paged_sdk.kv.block_hash import block_hashes
from paged_sdk.routing import Route, Router

REQUESTS = 5_000


def microseconds(replicas: int) -> float:
    """Return the median time per request with a number of replicas."""
    rng, router = Random(1), Router([4096] * replicas)
    tenants = [[rng.randbytes(32) for _ in range(40)] for _ in range(100)]
    live: deque[Route] = deque()
    seconds = []
    for _ in range(REQUESTS):
        hashes = tenants[rng.randrange(100)] + [rng.randbytes(32) for _ in range(24)]
        start = time.perf_counter()
        route = router.route(hashes, 2048)
        assert route is not None
        live.append(route)
        if len(live) > min(20 * replicas, REQUESTS // 2):
            ended = live.popleft()
            router.started(ended)
            router.finished(ended, 100)
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def megabytes() -> tuple[float, int]:
    """Return the megabytes of a full router, and how many prefixes it remembers."""
    rng = Random(1)
    tenants = [[rng.randbytes(32) for _ in range(16)] for _ in range(500)]
    tracemalloc.start()
    router = Router([10**6] * 64)
    for _ in range(16_000):
        route = router.route(tenants[rng.randrange(500)] + [rng.randbytes(32) for _ in range(48)], 2048)
        assert route is not None
        router.finished(route, 300)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / 2**20, router.num_entries


def main() -> None:
    rng = Random(1)
    tokens = [rng.randrange(150_000) for _ in range(2048)]
    times = []
    for _ in range(300):
        start = time.perf_counter()
        block_hashes(tokens, 32)
        times.append(time.perf_counter() - start)
    print(f"naming the 64 blocks of a prompt: {1e6 * statistics.median(times):.0f} us")
    for replicas in (2, 4, 64, 1_000, 10_000):
        print(f"{replicas:6} replicas: {min(microseconds(replicas) for _ in range(3)):.0f} us a request")
    used, entries = megabytes()
    print(f"{entries} prefixes: {used:.0f} MB")


if __name__ == "__main__":
    main()
