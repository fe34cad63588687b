"""Loads models and serves them until a signal ends the process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING, Any, Self

import typer
from attrs import Attribute, field, frozen

from paged_sdk import ConfigError, Model
from paged_sdk.cli.exit_codes import CANNOT_LISTEN, FAILED
from paged_sdk.cli.groups import replaced
from paged_sdk.cli.loading import AnyBuilder, builder_of, check_arch, load
from paged_sdk.cli.options import EngineOptions, ModelOptions, OutputOptions, PagedOptions
from paged_sdk.cli.server_options import ServerOptions
from paged_sdk.cli.service_file import ModelEntry
from paged_sdk.cli.terminal import Terminal

if TYPE_CHECKING:
    from paged_sdk.server import ServerSettings

__all__ = ["ServedModel", "keep_serving"]

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@frozen(kw_only=True)
class ServedModel:
    """Describes a model to serve.

    :ivar name: the name that clients use; None: the model's own
    :ivar arch: the model family to check for, if given
    :ivar replicas: number of processes that hold the model; 1: this process, unless ``ray`` is set
    :ivar ray: whether the replicas run under Ray Serve
    :ivar max_replicas: under Ray Serve, the number of replicas to scale up to; None: ``replicas``
    """

    builder: AnyBuilder
    name: str | None = field(default=None)
    arch: str | None = None
    replicas: int = 1
    ray: bool = False
    max_replicas: int | None = None

    @name.validator
    def _is_said(self, attribute: Attribute[Any], value: str | None) -> None:
        if value == "":  # as of an unset shell variable
            raise typer.BadParameter("expected a name, not ''", param_hint="--served-model-name")

    @classmethod
    def of(
        cls,
        entry: ModelEntry,
        model: ModelOptions,
        paged: PagedOptions,
        engine: EngineOptions,
        server: ServerOptions,
        output: OutputOptions,
        *,
        vision: bool,
        adapters: Sequence[str],
        ranking_tokens: Sequence[str],
    ) -> Self:
        """Combine the file's settings of a model with the command line's settings of all models.

        :param entry: the file's settings, which override the others
        :raises typer.BadParameter: options that contradict each other
        :raises PagedError: invalid value, or no embedded model
        """
        said = entry.options
        model, server = replaced(model, said), replaced(server, said)
        builder = builder_of(
            said.get("model_id"),
            model,
            replaced(paged, said),
            replaced(engine, said),
            server,
            output,
            images_by="--vision" if said.get("vision", vision) else None,
            adapters=said.get("adapter", adapters),
            topology=entry.topology,
            ranking_tokens=said.get("ranking_tokens", ranking_tokens),
        )
        return cls(
            builder=builder,
            name=next(iter(server.served_model_name), None),
            arch=model.arch,
            replicas=server.replicas,
            ray=server.ray,
            max_replicas=_checked_most(server),
        )

    async def open(self, terminal: Terminal) -> tuple[str, Model]:
        """Load the model, and return it with its name.

        :raises typer.BadParameter: the model is of another family
        :raises PagedError: the model cannot be loaded
        """
        with terminal.loading(self.builder.source.location):
            model = await self._load()
        try:
            check_arch(model.model_type, self.arch)
        except typer.BadParameter:
            await model.aclose()
            raise
        return self.name or model.name, model

    async def _load(self) -> Model:
        if self.ray:
            from paged_sdk.ray import RayReplicas

            if self.max_replicas is None:
                return await RayReplicas(self.builder, num_replicas=self.replicas)
            bounds = {"min_replicas": self.replicas, "max_replicas": self.max_replicas}
            return await RayReplicas(self.builder, autoscaling_config=bounds)
        return await load(self.builder, replicas=self.replicas)


def _checked_most(server: ServerOptions) -> int | None:
    """Return the maximum number of replicas.

    :raises typer.BadParameter: it is less than ``--replicas``, or ``--ray`` is missing
    """
    most = server.max_replicas
    if most is not None and not server.ray:
        raise typer.BadParameter("only Ray Serve starts and ends replicas: give --ray", param_hint="--max-replicas")
    if most is not None and most < server.replicas:
        raise typer.BadParameter(f"expected at least {server.replicas}, as --replicas", param_hint="--max-replicas")
    return most


def keep_serving(
    models: Sequence[ServedModel], terminal: Terminal, *, host: str, port: int, log_json: bool, **settings: Any
) -> None:
    """Serve models until SIGTERM or Ctrl-C.

    :param terminal: logs as JSON if ``log_json``
    :param log_json: whether all output is log lines in JSON
    :param settings: settings of :class:`~paged_sdk.server.ServerSettings`
    :raises typer.BadParameter: a host that other machines can reach, without an API key; two models or adapters with
        one name
    :raises typer.Exit: the server cannot listen, or requests were cut off on shutdown
    :raises PagedError: a model cannot be loaded
    """
    try:
        from paged_sdk.server.running import allow_connections
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'paged-sdk[server]'", setting="serve") from None

    first = models[0]
    if first.builder.build().rank > 0:  # only rank 0 serves requests; loading on another rank runs until rank 0 ends
        asyncio.run(first.open(terminal))
    checked, listener = _listening(host, port, settings, terminal)
    allow_connections()
    with closing(listener):
        cut_off = asyncio.run(_serve(models, checked, listener, terminal, host=host, log_json=log_json))
    if cut_off:
        terminal.error(f"{cut_off} requests were cut off")
        raise typer.Exit(FAILED)


def _listening(
    host: str, port: int, settings: Mapping[str, Any], terminal: Terminal
) -> tuple[ServerSettings, socket.socket]:
    """Return the checked settings, and a socket that listens.

    :raises typer.BadParameter: a host that other machines can reach, without an API key
    :raises typer.Exit: the server cannot listen
    """
    from paged_sdk.server import ServerSettings
    from paged_sdk.server.running import is_loopback, listen

    try:
        is_local = is_loopback(host)
        if not is_local and not settings["api_keys"]:
            raise typer.BadParameter(
                f"others can reach {host}: give an --api-key, or set PAGED_SDK_API_KEY", param_hint="--host"
            )
        # Protects a server without API keys against DNS rebinding by web pages.
        hosts = (*LOCAL_NAMES, host.lower()) if is_local and not settings["api_keys"] else ()
        return ServerSettings(allowed_hosts=hosts, **settings), listen(host, port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        advice = " (choose another with --port; 0: any free one)" if error.errno == errno.EADDRINUSE else ""
        terminal.error(f"cannot listen at {host}:{port}: {why}{advice}")
        raise typer.Exit(CANNOT_LISTEN) from None


async def _serve(
    models: Sequence[ServedModel],
    settings: ServerSettings,
    listener: socket.socket,
    terminal: Terminal,
    *,
    host: str,
    log_json: bool,
) -> int:
    """Load models and serve them; return how many requests were cut off."""
    from paged_sdk.server import create_app
    from paged_sdk.server.errors import LOGGER_NAME
    from paged_sdk.server.running import run

    async with AsyncExitStack() as stack:
        served: dict[str, Model] = {}
        for each in models:
            name, model = await each.open(terminal)
            await stack.enter_async_context(model)
            _check_names(served, name, model)
            served[name] = model
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}"

        def say_where() -> None:
            if log_json:
                fields = {"url": url, "models": list(served)}
                logging.getLogger(LOGGER_NAME).info("serving", extra={"fields": fields})
            else:
                chat = f" with a chat page at {url}/" if settings.page else ""
                terminal.reply(f"{', '.join(served)} at {url}/v1{chat} (Ctrl-C ends it)")

        return await run(create_app(served, settings), listener, say_where)


def _check_names(served: Mapping[str, Model], name: str, model: Model) -> None:
    """Check that the names of a model and its adapters are not taken.

    :raises typer.BadParameter: a name is taken
    """
    taken = {*served, *(adapter for each in served.values() for adapter in each.adapters)}
    if name in taken:
        raise typer.BadParameter(f"another model is called {name}", param_hint="--served-model-name")
    twice = next((adapter for adapter in model.adapters if adapter in taken), None)
    if twice is not None:
        raise typer.BadParameter(f"another model or adapter is called {twice}", param_hint="--adapter")
