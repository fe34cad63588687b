"""Runs ``paged-sdk doctor``: reports what this machine has, and what a model uses of it and why."""

from __future__ import annotations

from typing import Annotated

import typer
from attrs import evolve

from paged_sdk.cli import options
from paged_sdk.cli.groups import Setting, given_options, grouped, spellings_of_settings

__all__ = ["doctor"]

Loaded = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Also load this model, and report what it uses and why."),
    Setting("model"),
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan", metavar="MODEL", help="Report how much memory this model would take, without reading weights."
    ),
]
CtxtLen = Annotated[
    int | None,
    typer.Option("--ctxt-len", help="The same as --pa-context-len.", rich_help_panel=options.PAGED),
]


@grouped
def doctor(
    ctx: typer.Context,
    *,
    model: Loaded = None,
    model_id: options.ModelBeside = None,
    plan: Plan = None,
    json: options.Json = False,
    output: options.OutputOptions,
    model_options: options.ModelOptions,
    ctxt_len: CtxtLen = None,
    paged: options.PagedOptions,
    engine: options.EngineOptions,
) -> None:
    """Report what this machine has, what of it is used, and why.

    With a model, also report what that one uses; the options are those of run.
    """
    # Imported late, so that --help is fast.
    from paged_sdk.cli.diagnosis import Diagnosis
    from paged_sdk.cli.flags import exclusive, only, reporting
    from paged_sdk.cli.loading import builder_of, check_arch

    with reporting(doctor, output, ctx.params) as terminal:
        named = only({"MODEL": model, "--model-id": model_id, "--plan": plan})
        exclusive(
            {"--ctxt-len": ctxt_len, "--pa-context-len": paged.pa_context_len, "--pa-ctxt-len": paged.pa_ctxt_len}
        )
        of_a_model = [name for group in (model_options, paged, engine) for name in given_options(group)]
        of_a_model += [] if ctxt_len is None else ["ctxt_len"]
        if named is None and of_a_model:
            flag = spellings_of_settings(doctor)[of_a_model[0]]
            raise typer.BadParameter("it needs a model: name one as MODEL or with --plan", param_hint=flag)
        if ctxt_len is not None:
            paged = evolve(paged, pa_context_len=ctxt_len)
        builder = None if named is None else builder_of(named, model_options, paged, engine, output)
        diagnosis = Diagnosis.of(builder, terminal, loads=plan is None)
        for each in (diagnosis.plan, diagnosis.loaded):
            if each is not None:
                check_arch(each.model_type, model_options.arch)
        typer.echo(diagnosis.to_json() if json else diagnosis.to_text())
