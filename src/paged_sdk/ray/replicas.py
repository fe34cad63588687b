"""Make a model of replicas that run under Ray Serve."""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from paged_sdk.config.env import read_environment
from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import ConfigError, ModelLoadError
from paged_sdk.model import Model
from paged_sdk.opening import Opening
from paged_sdk.ray.adapters import FleetAdapters
from paged_sdk.ray.options import (
    REPLACEMENT_SECONDS,
    checked_limits,
    checked_seconds,
    engine_options,
    ray_serve,
    with_health_checks,
    with_resources,
)
from paged_sdk.ray.ray_loop import RayLoop
from paged_sdk.routing.replica_set import ReplicatedModel
from paged_sdk.routing.routed_worker import RoutedWorker
from paged_sdk.routing.waiting_room import WaitingRoom
from paged_sdk.system.event_loop import wait_until_done
from paged_sdk.system.threads import in_own_thread

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from paged_sdk.ray.fleet import Fleet
    from paged_sdk.ray.replica import ModelBuilder

__all__ = ["RayModel", "RayReplicas", "open_model"]

_T = TypeVar("_T")


class RayModel(ReplicatedModel):
    """Combines the replicas of a Ray Serve deployment into one model. Make one with :class:`RayReplicas`.

    :param models: the current replicas, by name
    :param replacement_seconds: how long requests wait while there is no replica
    :param delete: ends the deployment; None: it outlives the model
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        fleet: Fleet,
        loop: RayLoop,
        *,
        replacement_seconds: float,
        delete: Callable[[], object] | None = None,
    ) -> None:
        every = list(models.values())
        limit = sum(each.config.max_queue for each in every)
        waiting: WaitingRoom[Any] = WaitingRoom(replacement_seconds, loop.call_later, limit=limit)
        super().__init__(every, adapters=FleetAdapters, waiting=waiting)
        self._fleet = fleet
        self._ray_loop = loop
        self._delete = delete
        self._is_closing = False
        adapters = self._insides.adapters
        assert isinstance(adapters, FleetAdapters)
        numbers = {name: number for number, name in enumerate(models)}
        loop.call_soon(partial(fleet.begin, self._routed, adapters, numbers))
        weakref.finalize(self, _let_go, self._routed, loop)

    @property
    def replicas(self) -> tuple[Model, ...]:
        """Return the replicas that currently get requests."""
        return self._fleet.models

    async def re_isq_model(self, isq: IsqType) -> None:
        """Refuse to: replicas that Ray Serve starts later would have other weights.

        :raises ConfigError: always
        """
        raise ConfigError(
            "replicas under Ray Serve keep the weights that they start with",
            setting="isq",
            value=isq,
            allowed="with_isq of their builder",
        )

    async def aclose(self, *, drain: bool = False) -> None:
        self._routed.close(drain=drain)
        if self._is_closing:
            await _in_thread(self._ray_loop.join, daemon=True)
            return
        self._is_closing = True
        with anyio.CancelScope(shield=not drain):
            await in_loop(self._ray_loop, self._fleet.close(drain=drain))
        self._ray_loop.stop()
        self._preparer.text.close()
        if self._delete is not None:
            with anyio.CancelScope(shield=True):
                await _in_thread(self._delete)


def _let_go(routed: RoutedWorker, loop: RayLoop) -> None:
    routed.close()
    loop.stop()


class RayReplicas(Opening[RayModel]):
    """Runs replicas of a model under Ray Serve, and makes one model of them when it is awaited; as an async context
    manager it also ends them on exit::

        async with RayReplicas(TextModelBuilder("path/or/hub-id"), num_replicas=4) as model:
            response = await model.send_chat_request(messages)

    The result is a :class:`Model` as from :class:`~paged_sdk.ReplicaSet`, with the same router: requests go where most
    of their prompt is cached, and requests without output are sent elsewhere when their replica dies. This process has
    the tokenizer and the chat template, and no weights. Replicas may come and go, by Ray Serve's autoscaling or because
    it replaces dead ones. While there is none, requests wait for one.

    Ray is started on this machine if it is not running and ``RAY_ADDRESS`` names no cluster; it then ends with the
    model.

    :param builder: builds a replica, where Ray puts it
    :param replacement_seconds: how long there may be no replica before waiting requests, and new ones until a replica
        comes, fail with :class:`EngineDeadError`; 0: they fail at once
    :param hang_limits: when a replica has hung, so that Ray Serve ends it and starts another; None: as this process's
        environment says, or the defaults of :class:`HangLimits`. ``health_check_period_s`` and
        ``health_check_timeout_s`` among the options win over its ``silent_seconds``
    :param name: of the Ray Serve application, which replaces one of that name; None: a new one
    :param options: of the deployment, as for ``ray.serve.deployment``: ``num_replicas``, ``ray_actor_options``,
        ``autoscaling_config`` ..., whose ``target_ongoing_requests`` counts running and waiting sequences. Without
        ``ray_actor_options``, a replica gets a GPU, or as many as it divides the model among, if Ray has some and the
        builder has not chosen the CPU; otherwise its share of the processors
    :raises ConfigError: Ray Serve is not installed, or a value is invalid
    """

    def __init__(
        self,
        builder: ModelBuilder,
        *,
        name: str | None = None,
        replacement_seconds: float = REPLACEMENT_SECONDS,
        hang_limits: HangLimits | None = None,
        **options: Any,
    ) -> None:
        super().__init__("RayReplicas", setting="builder")
        if not callable(getattr(builder, "build", None)):
            raise ConfigError.of("builder", builder, "a builder of a model")
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError.of("name", name, "a name of at least one character")
        self._replacement_seconds = checked_seconds(replacement_seconds)
        self._hang_limits = checked_limits(hang_limits)
        self._builder = builder
        self._application = f"paged-sdk-{uuid.uuid4().hex[:8]}" if name is None else name
        self._options = engine_options(options)

    async def _open(self) -> RayModel:
        cluster = _Cluster(self._application)
        try:
            limits = self._hang_limits or read_environment().hang_limits
            handle = await _in_thread(partial(cluster.deploy, self._builder, self._options, limits))
            return await open_model(handle, replacement_seconds=self._replacement_seconds, delete=cluster.leave)
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(Exception):
                await _in_thread(cluster.leave)
            raise


async def open_model(
    handle: DeploymentHandle, *, replacement_seconds: float, delete: Callable[[], object] | None = None
) -> RayModel:
    """Make a model of an existing deployment.

    :param replacement_seconds: how long requests wait while there is no replica
    :param delete: ends the deployment when the model is closed
    """
    from paged_sdk.ray.fleet import Fleet

    loop = RayLoop()
    fleet = Fleet(handle, loop)
    try:
        models = await in_loop(loop, fleet.open())
        return RayModel(models, fleet, loop, replacement_seconds=replacement_seconds, delete=delete)
    except BaseException:
        loop.stop()
        raise


class _Cluster:
    """Manages what Ray runs for one model.

    :param name: the application's name
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._started_ray = False

    def deploy(self, builder: ModelBuilder, options: Mapping[str, Any], limits: HangLimits) -> DeploymentHandle:
        """Start the replicas, and wait until they run.

        :param limits: when a replica counts as hung
        :raises ModelLoadError: Ray Serve cannot start them
        """
        import ray

        serve = ray_serve()
        if not ray.is_initialized():
            # Errors only: ray.init warns that it does not handle SIGTERM, which is intended.
            ray.init(include_dashboard=False, logging_level="error")
            self._started_ray = True
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # No proxy: it would take port 8000 for nothing. A Ray Serve that is running keeps its own.
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        from paged_sdk.ray.replica import EngineReplica

        options = with_resources(options, builder)
        application = serve.deployment(EngineReplica, **with_health_checks(options, limits)).bind(
            builder, step_seconds=limits.step_seconds, reports_build_error=True
        )
        try:
            handle: DeploymentHandle = serve.run(application, name=self._name, route_prefix=None)
        except RuntimeError as error:  # Ray Serve has given up; the reason is only in the text
            raise ModelLoadError(f"Ray Serve could not start the replicas: {error}") from error
        return handle

    def leave(self) -> None:
        """End what was started; no error if it is gone already."""
        import ray

        with suppress(Exception):
            ray_serve().delete(self._name)
        if self._started_ray:
            ray.shutdown()


async def in_loop(loop: RayLoop, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a task in Ray's loop and wait for it in the caller's event loop."""
    future = loop.start(coroutine)
    try:
        await wait_until_done(future)
        return future.result()
    finally:
        future.cancel()  # no effect once the task has ended
        del future  # an error's traceback holds this frame, and the future holds the error


async def _in_thread(function: Callable[[], _T], *, daemon: bool | None = None) -> _T:
    return await in_own_thread(function, "to wait for Ray in", daemon=daemon)
