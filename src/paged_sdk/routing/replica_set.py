"""Combines several replicas into one model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, cast

import anyio
from attrs import evolve

from paged_sdk.config.env import read_environment
from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.errors import ConfigError
from paged_sdk.model import Model
from paged_sdk.model_insides import ModelInsides
from paged_sdk.opening import Opening
from paged_sdk.remote.face import RemoteModel, traits_of
from paged_sdk.routing.adapters import ReplicaAdapters
from paged_sdk.routing.in_processes import build_in_processes
from paged_sdk.routing.replica import Replica
from paged_sdk.routing.routed_worker import RoutedWorker
from paged_sdk.routing.waiting_room import WaitingRoom
from paged_sdk.types.stats import ModelStats

__all__ = ["ReplicaSet", "ReplicatedModel", "as_replica"]


class _Builder(Protocol):
    def build(self) -> Awaitable[Model]: ...


ReplicaSource: TypeAlias = Model | _Builder
"""A model, or a builder of one."""


class ReplicatedModel(Model):
    """Combines several equal models into one. Create one with :class:`ReplicaSet`."""

    def __init__(
        self,
        replicas: Sequence[Model],
        *,
        adapters: Callable[[RoutedWorker], ReplicaAdapters] = ReplicaAdapters,
        waiting: WaitingRoom[Any] | None = None,
    ) -> None:
        first = replicas[0]
        for place, replica in enumerate(replicas):
            _check_same(first, replica, place)
        self._replicas = tuple(replicas)
        own = [replica._insides for replica in replicas]
        members = [as_replica(each) for each in replicas]
        configs = [each.preparer.config for each in own]
        self._routed = RoutedWorker(members, first.config.block_size, waiting=waiting)
        preparer = evolve(
            own[0].preparer,
            config=evolve(
                first.config,
                num_blocks=min(config.num_blocks for config in configs),
                max_num_seqs=min(config.max_num_seqs for config in configs),
                max_queue=sum(config.max_queue for config in configs),
            ),
            max_sequence_tokens=min(each.preparer.max_sequence_tokens for each in own),
            compiles=any(each.preparer.compiles for each in own),
        )
        self._set_up(evolve(own[0], preparer=preparer, worker=self._routed, adapters=adapters(self._routed)))

    @property
    def replicas(self) -> tuple[Model, ...]:
        """Return the replicas."""
        return self._replicas

    def replica_stats(self) -> tuple[ModelStats, ...]:
        """Return a snapshot of each replica's engine after its last step."""
        return self._routed.replica_stats

    async def aclose(self, *, drain: bool = False) -> None:
        self._routed.close(drain=drain)
        await _close_all(self._replicas, drain=drain)


class ReplicaSet(Opening[ReplicatedModel]):
    """Makes one model of several replicas when it is awaited; as an async context manager it also closes them on exit::

        async with ReplicaSet([builder.with_device("cuda:0"), builder.with_device("cuda:1")]) as model:
            response = await model.send_chat_request(messages)

    Each request goes to the replica with most of its prompt in the prefix cache, unless another is less busy by more
    than that is worth (:class:`paged_sdk.routing.Router`). So a conversation stays where its prefix is. The result is a
    :class:`Model` like any other: streams, timeouts, cancellation, adapters (loaded into all replicas), statistics
    (their sum), :func:`paged_sdk.server.create_app`.

    A replica whose engine dies gets no more requests. Its requests without output so far are sent to the others; the
    rest end with :class:`EngineDeadError` and their partial output.

    In their own processes, replicas run Python in parallel, and a process that dies takes no other with it. This
    process keeps the tokenizer and the chat template, and no weights. A replica's process ends when the model is closed
    or this process ends, however it ends. One that hangs is killed and treated as dead. The script needs no
    ``__main__`` guard.

    :param replicas: models, which the set takes over and closes, or builders; all of one checkpoint, with the same
        context and block size. ``[builder] * 4`` makes four equal replicas
    :param in_processes: build the builders' models in their own processes. The processors are divided among them,
        unless a builder sets its number of threads
    :param hang_limits: when such a process counts as hung; None: limits of the environment, or the defaults of
        :class:`HangLimits`
    :raises ConfigError: anything else, or models that differ
    """

    def __init__(
        self,
        replicas: Iterable[ReplicaSource],
        *,
        in_processes: bool = False,
        hang_limits: HangLimits | None = None,
    ) -> None:
        super().__init__("ReplicaSet", setting="replicas")
        allowed = "at least one model or builder"
        if isinstance(replicas, str | bytes) or not isinstance(replicas, Iterable):
            raise ConfigError.of("replicas", replicas, allowed)
        sources = list(replicas)
        if not sources:
            raise ConfigError.of("replicas", sources, allowed)
        for each in sources:
            if not isinstance(each, Model) and not callable(getattr(each, "build", None)):
                raise ConfigError.of("replicas", each, allowed)
        models = [id(each) for each in sources if isinstance(each, Model)]
        if len(set(models)) < len(models):
            raise ConfigError.of("replicas", sources, "each model once")
        if not isinstance(in_processes, bool):
            raise ConfigError.of("in_processes", in_processes, "True or False")
        if not isinstance(hang_limits, HangLimits | None):
            raise ConfigError.of("hang_limits", hang_limits, "HangLimits or None")
        if hang_limits is not None and not in_processes:
            raise ConfigError.of("hang_limits", hang_limits, "None without in_processes")
        self._sources = sources
        self._in_processes = in_processes
        self._hang_limits = hang_limits

    async def _open(self) -> ReplicatedModel:
        open_models = {place: source for place, source in enumerate(self._sources) if isinstance(source, Model)}
        try:
            if self._in_processes:
                open_models |= await self._built_in_processes(open_models)
            for place, source in enumerate(self._sources):
                if place not in open_models:  # one by one, so that after an error the open ones are known and closed
                    open_models[place] = await cast(_Builder, source).build()
            return ReplicatedModel([open_models[place] for place in range(len(self._sources))])
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(Exception):
                await _close_all(open_models.values())
            raise

    async def _built_in_processes(self, open_models: Mapping[int, Model]) -> Mapping[int, Model]:
        builders = {place: each for place, each in enumerate(self._sources) if place not in open_models}
        preparers = (model._insides.preparer for model in open_models.values())
        return await build_in_processes(
            builders,
            next(preparers, None),
            num_replicas=len(self._sources),
            hang_limits=self._hang_limits or read_environment().hang_limits,
        )


async def _close_all(models: Iterable[Model], *, drain: bool = False) -> None:
    """Close all models concurrently. An error does not prevent closing the others; the first is raised at the end."""
    errors: list[Exception] = []

    async def close(model: Model) -> None:
        try:
            await model.aclose(drain=drain)
        except Exception as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for model in models:
            tasks.start_soon(close, model)
    if errors:
        raise errors[0]


def as_replica(model: Model) -> Replica:
    """Return a model as a :class:`Replica`."""
    insides = model._insides
    return Replica(insides.worker, insides.adapters, _num_blocks(insides))


def _num_blocks(insides: ModelInsides) -> int:
    """Return how many blocks of prefixes an engine can cache. Without paged attention it caches whole sequences."""
    config = insides.preparer.config
    if not config.prefix_cache_n:
        return 0
    return config.num_blocks if config.paged else config.prefix_cache_n * (config.max_model_len // config.block_size)


def _check_same(first: Model, other: Model, place: int) -> None:
    """Check that two models can be replicas in one set.

    :raises ConfigError: they differ in a trait that requests depend on
    """
    own, others = _traits(first), _traits(other)
    for what, value in own.items():
        if others[what] != value:
            raise ConfigError(
                f"replicas[{place}] is another model than replicas[0]: its {what} differs",
                setting="replicas",
                value=place,
                allowed="models of one checkpoint, with the same settings",
            )


def _traits(model: Model) -> Mapping[str, object]:
    traits = model.traits if isinstance(model, RemoteModel) else traits_of(model._insides)
    return {**traits, "adapters": sorted(info.digest for info in model.adapter_infos)}
