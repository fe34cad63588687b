"""Run ``paged-sdk doctor``: say what this machine has, and what a model would use of it and why."""

from __future__ import annotations

from typing import Annotated

import typer

from paged_sdk.cli import options

__all__ = ["doctor"]

Loaded = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Load this model, and say what it uses and why."),
]
Plan = Annotated[
    str | None,
    typer.Option("--plan", metavar="MODEL", help="Say what memory this model would take. No weight is read."),
]
CtxtLen = Annotated[
    int | None, typer.Option("--ctxt-len", help="Size of the KV pool in tokens.", rich_help_panel=options.PAGED)
]
Json = Annotated[bool, typer.Option("--json", metavar=options.FLAG, help="Print one JSON object.")]


def doctor(
    model: Loaded = None,
    plan: Plan = None,
    json: Json = False,
    verbose: options.Verbose = False,
    format: options.Format = None,
    quantized_file: options.QuantizedFile = None,
    cpu: options.Cpu = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    isq: options.Isq = None,
    topology: options.TopologyFile = None,
    num_threads: options.NumThreads = None,
    paged_attn: options.PagedAttn = options.PagedAttnMode.AUTO,
    ctxt_len: CtxtLen = None,
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
    max_seq_len: options.MaxSeqLen = None,
) -> None:
    """Say what this machine has, what of it is used, and why.

    With a model also what that one uses; its options are those of run.
    """
    given = dict(locals())
    # Imported here, because help does not need them and should appear at once.
    from paged_sdk.cli.diagnosis import Diagnosis
    from paged_sdk.cli.flags import builder_of, exclusive, naming_flags
    from paged_sdk.cli.terminal import Terminal

    terminal = Terminal(quiet=json)
    with terminal.reporting(verbose=verbose), naming_flags():
        exclusive({"MODEL": model, "--plan": plan})
        exclusive({"--ctxt-len": ctxt_len, "--pa-context-len": pa_context_len, "--pa-ctxt-len": pa_ctxt_len})
        given["pa_context_len"] = pa_context_len if ctxt_len is None else ctxt_len
        builder = None if model is None and plan is None else builder_of({**given, "model_id": model or plan})
        diagnosis = Diagnosis.of(builder, terminal, loads=plan is None)
        typer.echo(diagnosis.to_json() if json else diagnosis.to_text())
