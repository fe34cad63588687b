"""Run ``paged-sdk serve``: answer requests over HTTP, as OpenAI's API has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

from paged_sdk.cli import options
from paged_sdk.cli.groups import BuilderSetting, Setting, grouped, replaced

__all__ = ["serve"]

SERVER = "Server"

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="A LoRA adapter, which clients call as a model. It can be repeated.",
        rich_help_panel=options.MODEL,
    ),
]
Vision = Annotated[
    bool,
    typer.Option(
        "--vision",
        metavar=options.FLAG,
        help="Take images: the checkpoint has an image encoder.",
        rich_help_panel=options.MODEL,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="JSON: the model, and how it is served. Options of the command line count before it.",
        rich_help_panel=SERVER,
    ),
]


def _show_schema(asked: bool) -> None:
    if asked:
        from paged_sdk.cli.service_file import service_file_schema

        typer.echo(json.dumps(service_file_schema(), indent=2))
        raise typer.Exit


ConfigSchema = Annotated[
    bool,
    typer.Option(
        "--config-schema",
        callback=_show_schema,
        is_eager=True,
        metavar=options.FLAG,
        help="Show the JSON schema of such files and exit.",
        rich_help_panel=SERVER,
    ),
]


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
        str | None,
        typer.Option(
            "--served-model-name", metavar="NAME", help="What clients call the model.", rich_help_panel=SERVER
        ),
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Web pages from there may ask, such as https://example.org. It can be repeated.",
            rich_help_panel=SERVER,
        ),
        Setting("cors_origins"),
    ] = ()
    max_queue: Annotated[
        int | None,
        typer.Option("--max-queue", help="Requests that may wait; more are refused (4096).", rich_help_panel=SERVER),
        BuilderSetting("max_queue"),
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
            "--adapter-folder", metavar="DIR", help="Clients may load adapters from there.", rich_help_panel=SERVER
        ),
    ] = None
    no_page: Annotated[
        bool,
        typer.Option("--no-page", metavar=options.FLAG, help="Serve no chat page at /.", rich_help_panel=SERVER),
    ] = False


@grouped
def serve(
    ctx: typer.Context,
    *,
    config: Config = None,
    config_schema: ConfigSchema = False,
    server: ServerOptions,
    output: options.OutputOptions,
    version: options.Version = False,
    model_id: options.ModelId = None,
    vision: Vision = False,
    model: options.ModelOptions,
    paged: options.PagedOptions,
    engine: options.EngineOptions,
    adapter: Adapters = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it."""
    # Imported here, because help does not need them and should appear at once.
    from paged_sdk.cli.flags import reporting
    from paged_sdk.cli.loading import builder_of
    from paged_sdk.cli.service_file import ServiceFile
    from paged_sdk.cli.serving import keep_serving

    with reporting(serve, output) as terminal:
        file = ServiceFile.read(config) if config is not None else ServiceFile()
        said = {name: value for name, value in file.options.items() if _is_default(ctx, name)}
        server = replaced(server, said)
        model = replaced(model, said)
        keep_serving(
            builder_of(
                said.get("model_id", model_id),
                model,
                replaced(paged, said),
                replaced(engine, said),
                server,
                output,
                images_by="--vision" if said.get("vision", vision) else None,
                adapters=said.get("adapter", adapter) or (),
                topology=file.topology,
            ),
            terminal,
            host=server.host,
            port=server.port,
            name=server.served_model_name,
            arch=model.arch,
            api_keys=server.api_key,
            cors_origins=server.cors_origin,
            max_body_bytes=server.max_body_mb << 20,
            timeout=server.timeout,
            drain_timeout=server.drain_timeout,
            image_hosts=server.image_host,
            adapter_folder=server.adapter_folder,
            page=not server.no_page,
            sampling=file.sampling,
        )


def _is_default(ctx: typer.Context, name: str) -> bool:
    """Say whether an option is not on the command line, nor in the environment."""
    source = ctx.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"
