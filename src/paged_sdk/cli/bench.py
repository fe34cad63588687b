"""Runs ``paged-sdk bench``: measures a model's speed on this machine."""

from __future__ import annotations

import typer

from paged_sdk.cli import options
from paged_sdk.cli.bench_options import BenchOptions
from paged_sdk.cli.groups import grouped

__all__ = ["bench"]


@grouped
def bench(
    ctx: typer.Context,
    *,
    model: options.ModelArgument = None,
    model_id: options.ModelBeside = None,
    json: options.Json = False,
    bench_options: BenchOptions,
    output: options.OutputOptions,
    model_options: options.ModelOptions,
    paged: options.PagedOptions,
    engine: options.EngineOptions,
) -> None:
    """Measure a model's prefill and decode speed on this machine.

    Prompts are random tokens, which no cache holds; texts are generated greedily.
    """
    # Imported late, so that --help is fast.
    import asyncio

    from attrs import evolve

    from paged_sdk import describe_machine
    from paged_sdk.cli.benchmark import Benchmark
    from paged_sdk.cli.flags import only, reporting
    from paged_sdk.cli.loading import builder_of

    with reporting(bench, output, ctx.params) as terminal:
        location = only({"MODEL": model, "--model-id": model_id})
        streams = bench_options.streams or (1, 4)
        machine = describe_machine()
        # Set explicitly, because torch's default depends on the environment. Replicas divide the processors themselves.
        if model_options.num_threads is None and bench_options.replicas == 1:
            model_options = evolve(model_options, num_threads=machine.num_processors)
        builder = builder_of(location, model_options, paged, engine, output)
        most = -(-max(streams) // bench_options.replicas)
        if most > builder.settings.max_num_seqs:
            if engine.max_seqs is not None:
                each = " of each replica" if bench_options.replicas > 1 else ""
                raise typer.BadParameter(
                    f"expected at most --max-seqs, {engine.max_seqs}{each}", param_hint="--streams"
                )
            engine = evolve(engine, max_seqs=most)
            builder = builder_of(location, model_options, paged, engine, output)
        measured = asyncio.run(
            Benchmark.of(builder, machine, evolve(bench_options, streams=streams), terminal, arch=model_options.arch)
        )
        typer.echo(measured.to_json() if json else measured.to_text())
