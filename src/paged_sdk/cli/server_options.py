"""Define the options of ``paged-sdk serve`` that say who may ask, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

from paged_sdk.cli.groups import BuilderSetting, Setting

__all__ = ["SERVER", "ServerOptions", "folder"]

SERVER = "Server"


def folder(name: str) -> Path:
    """Return the path of a directory. An empty name, as of a shell's variable that is not set, does not stand for where
    the program was started: clients would get at what is there.

    :raises typer.BadParameter: it is empty
    """
    if not name:
        raise typer.BadParameter("expected the name of a directory, not ''", param_hint="--adapter-folder")
    return Path(name)


@frozen(kw_only=True)
class ServerOptions:
    """Says who may ask, and where."""

    host: Annotated[
        str,
        typer.Option(
            "--host", help="The address to listen at. Others than this machine's need a key.", rich_help_panel=SERVER
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="0: any that is free.", rich_help_panel=SERVER)
    ] = 8000
    api_key: Annotated[
        tuple[str, ...],
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="PAGED_SDK_API_KEY",
            help="Answer those alone who send it. It can be repeated.",
            rich_help_panel=SERVER,
        ),
        Setting("api_keys"),
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...],
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="What clients call the model; of several models each has one, in their order.",
            rich_help_panel=SERVER,
        ),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...],
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Web pages of this origin may ask, written as browsers do: https://example.org. It can be repeated.",
            rich_help_panel=SERVER,
        ),
        Setting("cors_origins"),
    ] = ()
    max_queue: Annotated[
        int | None,
        typer.Option("--max-queue", help="Requests that may wait; more are refused (4096).", rich_help_panel=SERVER),
        BuilderSetting("max_queue"),
    ] = None
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Processes that hold the model, each as a whole; a request goes where it is served soonest.",
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
            help="With --ray: have up to so many replicas, as there is more or less to do.",
            rich_help_panel=SERVER,
        ),
    ] = None
    max_body_mb: Annotated[
        int, typer.Option("--max-body-mb", min=1, help="MiB that a request may have.", rich_help_panel=SERVER)
    ] = 64
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds that an answer may take.", rich_help_panel=SERVER)
    ] = None
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout", help="Seconds that requests are given to finish when it ends.", rich_help_panel=SERVER
        ),
    ] = 60.0
    log_json: Annotated[
        bool,
        typer.Option(
            "--log-json",
            help="Write a line of JSON for every request, and for what else is logged.",
            rich_help_panel=SERVER,
        ),
    ] = False
    image_host: Annotated[
        tuple[str, ...],
        typer.Option(
            "--image-host",
            metavar="NAME",
            help="Fetch images from there, by address; *: from any public host. It can be repeated.",
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
            help="Clients may load adapters from there.",
            rich_help_panel=SERVER,
        ),
    ] = None
    no_page: Annotated[
        bool,
        typer.Option("--no-page", help="Serve no chat page at /.", rich_help_panel=SERVER),
    ] = False
