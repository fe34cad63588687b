"""Load a model and serve it until the process is told to end."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from typing import Any

import typer

from paged_sdk import ConfigError
from paged_sdk.cli.loading import AnyBuilder, check_arch
from paged_sdk.cli.terminal import Terminal

__all__ = ["keep_serving"]

CANNOT_LISTEN = 2
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def keep_serving(
    builder: AnyBuilder,
    terminal: Terminal,
    *,
    host: str,
    port: int,
    name: str | None,
    arch: str | None,
    **settings: Any,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    :param name: what clients call it; None: its own name
    :param arch: the family that the model has to be of
    :param settings: those of :class:`~paged_sdk.server.ServerSettings`
    :raises typer.BadParameter: a host that others can reach, without a key
    :raises typer.Exit: the port is taken, or requests were cut off in the end
    :raises PagedError: the model cannot be loaded
    """
    try:
        from paged_sdk.server import ServerSettings, create_app
        from paged_sdk.server.running import is_loopback, listen, run
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'paged-sdk[server]'", setting="serve") from None

    try:
        is_local = is_loopback(host)
        if not is_local and not settings["api_keys"]:
            raise typer.BadParameter(
                f"others can reach {host}: give an --api-key, or set PAGED_SDK_API_KEY", param_hint="--host"
            )
        # A web page could reach a server without keys by a name of its own.
        hosts = (*LOCAL_NAMES, host.lower()) if is_local and not settings["api_keys"] else ()
        checked = ServerSettings(allowed_hosts=hosts, **settings)
        listener = listen(host, port)
    except OSError as error:
        terminal.error(
            f"cannot listen at {host}:{port}: {os.strerror(error.errno) if error.errno and error.errno > 0 else error}"
        )
        raise typer.Exit(CANNOT_LISTEN) from None

    async def main() -> int:
        with terminal.loading(builder.source.location):
            model = await builder.build()
        async with model:
            check_arch(model.architecture, arch)
            named = name or model.name
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{listener.getsockname()[1]}"
            chat = f" with a chat page at {url}/" if checked.page else ""
            terminal.reply(f"{named} at {url}/v1{chat} (Ctrl-C ends it)")
            return await run(create_app({named: model}, checked), listener)

    with closing(listener):
        cut_off = asyncio.run(main())
    if cut_off:
        terminal.error(f"{cut_off} requests were cut off")
        raise typer.Exit(1)
