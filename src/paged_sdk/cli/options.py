"""Define how each option is spelled, what its help says, and what it sets: those of single commands, and groups that
several commands take.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from attrs import frozen

import paged_sdk
from paged_sdk import PagedCacheType
from paged_sdk.cli.groups import BuilderSetting, Setting

SPECULATE = "--speculate"
"""The only option whose value may be left out: an argument after it that is no number is not its value."""

PAGED_ATTN = "--paged-attn"
"""Its value may be left out too, and is then "on"."""

MODEL, PAGED, ENGINE = "Model", "Paged attention", "Engine"


class ModelFormat(Enum):
    """Names what a checkpoint is stored as."""

    PLAIN = "plain"
    GGUF = "gguf"


class PagedAttnMode(Enum):
    """Says whether the KV cache is paged."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paged-sdk {paged_sdk.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
]
ModelId = Annotated[
    str | None,
    typer.Option(
        "--model-id",
        "--model",
        "-m",
        metavar="PATH_OR_ID",
        help="A directory, a GGUF file or a hub id. Without it: the embedded SmolLM2-135M.",
        rich_help_panel=MODEL,
    ),
    Setting("model"),
]
ModelIds = Annotated[
    list[str] | None,
    typer.Option(
        "--model-id",
        "--model",
        "-m",
        metavar="PATH_OR_ID",
        help="A directory, a GGUF file or a hub id; may be given several times. Without it: the embedded SmolLM2-135M.",
        rich_help_panel=MODEL,
    ),
    Setting("model"),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A directory, a GGUF file or a hub id. Without it: the embedded SmolLM2-135M."
    ),
    Setting("model"),
]
# As options of mistral.rs's commands have it.
ModelBeside = Annotated[str | None, typer.Option("--model-id", "-m", hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="A LoRA adapter that the text goes through: a directory as PEFT saves it, a GGUF file, or a hub id.",
        rich_help_panel=MODEL,
    ),
    Setting("with_adapter"),
]


@frozen(kw_only=True)
class OutputOptions:
    """Says what is shown beside the text."""

    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show log lines, and tracebacks of errors."),
        BuilderSetting("logging"),
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but texts, results and errors.")] = False


@frozen(kw_only=True)
class ModelOptions:
    """Says what the model is, from which files, and where it runs. Paths are as they were typed: builders refuse an
    empty one, as of a variable of a shell that is not set, which ``Path`` takes for the working directory.
    """

    format: Annotated[
        ModelFormat | None,
        typer.Option("--format", help="What the model is stored as, if it is not plain to see.", rich_help_panel=MODEL),
    ] = None
    # mistral.rs has to be told.
    arch: Annotated[str | None, typer.Option("--arch", "-a", hidden=True)] = None
    quantized_file: Annotated[
        tuple[str, ...],
        typer.Option(
            "--quantized-file",
            "-f",
            metavar="NAME",
            help="The GGUF file within the directory or repository; repeat it for a model in several files.",
            rich_help_panel=MODEL,
        ),
        Setting("filenames"),
    ] = ()
    hf_revision: Annotated[
        str | None,
        typer.Option(
            "--hf-revision",
            metavar="NAME",
            help="A branch, tag or commit of the hub's repository.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("hf_revision"),
        Setting("revision"),
    ] = None
    token_source: Annotated[
        str | None,
        typer.Option(
            "--token-source",
            metavar="SOURCE",
            help="Where the hub's token is: cache, none, env:NAME or path:FILE.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("token_source"),
    ] = None
    mmproj: Annotated[
        str | None,
        typer.Option(
            "--mmproj",
            metavar="FILE",
            help="The image encoder of a GGUF model; not needed where it is the only one in the model's directory.",
            rich_help_panel=MODEL,
        ),
        Setting("with_mmproj"),
    ] = None
    tok_model_id: Annotated[
        str | None,
        typer.Option(
            "--tok-model-id",
            "-t",
            metavar="PATH_OR_ID",
            help="A directory or hub id with a tokenizer.json, or that file, instead of the model's own tokenizer.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("tok_model_id"),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="PATH_OR_TEXT",
            help="A Jinja chat template instead of the model's own.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("chat_template"),
    ] = None
    cpu: Annotated[
        bool,
        typer.Option("--cpu", help="Run on the CPU whatever else there is.", rich_help_panel=MODEL),
        BuilderSetting("force_cpu"),
    ] = False
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps ...", rich_help_panel=MODEL),
        BuilderSetting("device"),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAME", help="auto, bfloat16, float16, float32 ...", rich_help_panel=MODEL),
        BuilderSetting("dtype"),
    ] = None
    isq: Annotated[
        str | None,
        typer.Option(
            "--isq",
            metavar="TYPE",
            help="Quantize while loading: 4, 8, Q4K, Q8_0 ... "
            "What a file holds quantized is decoded and quantized again.",
            rich_help_panel=MODEL,
        ),
    ] = None
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="YAML: what single layers are quantized to, and where they are.",
            rich_help_panel=MODEL,
        ),
    ] = None
    imatrix: Annotated[
        str | None,
        typer.Option(
            "--imatrix",
            metavar="FILE",
            help="An importance matrix of llama.cpp's: errors count for more where activations are large.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("imatrix"),
    ] = None
    calibration_file: Annotated[
        str | None,
        typer.Option(
            "--calibration-file",
            metavar="TEXT",
            help="A file of text to run through the model first, which shows where activations are large.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("calibration_file"),
    ] = None
    isq_cache: Annotated[
        str | None,
        typer.Option(
            "--isq-cache",
            metavar="DIRECTORY",
            help="Keep weights that are quantized while loading there, for the next start.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("isq_cache"),
    ] = None
    num_threads: Annotated[
        int | None,
        typer.Option("--num-threads", help="CPU threads that compute a step.", rich_help_panel=MODEL),
        BuilderSetting("num_threads"),
    ] = None
    tensor_parallel: Annotated[
        str | None,
        typer.Option(
            "--tensor-parallel",
            metavar="N|auto",
            help="Processes that compute the model together; auto: one for each GPU or NUMA node.",
            rich_help_panel=MODEL,
        ),
        Setting("with_tensor_parallel"),
    ] = None


@frozen(kw_only=True)
class PagedOptions:
    """Says whether the KV cache is paged, and how, in the spellings of mistral.rs's command line, earlier ones too."""

    paged_attn: Annotated[
        PagedAttnMode, typer.Option(PAGED_ATTN, help="A paged KV cache; alone: on.", rich_help_panel=PAGED)
    ] = PagedAttnMode.AUTO
    pa_context_len: Annotated[
        int | None,
        typer.Option("--pa-context-len", help="Size of the KV pool in tokens.", rich_help_panel=PAGED),
        Setting("tokens"),
    ] = None
    pa_memory_mb: Annotated[
        int | None,
        typer.Option("--pa-memory-mb", help="Size of the KV pool in MiB.", rich_help_panel=PAGED),
        Setting("megabytes"),
    ] = None
    pa_memory_fraction: Annotated[
        float | None,
        typer.Option(
            "--pa-memory-fraction", help="Size of the KV pool as a share of the device's memory.", rich_help_panel=PAGED
        ),
        Setting("fraction"),
    ] = None
    pa_block_size: Annotated[
        int | None,
        typer.Option("--pa-block-size", help="Tokens per block (32).", rich_help_panel=PAGED),
        Setting("block_size"),
    ] = None
    pa_cache_type: Annotated[
        PagedCacheType | None,
        typer.Option(
            "--pa-cache-type",
            case_sensitive=False,
            help="What a KV element is stored as: the model's dtype, or 8 bits.",
            rich_help_panel=PAGED,
        ),
    ] = None
    # Spellings of earlier command lines of mistral.rs.
    pa_gpu_mem: Annotated[int | None, typer.Option("--pa-gpu-mem", hidden=True)] = None
    pa_gpu_mem_usage: Annotated[float | None, typer.Option("--pa-gpu-mem-usage", hidden=True)] = None
    pa_ctxt_len: Annotated[int | None, typer.Option("--pa-ctxt-len", hidden=True)] = None
    pa_blk_size: Annotated[int | None, typer.Option("--pa-blk-size", hidden=True)] = None
    no_paged_attn: Annotated[bool, typer.Option("--no-paged-attn", hidden=True)] = False


@frozen(kw_only=True)
class EngineOptions:
    """Says how much is computed at once, and how."""

    max_seqs: Annotated[
        int | None,
        typer.Option("--max-seqs", help="Sequences that are computed at once (32).", rich_help_panel=ENGINE),
        BuilderSetting("max_num_seqs"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", help="Tokens in one step.", rich_help_panel=ENGINE),
        BuilderSetting("max_num_batched_tokens"),
    ] = None
    max_slowdown: Annotated[
        float | None,
        typer.Option(
            "--max-slowdown",
            help="By what factor texts may be slower while a prompt is computed beside them (3 on the CPU).",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("max_slowdown"),
    ] = None
    batch_invariance: Annotated[
        bool,
        typer.Option(
            "--batch-invariance",
            help="Compute a text the same, whatever is computed beside it.",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("batch_invariance"),
    ] = False
    prefix_cache_n: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache-n",
            help="0: no prefix cache. Not paged: finished sequences that are kept (16).",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("prefix_cache_n"),
    ] = None
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max-seq-len", help="Tokens in a sequence, prompt and output together.", rich_help_panel=ENGINE),
        BuilderSetting("max_model_len"),
    ] = None
    throughput_logging: Annotated[
        bool,
        typer.Option(
            "--throughput-logging",
            help="Show speeds and the KV pool's state every few seconds of work.",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("throughput_logging"),
    ] = False
    speculate: Annotated[
        int | None,
        typer.Option(
            SPECULATE,
            metavar="[N]",
            help="Guess up to N tokens ahead (16) from what was written before: the same text, sooner.",
            rich_help_panel=ENGINE,
        ),
        Setting("gamma"),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            help="A smaller model with the same vocabulary that guesses tokens: the same text, sooner.",
            rich_help_panel=ENGINE,
        ),
        Setting("draft"),
    ] = None
