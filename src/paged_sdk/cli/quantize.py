"""Runs ``paged-sdk quantize``: writes a model as a GGUF file, or as unquantized safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paged_sdk.cli import options
from paged_sdk.cli.groups import Setting, grouped

__all__ = ["quantize"]

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A directory, a GGUF file or a Hub id.")]
Target = Annotated[
    Path,
    typer.Argument(
        metavar="TARGET", help="The GGUF file, or with --safetensors the directory, to write; must not exist."
    ),
    Setting("target"),
]
Type = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="NAME",
        help="F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K_S, Q3_K_M, Q3_K_L, Q4_K_S, Q4_K_M, Q5_K_S, "
        "Q5_K_M, Q6_K, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0 or MXFP4_MOE. Default: Q4_K_M. With --safetensors: F32, F16 or "
        "BF16, the default there.",
    ),
]
Override = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="REGEX=TYPE",
        help="The type of tensors whose name matches the expression, such as 'ffn_down=Q6_K'; the last match "
        "wins; repeatable.",
    ),
    Setting("overrides"),
]
Imatrix = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        metavar="FILE",
        help="A llama.cpp importance matrix (GGUF or .dat), to weight quantization errors by.",
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="TEXT",
        help="A text file to compute an importance matrix from, before quantizing.",
    ),
]
ImatrixOut = Annotated[
    Path | None,
    typer.Option(
        "--imatrix-out",
        metavar="FILE",
        help="Save what --calibrate computes, added to --imatrix, as a llama.cpp importance matrix.",
    ),
]
TopologyFile = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        metavar="FILE",
        help="A YAML file with types per layer or matrix name: see docs/quantization.md.",
    ),
]
Mmproj = Annotated[
    Path | None,
    typer.Option(
        "--mmproj",
        metavar="FILE",
        help='Also write the image encoder, to a separate GGUF file with "mmproj" in its name.',
    ),
]
MmprojType = Annotated[
    str | None,
    typer.Option(
        "--mmproj-type", metavar="NAME", help="The type of its matrices: F32, F16, BF16 or Q8_0. Default: F16."
    ),
]
Safetensors = Annotated[
    bool,
    typer.Option(
        "--safetensors",
        help="Write a directory of unquantized safetensors, for transformers.",
    ),
]


@grouped
def quantize(
    *,
    source: Source,
    target: Target,
    type: Type = None,
    override: Override = None,
    imatrix: Imatrix = None,
    calibrate: Calibrate = None,
    imatrix_out: ImatrixOut = None,
    topology: TopologyFile = None,
    mmproj: Mmproj = None,
    mmproj_type: MmprojType = None,
    safetensors: Safetensors = False,
    output: options.OutputOptions,
) -> None:
    """Write a model as a quantized GGUF file, or as safetensors."""
    # Imported late, so that --help is fast.
    from paged_sdk import Topology, write_gguf, write_safetensors
    from paged_sdk.cli.flags import excluding, reporting

    with reporting(quantize, output, {"source": source, "imatrix": imatrix}) as terminal:
        of_gguf = {
            "--override": override,
            "--imatrix": imatrix,
            "--calibrate": calibrate,
            "--imatrix-out": imatrix_out,
            "--topology": topology,
            "--mmproj": mmproj,
        }
        excluding("--safetensors", safetensors, of_gguf)
        if mmproj_type is not None and mmproj is None:
            raise typer.BadParameter("it has no effect without --mmproj", param_hint="--mmproj-type")
        if safetensors:
            directory = write_safetensors(source, target, type=type or "BF16", show_progress=not output.quiet)
            size = sum(file.stat().st_size for file in directory.iterdir())
            terminal.note(f"{directory}: {size / 2**20:.0f} MiB")
            return
        overrides = [_override(each) for each in override or ()]
        if mmproj is not None:  # first: it fails within seconds, while writing the model takes minutes
            beside = _write_mmproj(source, mmproj, mmproj_type or "F16", show_progress=not output.quiet)
            terminal.note(f"{beside}: {beside.stat().st_size / 2**20:.0f} MiB")
        path = write_gguf(
            source,
            target,
            type=type or "Q4_K_M",
            overrides=overrides,
            imatrix=imatrix,
            calibrate=calibrate,
            imatrix_out=imatrix_out,
            topology=None if topology is None else Topology.from_yaml(topology),
            show_progress=not output.quiet,
        )
        terminal.note(f"{path}: {path.stat().st_size / 2**20:.0f} MiB")


def _write_mmproj(source: str, mmproj: Path, mmproj_type: str, *, show_progress: bool) -> Path:
    """Write the image encoder. Errors name the options, not the parameters of :func:`paged_sdk.write_mmproj`.

    :raises PagedError: see there
    """
    from paged_sdk import ConfigError, write_mmproj

    try:
        return write_mmproj(source, mmproj, type=mmproj_type, show_progress=show_progress)
    except ConfigError as error:
        option = {"target": "mmproj", "type": "mmproj_type"}.get(error.setting)
        if option is None:
            raise
        raise ConfigError.of(option, error.value, error.allowed) from error


def _override(text: str) -> tuple[str, str]:
    pattern, separator, type_ = text.rpartition("=")
    if not separator or not pattern:
        raise typer.BadParameter(f"{text!r}: expected REGEX=TYPE", param_hint="--override")
    return pattern, type_
