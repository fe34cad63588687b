"""Defines the options of ``paged-sdk serve`` for the HTTP server and its replicas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

from paged_sdk.cli.groups import BuilderSetting, Setting

__all__ = ["LOG_JSON", "SERVER", "ServerOptions", "folder"]

LOG_JSON = "--log-json"
SERVER = "Server"


def folder(name: str) -> Path:
    """Return the path of a directory. An empty name, as of an unset shell variable, is refused: ``Path`` would take it
    for the working directory, and clients could load what is there.

    :raises typer.BadParameter: the name is empty, or that of no directory
    """
    if not os.path.isdir(name):
        raise typer.BadParameter(f"expected the name of a directory, not {name!r}", param_hint="--adapter-folder")
    return Path(name)


@frozen(kw_only=True)
class ServerOptions:
    """Holds the settings of the HTTP server and its replicas."""

    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="The address to listen on. Addresses that other machines reach need a key.",
            rich_help_panel=SERVER,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="The port; 0: any free one.", rich_help_panel=SERVER)
    ] = 8000
    api_key: Annotated[
        tuple[str, ...],
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="PAGED_SDK_API_KEY",
            help="Require this key from clients; repeatable.",
            rich_help_panel=SERVER,
        ),
        Setting("api_keys"),
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...],
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="The model's name for clients; with several models, one each, in order.",
            rich_help_panel=SERVER,
        ),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...],
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Allow web pages of this origin, such as https://example.org; repeatable.",
            rich_help_panel=SERVER,
        ),
        Setting("cors_origins"),
    ] = ()
    max_queue: Annotated[
        int | None,
        typer.Option(
            "--max-queue", help="Requests that may wait; further ones are refused (4096).", rich_help_panel=SERVER
        ),
        BuilderSetting("max_queue"),
    ] = None
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Number of processes, each with the whole model; requests go where they are served soonest.",
            rich_help_panel=SERVER,
        ),
    ] = 1
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Run the replicas under Ray Serve, here or in the cluster that RAY_ADDRESS names.",
            rich_help_panel=SERVER,
        ),
    ] = False
    max_replicas: Annotated[
        int | None,
        typer.Option(
            "--max-replicas",
            min=1,
            help="With --ray: scale up to this many replicas with the load.",
            rich_help_panel=SERVER,
        ),
    ] = None
    max_body_mb: Annotated[
        int, typer.Option("--max-body-mb", min=1, help="Maximum size of a request in MiB.", rich_help_panel=SERVER)
    ] = 64
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Maximum seconds per answer.", rich_help_panel=SERVER)
    ] = None
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout", help="Seconds for running requests to finish on shutdown.", rich_help_panel=SERVER
        ),
    ] = 60.0
    log_json: Annotated[
        bool,
        typer.Option(
            LOG_JSON,
            help="Log as JSON, with a line for every request.",
            rich_help_panel=SERVER,
        ),
    ] = False
    image_host: Annotated[
        tuple[str, ...],
        typer.Option(
            "--image-host",
            metavar="NAME",
            help="Allow image URLs on this host; *: any public host; repeatable.",
            rich_help_panel=SERVER,
        ),
        Setting("image_hosts"),
    ] = ()
    adapter_folder: Annotated[
        Path | None,
        typer.Option(
            "--adapter-folder",
            metavar="DIR",
            parser=folder,
            help="Let clients load adapters from this directory.",
            rich_help_panel=SERVER,
        ),
    ] = None
    no_page: Annotated[
        bool,
        typer.Option("--no-page", help="Serve no chat page at /.", rich_help_panel=SERVER),
    ] = False
