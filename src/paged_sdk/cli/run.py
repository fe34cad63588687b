"""Runs ``paged-sdk run``: sends a prompt to a model, or chats with it."""

from __future__ import annotations

import typer

from paged_sdk.cli import options
from paged_sdk.cli.groups import grouped
from paged_sdk.cli.text_options import PromptOptions, SamplingOptions

__all__ = ["run"]


@grouped
def run(
    ctx: typer.Context,
    *,
    prompt: PromptOptions,
    model_id: options.ModelId = None,
    output: options.OutputOptions,
    version: options.Version = False,
    model: options.ModelOptions,
    paged: options.PagedOptions,
    engine: options.EngineOptions,
    adapter: options.Adapter = None,
    sampling: SamplingOptions,
) -> None:
    """Send a prompt to a model, or chat with it.

    Without a prompt, on a terminal, it starts a chat.
    """
    # Imported late, so that --help is fast.
    from paged_sdk.cli.answer import sampling_of
    from paged_sdk.cli.flags import reporting
    from paged_sdk.cli.loading import builder_of
    from paged_sdk.cli.talk import talk

    with reporting(run, output, ctx.params) as terminal:
        builder = builder_of(
            model_id,
            model,
            paged,
            engine,
            output,
            images_by="--image" if prompt.image else None,
            adapters=() if adapter is None else (adapter,),
        )
        talk(builder, prompt, sampling_of(sampling), terminal, arch=model.arch)
