"""Run ``paged-sdk serve``: answer requests over HTTP, as OpenAI's API has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paged_sdk.cli import options

__all__ = ["serve"]

SERVER = "Server"

Host = Annotated[
    str,
    typer.Option(
        "--host", help="The address to listen at. Others than this machine's need a key.", rich_help_panel=SERVER
    ),
]
Port = Annotated[
    int, typer.Option("--port", "-p", min=0, max=65535, help="0: any that is free.", rich_help_panel=SERVER)
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="PAGED_SDK_API_KEY",
        help="Answer those alone who send it. It can be repeated.",
        rich_help_panel=SERVER,
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option("--served-model-name", metavar="NAME", help="What clients call the model.", rich_help_panel=SERVER),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        help="Web pages from there may ask, such as https://example.org. It can be repeated.",
        rich_help_panel=SERVER,
    ),
]
MaxQueue = Annotated[
    int | None,
    typer.Option("--max-queue", help="Requests that may wait; more are refused (4096).", rich_help_panel=SERVER),
]
MaxBodyMb = Annotated[
    int, typer.Option("--max-body-mb", min=1, help="MiB that a request may have.", rich_help_panel=SERVER)
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", help="Seconds that an answer may take.", rich_help_panel=SERVER)
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout", help="Seconds that requests are given to finish when it ends.", rich_help_panel=SERVER
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="A LoRA adapter, which clients call as a model. It can be repeated.",
        rich_help_panel=options.MODEL,
    ),
]
ImageHost = Annotated[
    list[str] | None,
    typer.Option(
        "--image-host",
        metavar="NAME",
        help="Fetch images from there, by address; *: from any public host. It can be repeated.",
        rich_help_panel=SERVER,
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
AdapterFolder = Annotated[
    Path | None,
    typer.Option(
        "--adapter-folder", metavar="DIR", help="Clients may load adapters from there.", rich_help_panel=SERVER
    ),
]
NoPage = Annotated[
    bool,
    typer.Option("--no-page", metavar=options.FLAG, help="Serve no chat page at /.", rich_help_panel=SERVER),
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


def serve(
    ctx: typer.Context,
    config: Config = None,
    config_schema: ConfigSchema = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    served_model_name: ServedName = None,
    cors_origin: CorsOrigin = None,
    max_queue: MaxQueue = None,
    max_body_mb: MaxBodyMb = 64,
    timeout: Timeout = None,
    drain_timeout: DrainTimeout = 60.0,
    image_host: ImageHost = None,
    adapter_folder: AdapterFolder = None,
    no_page: NoPage = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    version: options.Version = False,
    model_id: options.Model = None,
    format: options.Format = None,
    arch: options.Arch = None,
    vision: Vision = False,
    quantized_file: options.QuantizedFile = None,
    tok_model_id: options.TokModelId = None,
    chat_template: options.ChatTemplate = None,
    cpu: options.Cpu = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    isq: options.Isq = None,
    topology: options.TopologyFile = None,
    imatrix: options.Imatrix = None,
    calibration_file: options.CalibrationFile = None,
    isq_cache: options.IsqCache = None,
    num_threads: options.NumThreads = None,
    paged_attn: options.PagedAttn = options.PagedAttnMode.AUTO,
    pa_context_len: options.PaContextLen = None,
    pa_memory_mb: options.PaMemoryMb = None,
    pa_memory_fraction: options.PaMemoryFraction = None,
    pa_block_size: options.PaBlockSize = None,
    pa_cache_type: options.PaCacheType = None,
    pa_gpu_mem: options.PaGpuMem = None,
    pa_gpu_mem_usage: options.PaGpuMemUsage = None,
    pa_ctxt_len: options.PaCtxtLen = None,
    pa_blk_size: options.PaBlkSize = None,
    no_paged_attn: options.NoPagedAttn = False,
    max_seqs: options.MaxSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefix_cache_n: options.PrefixCacheN = None,
    max_seq_len: options.MaxSeqLen = None,
    speculate: options.Speculate = None,
    draft_model: options.DraftModel = None,
    adapter: Adapters = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it."""
    given: dict[str, Any] = dict(locals())
    # Imported here, because help does not need them and should appear at once.
    from paged_sdk.cli.flags import builder_of, exclusive, naming_flags
    from paged_sdk.cli.serving import keep_serving
    from paged_sdk.cli.terminal import Terminal

    terminal = Terminal(quiet=quiet)
    with terminal.reporting(verbose=verbose), naming_flags():
        exclusive({"--verbose": verbose, "--quiet": quiet})
        sampling: Mapping[str, object] = {}
        if config is not None:
            from paged_sdk.cli.service_file import ServiceFile

            file = ServiceFile.read(config)
            sampling = file.sampling
            for name, value in file.options.items():
                source = ctx.get_parameter_source(name)
                if source is None or source.name == "DEFAULT":
                    given[name] = value
        keep_serving(
            builder_of({**given, "adapters": tuple(given["adapter"] or ())}),
            terminal,
            host=given["host"],
            port=given["port"],
            name=given["served_model_name"],
            arch=given["arch"],
            api_keys=tuple(given["api_key"] or ()),
            cors_origins=tuple(given["cors_origin"] or ()),
            max_body_bytes=given["max_body_mb"] << 20,
            timeout=given["timeout"],
            drain_timeout=given["drain_timeout"],
            image_hosts=tuple(given["image_host"] or ()),
            adapter_folder=given["adapter_folder"],
            page=not given["no_page"],
            sampling=sampling,
        )
