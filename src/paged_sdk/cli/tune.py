"""Runs ``paged-sdk tune``: measures a model on this machine, and suggests settings."""

from __future__ import annotations

import typer

from paged_sdk.cli import options
from paged_sdk.cli.groups import grouped
from paged_sdk.cli.tune_options import TuneOptions

__all__ = ["tune"]


@grouped
def tune(
    ctx: typer.Context,
    *,
    model: options.ModelArgument = None,
    model_id: options.ModelBeside = None,
    json: options.Json = False,
    tune_options: TuneOptions,
    output: options.OutputOptions,
    model_options: options.ModelOptions,
) -> None:
    """Try settings for a model on this machine, and suggest the best.

    It measures weight types, numbers of threads and KV cache sizes in runs of a second or two each.
    """
    # Imported late, so that --help is fast.
    import asyncio

    from paged_sdk.cli.flags import exclusive, only, reporting
    from paged_sdk.cli.service_file import write_service_file
    from paged_sdk.cli.tuning import Tuner

    with reporting(tune, output, ctx.params) as terminal:
        location = only({"MODEL": model, "--model-id": model_id})
        exclusive({"--try": tune_options.types, "--isq": model_options.isq})
        file = tune_options.emit_config
        if file is not None and file.suffix.lower() != ".json":
            raise typer.BadParameter(f"{file}: expected a name that ends in .json", param_hint="--emit-config")
        if file is not None and (file.exists() or not file.absolute().parent.is_dir()):
            raise typer.BadParameter(f"{file}: expected a new file in a directory", param_hint="--emit-config")
        tuned = asyncio.run(Tuner(location, model_options, output, tune_options, terminal).run())
        typer.echo(tuned.to_json() if json else tuned.to_text())
        if file is not None:
            write_service_file(file, tuned.settings)
            terminal.note(f"{file}: for paged-sdk from-config, and for paged-sdk serve --config")
