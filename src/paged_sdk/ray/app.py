"""Make a Ray Serve application that serves OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from paged_sdk.config.env import read_environment
from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.errors import ConfigError
from paged_sdk.model import Model
from paged_sdk.ray.options import (
    REPLACEMENT_SECONDS,
    checked_limits,
    checked_seconds,
    engine_options,
    most_replicas,
    ray_serve,
    with_health_checks,
    with_resources,
)
from paged_sdk.ray.replicas import open_model

if TYPE_CHECKING:
    from ray.serve import Application

    from paged_sdk.ray.replica import ModelBuilder
    from paged_sdk.server import ModelServer, ServerSettings

__all__ = ["serve_app"]


def serve_app(
    builder: ModelBuilder,
    *,
    model_name: str,
    settings: ServerSettings | None = None,
    replacement_seconds: float = REPLACEMENT_SECONDS,
    hang_limits: HangLimits | None = None,
    engines: Mapping[str, Any] | None = None,
    faces: Mapping[str, Any] | None = None,
) -> Application:
    """Return an application for ``serve.run`` or a Ray Serve config file: the server of
    :func:`paged_sdk.server.create_app` behind Ray Serve's proxy, and the replicas that compute::

        ray.init()
        app = serve_app(TextModelBuilder("path/or/hub-id"), model_name="mine", engines={"num_replicas": 4})
        serve.run(app)

    Call ``ray.init()`` first. Without ``ray_actor_options`` among ``engines``, a replica gets a GPU or its share of the
    CPUs, as for :class:`RayReplicas`, after one CPU for each server process; only a running Ray can say what there is.
    If it is not running, a replica gets a GPU only if the builder asks for CUDA, and otherwise one CPU, or as many as
    the builder sets threads; a warning says so. ``serve deploy`` calls this function where Ray is running.

    :param model_name: the model's name for clients
    :param settings: of the server; None: those of :class:`~paged_sdk.server.ServerSettings`
    :param replacement_seconds: how long requests wait for a replica when there is none, as for :class:`RayReplicas`
    :param hang_limits: when a replica has hung, as for :class:`RayReplicas`
    :param engines: options of the replicas' deployment, as for :class:`RayReplicas`, which win over the defaults
    :param faces: options of the server's deployment, as ``ray.serve.deployment`` takes them. Each server process knows
        only its own requests, and its router only what it has sent itself
    :raises ConfigError: Ray Serve or the server is not installed, or a value is invalid
    """
    limits = checked_limits(hang_limits) or read_environment().hang_limits
    serve = ray_serve()
    try:
        from paged_sdk.server import ServerSettings
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'paged-sdk[server]'", setting="serve") from None
    from paged_sdk.ray.replica import EngineReplica

    if not isinstance(model_name, str) or not model_name:
        raise ConfigError.of("model_name", model_name, "a name of at least one character")
    options = engine_options(engines or {})
    seconds = checked_seconds(replacement_seconds)
    make = partial(_make_server, model_name, options["name"], settings or ServerSettings(), seconds)

    def make_server() -> ModelServer:
        return make()

    server_options = {"name": "face", "max_ongoing_requests": 1_000_000, **(faces or {})}
    server_cpus = (server_options.get("ray_actor_options") or {}).get("num_cpus", 1) * most_replicas(server_options)
    options = with_health_checks(with_resources(options, builder, other_cpus=server_cpus), limits)
    engine = serve.deployment(EngineReplica, **options).bind(builder, step_seconds=limits.step_seconds)
    application: Application = serve.deployment(serve.ingress(make_server)(), **server_options).bind(engine)
    return application


def _make_server(model_name: str, deployment: str, settings: ServerSettings, replacement_seconds: float) -> ModelServer:
    from paged_sdk.server import create_app

    return create_app({model_name: partial(_model, deployment, replacement_seconds)}, settings)


@asynccontextmanager
async def _model(deployment: str, replacement_seconds: float) -> AsyncIterator[Model]:
    """Open the model made of the replicas in the same application."""
    serve = ray_serve()
    handle = serve.get_deployment_handle(deployment, serve.get_replica_context().app_name)
    async with await open_model(handle, replacement_seconds=replacement_seconds) as model:
        yield model
