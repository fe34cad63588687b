"""Runs ``paged-sdk serve``: serves models over HTTP, with OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from attrs import evolve

from paged_sdk.cli import options
from paged_sdk.cli.groups import Setting, grouped, replaced
from paged_sdk.cli.server_options import SERVER, ServerOptions

__all__ = ["serve"]

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="A LoRA adapter, which clients select as a model; repeatable.",
        rich_help_panel=options.MODEL,
    ),
    Setting("with_adapter"),
]
Vision = Annotated[
    bool,
    typer.Option(
        "--vision",
        help="Accept images; for checkpoints with an image encoder.",
        rich_help_panel=options.MODEL,
    ),
]
RankingTokens = Annotated[
    str | None,
    typer.Option(
        "--ranking-tokens",
        metavar="YES[,NO]",
        help="Rerank by the model's answer: one token for relevant documents, and one for others.",
        rich_help_panel=options.MODEL,
    ),
    Setting("with_ranking_tokens"),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A JSON file with models and settings. Command-line options override it.",
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
        help="Show the JSON schema of such files and exit.",
        rich_help_panel=SERVER,
    ),
]


@grouped
def serve(
    ctx: typer.Context,
    *,
    config: Config = None,
    config_schema: ConfigSchema = False,
    server: ServerOptions,
    output: options.OutputOptions,
    version: options.Version = False,
    model_id: options.ModelIds = None,
    vision: Vision = False,
    model: options.ModelOptions,
    paged: options.PagedOptions,
    engine: options.EngineOptions,
    adapter: Adapters = None,
    ranking_tokens: RankingTokens = None,
) -> None:
    """Serve models over HTTP, with OpenAI's and Anthropic's APIs."""
    # Imported late, so that --help is fast.
    from paged_sdk.cli.flags import reporting
    from paged_sdk.cli.loading import with_excluded
    from paged_sdk.cli.naming_keys import naming_keys
    from paged_sdk.cli.service_file import ServiceFile
    from paged_sdk.cli.serving import ServedModel, keep_serving

    with reporting(serve, output, ctx.params, log_json=server.log_json) as terminal, ExitStack() as stack:
        _check_key(ctx, server)
        file = ServiceFile() if config is None else ServiceFile.read(config)
        if any(entry.options.get("log_json") for entry in file.models):
            terminal.log_as_json()
        given = with_excluded([name for name in ctx.params if _is_given(ctx, name)])
        file = file.without(given)
        stack.enter_context(naming_keys(serve, file))
        entries = file.of_models(model_id or ())
        others = {"--draft-model": engine.draft_model, "--adapter": adapter, "--ranking-tokens": ranking_tokens}
        _check_number(len(entries), server, model, others)
        names = server.served_model_name
        answers = () if ranking_tokens is None else ranking_tokens.split(",", 1)
        models = [
            ServedModel.of(
                entry,
                model,
                paged,
                engine,
                server,
                output,
                vision=vision,
                adapters=adapter or (),
                ranking_tokens=answers,
            )
            for entry in entries
        ]
        server = replaced(server, entries[0].options)
        keep_serving(
            [evolve(each, name=name) for each, name in zip(models, names, strict=True)] if names else models,
            terminal,
            host=server.host,
            port=server.port,
            api_keys=server.api_key,
            cors_origins=server.cors_origin,
            max_body_bytes=server.max_body_mb << 20,
            timeout=server.timeout,
            drain_timeout=server.drain_timeout,
            image_hosts=server.image_host,
            adapter_folder=server.adapter_folder,
            page=not server.no_page,
            log_json=server.log_json,
            sampling=file.sampling,
        )


def _check_key(ctx: typer.Context, server: ServerOptions) -> None:
    """Check that a key in the environment is one: typer splits the variable of a repeatable option at spaces.

    :raises typer.BadParameter: it is none, or several
    """
    source = ctx.get_parameter_source("api_key")
    if len(server.api_key) != 1 and source is not None and source.name == "ENVIRONMENT":
        raise typer.BadParameter("expected a key of printable ASCII without spaces", param_hint="PAGED_SDK_API_KEY")


def _check_number(
    models: int, server: ServerOptions, model: options.ModelOptions, others: Mapping[str, object]
) -> None:
    """Check that options fit the number of models.

    :param others: values of further options that cannot apply to several models, by spelling
    :raises typer.BadParameter: they do not
    """
    from paged_sdk.cli.flags import excluding

    of_one_model = {
        "--quantized-file": model.quantized_file,
        "--mmproj": model.mmproj,
        "--tok-model-id": model.tok_model_id,
        "--arch": model.arch,
        **others,
    }
    excluding("several models", models > 1, of_one_model)
    if server.served_model_name and len(server.served_model_name) != models:
        raise typer.BadParameter(f"expected a name for each of {models} models", param_hint="--served-model-name")


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Tell whether an option is set on the command line or in the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
