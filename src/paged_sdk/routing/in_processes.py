"""Build replicas in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
from attrs import frozen

from paged_sdk.calls.preparation import RequestPreparer
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.logs import show_logs
from paged_sdk.remote.process import BuildReply, EngineProcess, ProcessModel
from paged_sdk.system.processors import numa_nodes, usable_processors
from paged_sdk.system.threads import in_own_thread

__all__ = ["Seat", "build_in_processes", "seats_of"]


async def build_in_processes(
    builders: Mapping[int, object],
    preparer: RequestPreparer | None,
    *,
    num_replicas: int,
    hang_limits: HangLimits,
) -> dict[int, ProcessModel]:
    """Build models at once, each in a process of its own. Should one fail, all end.

    :param builders: by the places of the replicas that they build
    :param preparer: prepares requests for a replica that is there already; None: there is none, so that the first of
        these sends what does
    :param num_replicas: among how many the processors are divided
    :param hang_limits: when one of them has hung
    :raises PagedError: what building one of them has raised
    """
    places = sorted(builders)
    seats = seats_of(num_replicas, numa_nodes(), usable_processors())
    processes: list[EngineProcess] = []

    def start() -> None:
        for place in places:
            wants_preparer = preparer is None and place == places[0]
            builder, processors = _seated(builders[place], seats[place])
            processes.append(
                EngineProcess(
                    builder,
                    name=f"replica {place}",
                    wants_preparer=wants_preparer,
                    hang_limits=hang_limits,
                    processors=processors,
                )
            )

    try:
        await in_own_thread(start, "to start replicas in", abandon_on_cancel=False)
        replies = await _all_built(processes)
        common = preparer or replies[0].preparer
        assert common is not None, "the first was asked for it"
        return {
            place: ProcessModel(process, reply, common)
            for place, process, reply in zip(places, processes, replies, strict=True)
        }
    except BaseException:
        with anyio.CancelScope(shield=True), suppress(Exception):
            await in_own_thread(partial(_end_all, processes), "to end replicas in")
        raise


async def _all_built(processes: Sequence[EngineProcess]) -> list[BuildReply]:
    built: dict[int, BuildReply] = {}
    errors: list[Exception] = []

    async def wait(place: int, scope: anyio.CancelScope) -> None:
        try:
            built[place] = await processes[place].built()
        except Exception as error:
            errors.append(error)
            scope.cancel()

    async with anyio.create_task_group() as tasks:
        for place in range(len(processes)):
            tasks.start_soon(wait, place, tasks.cancel_scope)
    if errors:
        raise errors[0]
    return [built[place] for place in range(len(processes))]


def _end_all(processes: Sequence[EngineProcess]) -> None:
    for process in processes:
        process.end()


@frozen
class Seat:
    """Says where a replica computes.

    :ivar num_threads: how many threads do
    :ivar processors: those that these stay on; None: any
    """

    num_threads: int
    processors: frozenset[int] | None = None


def seats_of(num_replicas: int, nodes: Mapping[int, frozenset[int]], num_processors: int) -> list[Seat]:
    """Divide the processors among replicas: where each NUMA node can have as many of them, they stay on it.

    :param nodes: the processors of each node
    :param num_processors: how many may be used, which may be fewer than there are
    """
    share = max(num_processors // num_replicas, 1)
    if len(nodes) == 1 or num_replicas % len(nodes):
        return [Seat(share)] * num_replicas
    on = [nodes[node] for node in sorted(nodes) for _ in range(num_replicas // len(nodes))]
    return [Seat(min(share, len(processors)), processors) for processors in on]


def _seated(builder: Any, seat: Seat) -> tuple[object, frozenset[int] | None]:
    """Return a builder whose model computes on its share of the processors, and which these are; unless the builder
    says on how many threads, or how many processes, the model computes."""
    settings = getattr(builder, "settings", None)
    if not isinstance(settings, BuildSettings):
        return builder, None
    if settings.logging:
        show_logs()  # what the process logs is logged here
    if settings.num_threads is not None:
        return builder, None
    is_divided = settings.tensor_parallel not in (None, 1)
    return builder.with_num_threads(seat.num_threads), None if is_divided else seat.processors
