"""Builds replicas, each in its own process."""

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

__all__ = ["ProcessorShare", "build_in_processes", "processor_shares"]


async def build_in_processes(
    builders: Mapping[int, object],
    preparer: RequestPreparer | None,
    *,
    num_replicas: int,
    hang_limits: HangLimits,
) -> dict[int, ProcessModel]:
    """Build models concurrently, each in its own process. If one fails, all processes are ended.

    :param builders: builders by the index of their replica
    :param preparer: the request preparer of a replica that is already open; None: the first process sends one
    :param num_replicas: number of all replicas, among which the processors are divided
    :param hang_limits: when a process counts as hung
    :raises PagedError: the first error of a build
    """
    places = sorted(builders)
    shares = processor_shares(num_replicas, numa_nodes(), usable_processors())
    processes: list[EngineProcess] = []

    def start() -> None:
        for place in places:
            wants_preparer = preparer is None and place == places[0]
            builder, processors = _with_share(builders[place], shares[place])
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
class ProcessorShare:
    """Holds a replica's share of the processors.

    :ivar num_threads: number of computing threads
    :ivar processors: processors that the threads are pinned to; None: any
    """

    num_threads: int
    processors: frozenset[int] | None = None


def processor_shares(
    num_replicas: int, nodes: Mapping[int, frozenset[int]], num_processors: int
) -> list[ProcessorShare]:
    """Divide the processors among replicas. If the replicas divide evenly among the NUMA nodes, each is pinned to a
    node.

    :param nodes: processors of each NUMA node
    :param num_processors: how many processors may be used; fewer than the nodes have if a quota limits them
    """
    share = max(num_processors // num_replicas, 1)
    if len(nodes) == 1 or num_replicas % len(nodes):
        return [ProcessorShare(share)] * num_replicas
    on = [nodes[node] for node in sorted(nodes) for _ in range(num_replicas // len(nodes))]
    return [ProcessorShare(min(share, len(processors)), processors) for processors in on]


def _with_share(builder: Any, share: ProcessorShare) -> tuple[object, frozenset[int] | None]:
    """Return the builder with the number of threads of its share, and the processors to pin to. A builder that sets its
    number of threads is returned unchanged, without pinning; a tensor-parallel model is not pinned either.
    """
    settings = getattr(builder, "settings", None)
    if not isinstance(settings, BuildSettings):
        return builder, None
    if settings.logging:
        show_logs()  # this process writes the log lines of the replica's process
    if settings.num_threads is not None:
        return builder, None
    is_divided = settings.tensor_parallel not in (None, 1)
    return builder.with_num_threads(share.num_threads), None if is_divided else share.processors
