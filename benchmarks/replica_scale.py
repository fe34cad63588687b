"""Simulate chats of many tenants on 1 to 10,000 replicas: hit rates, tail latencies, deaths of replicas, router cost.

    python -m benchmarks.replica_scale hits          ways of routing: four replicas against one big cache
    python -m benchmarks.replica_scale rates         how many chats one replica can serve
    python -m benchmarks.replica_scale size 64       64 replicas with 64 times the tenants and 62 times the chats
    python -m benchmarks.replica_scale size 64 --queues
    python -m benchmarks.replica_scale deaths 100    one in a hundred dies

Replicas run the real scheduler and block manager on a simulated clock; ``--queues`` replaces them by queues with the
same costs. The router is the real one. Everything is seeded, so figures are the same on any machine, except for the
router's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import count
from typing import Annotated, Final

import typer
from attrs import frozen

from benchmarks.replica_sim import BLOCK_SIZE, MOST_TEXTS, Engine, Queue, Simulation, Turn
from benchmarks.replica_trace import QWEN, ChatRules, chats
from paged_sdk.routing import Router

__all__ = ["Figures", "simulate"]

app = typer.Typer(add_completion=False, help=__doc__)

TENANTS: Final = 8
"""Tenants per replica."""
BLOCKS: Final = 2048
"""Blocks per replica: 65,536 tokens, which take 1.9 GB with Qwen2.5-1.5B."""


@frozen(kw_only=True)
class Figures:
    """Holds the figures of a simulation, without its first third. Times are in seconds.

    :ivar tokens_per_second: generated tokens of all replicas
    :ivar hit_rate: fraction of prompt tokens found in a prefix cache
    :ivar pace_p99: 99th percentile over answers of the mean time between tokens
    :ivar router_us: CPU time of the router per turn, in microseconds
    """

    turns: int
    tokens_per_second: float
    hit_rate: float
    first_p50: float
    first_p99: float
    pace_p99: float
    router_us: float
    num_lost: int

    def row(self, name: str, replicas: int) -> str:
        """Return a line of a table."""
        hours = replicas * 1e6 / self.tokens_per_second / 3600
        return (
            f"| {name} | {self.turns:,} | {self.tokens_per_second:,.1f} | {100 * self.hit_rate:.1f} | "
            f"{self.first_p50:.2f} / {self.first_p99:.2f} | {1e3 * self.pace_p99:.0f} | {hours:.1f} | "
            f"{self.router_us:.0f} | {self.num_lost} |"
        )


HEADER: Final = (
    "| | turns | tokens/s | hits, % | first token, p50 / p99, s | between tokens, p99, ms | "
    "replica hours per million tokens | router, us a turn | lost |\n|---|---|---|---|---|---|---|---|---|"
)


def simulate(
    replicas: int,
    rate: float,
    seconds: float,
    *,
    tenants: int,
    num_blocks: int = BLOCKS,
    speed: float = 1.0,
    max_num_seqs: int = MOST_TEXTS,
    queues: bool = False,
    policy: Callable[[int], int] | None = None,
    deaths: Sequence[int] = (),
    seed: int = 1,
) -> Figures:
    """Simulate chats on replicas.

    :param rate: chats that begin per second, in total
    :param deaths: numbers of the replicas that die after two thirds of the time
    """
    router = Router([num_blocks] * replicas, block_size=BLOCK_SIZE)
    simulation = Simulation(router, policy)
    simulation.replicas = [
        Queue(simulation, QWEN, num_blocks=num_blocks)
        if queues
        else Engine(simulation, QWEN, num_blocks=num_blocks, speed=speed, max_num_seqs=max_num_seqs)
        for _ in range(replicas)
    ]
    if deaths:
        simulation.after(seconds * 2 / 3, lambda: simulation.kill(deaths))
    simulation.run(chats(ChatRules(tenants=tenants, chats_per_second=rate), seconds, seed=seed), seconds)
    return _figures(simulation, seconds)


def _figures(simulation: Simulation, seconds: float) -> Figures:
    begin = seconds / 3
    counted = [turn for turn in simulation.turns if turn.arrived_at >= begin]
    # A turn without a first token has waited at least this long.
    first = [(seconds if turn.first_at is None else turn.first_at) - turn.arrived_at for turn in counted]
    begun = [turn for turn in counted if turn.first_at is not None]
    ended = [turn for turn in simulation.turns if turn.ended_at is not None and turn.ended_at >= begin]
    return Figures(
        turns=len(counted),
        tokens_per_second=sum(turn.num_answer for turn in ended) / (seconds - begin),
        hit_rate=sum(turn.num_cached for turn in begun) / max(sum(turn.num_prompt for turn in begun), 1),
        first_p50=statistics.median(first),
        first_p99=_p99(first),
        pace_p99=_p99([_pace(turn) for turn in ended if turn.num_answer > 1]),
        router_us=1e6 * simulation.router_seconds / len(simulation.turns),
        num_lost=simulation.num_lost,
    )


def _pace(turn: Turn) -> float:
    assert turn.first_at is not None
    assert turn.ended_at is not None
    return (turn.ended_at - turn.first_at) / (turn.num_answer - 1)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


@app.command()
def hits(rate: float = 0.6, seconds: float = 900.0, tenants: int = 32) -> None:
    """Compare ways of routing to four replicas with one replica that is four times as fast and large."""
    print(HEADER)
    big = simulate(1, rate, seconds, tenants=tenants, num_blocks=4 * BLOCKS, speed=4.0, max_num_seqs=128)
    print(big.row("one big cache", 4))
    turn = count()
    policies: dict[str, Callable[[int], int] | None] = {"router": None, "in turn": lambda num: next(turn) % num}
    for name, policy in policies.items():
        figures = simulate(4, rate, seconds, tenants=tenants, policy=policy)
        print(figures.row(name, 4), f"{100 * figures.hit_rate / big.hit_rate:.1f} % of one big cache's hits")


@app.command()
def rates(
    values: Annotated[list[float] | None, typer.Argument()] = None, replicas: int = 1, seconds: float = 1800.0
) -> None:
    """Show one replica's figures at several rates of chats."""
    print(HEADER)
    for rate in values or (0.10, 0.14, 0.18, 0.22):
        figures = simulate(replicas, rate * replicas, seconds, tenants=TENANTS * replicas)
        print(figures.row(f"{rate:.2f} chats/s each", replicas), flush=True)


@app.command()
def size(replicas: int, rate: float = 0.15, seconds: float = 600.0, queues: bool = False) -> None:
    """Show the figures of a number of replicas at a rate of chats per replica."""
    print(HEADER)
    figures = simulate(replicas, rate * replicas, seconds, tenants=TENANTS * replicas, queues=queues)
    print(figures.row(f"{replicas:,} replicas", replicas))


@app.command()
def deaths(replicas: int, rate: float = 0.15, seconds: float = 600.0, queues: bool = False) -> None:
    """Let one replica in a hundred die after two thirds of the time."""
    print(HEADER)
    dead = range(0, replicas, 100)
    figures = simulate(replicas, rate * replicas, seconds, tenants=TENANTS * replicas, queues=queues, deaths=dead)
    print(figures.row(f"{replicas:,} replicas, {len(dead)} die", replicas))


if __name__ == "__main__":
    app()
