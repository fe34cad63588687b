"""Defines the spelling, help and setting of options: single ones, and groups that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from attrs import frozen

import paged_sdk
from paged_sdk import PagedCacheType
from paged_sdk.cli.groups import BuilderSetting, Setting

SPECULATE = "--speculate"
"""An option whose value is optional: the next argument is its value only if it is a number."""

PAGED_ATTN = "--paged-attn"
"""An option whose value is optional; without one it is "on"."""

MODEL, PAGED, ENGINE = "Model", "Paged attention", "Engine"


class ModelFormat(Enum):
    """Names a checkpoint's file format."""

    PLAIN = "plain"
    GGUF = "gguf"


class PagedAttnMode(Enum):
    """Names whether the KV cache is paged."""

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
        help="A directory, a GGUF file or a Hub id. Default: the embedded SmolLM2-135M.",
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
        help="A directory, a GGUF file or a Hub id; repeatable. Default: the embedded SmolLM2-135M.",
        rich_help_panel=MODEL,
    ),
    Setting("model"),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A directory, a GGUF file or a Hub id. Default: the embedded SmolLM2-135M."),
    Setting("model"),
]
# The spelling of mistral.rs's commands.
ModelBeside = Annotated[str | None, typer.Option("--model-id", "-m", hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="A LoRA adapter to use: a PEFT directory, a GGUF file or a Hub id.",
        rich_help_panel=MODEL,
    ),
    Setting("with_adapter"),
]


@frozen(kw_only=True)
class OutputOptions:
    """Controls what is shown beside the text."""

    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show log lines, and tracebacks of errors."),
        BuilderSetting("logging"),
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only output, results and errors.")] = False


@frozen(kw_only=True)
class ModelOptions:
    """Selects the model, its files and its device. Paths are strings, so that builders can refuse an empty one, as of
    an unset shell variable; ``Path`` would take it for the working directory.
    """

    format: Annotated[
        ModelFormat | None,
        typer.Option("--format", help="The model's file format, if it cannot be detected.", rich_help_panel=MODEL),
    ] = None
    # Accepted for command lines of mistral.rs, which requires it.
    arch: Annotated[str | None, typer.Option("--arch", "-a", hidden=True)] = None
    quantized_file: Annotated[
        tuple[str, ...],
        typer.Option(
            "--quantized-file",
            "-f",
            metavar="NAME",
            help="The GGUF file within the directory or repository; repeatable, for a model in several files.",
            rich_help_panel=MODEL,
        ),
        Setting("filenames"),
    ] = ()
    hf_revision: Annotated[
        str | None,
        typer.Option(
            "--hf-revision",
            metavar="NAME",
            help="Branch, tag or commit of the Hub repository.",
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
            help="Where to find the Hub token: cache, none, env:NAME or path:FILE.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("token_source"),
    ] = None
    mmproj: Annotated[
        str | None,
        typer.Option(
            "--mmproj",
            metavar="FILE",
            help="The image encoder of a GGUF model. Default: the one in the model's directory, if there is only one.",
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
            help="Another tokenizer: a directory or Hub id with a tokenizer.json, or that file.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("tok_model_id"),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="PATH_OR_TEXT",
            help="Another Jinja chat template.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("chat_template"),
    ] = None
    cpu: Annotated[
        bool,
        typer.Option("--cpu", help="Run on the CPU even if there is a GPU.", rich_help_panel=MODEL),
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
            help="Quantize while loading: 4, 8, Q4K, Q8_0 ... Requantizes already quantized files.",
            rich_help_panel=MODEL,
        ),
        Setting("with_isq"),
    ] = None
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="YAML: quantization type and device per layer.",
            rich_help_panel=MODEL,
        ),
        Setting("with_topology"),
    ] = None
    imatrix: Annotated[
        str | None,
        typer.Option(
            "--imatrix",
            metavar="FILE",
            help="A llama.cpp importance matrix, to weight quantization errors by.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("imatrix"),
    ] = None
    calibration_file: Annotated[
        str | None,
        typer.Option(
            "--calibration-file",
            metavar="TEXT",
            help="A text file to compute an importance matrix from, before quantizing.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("calibration_file"),
    ] = None
    isq_cache: Annotated[
        str | None,
        typer.Option(
            "--isq-cache",
            metavar="DIRECTORY",
            help="Cache quantized weights there for the next start.",
            rich_help_panel=MODEL,
        ),
        BuilderSetting("isq_cache"),
    ] = None
    num_threads: Annotated[
        int | None,
        typer.Option("--num-threads", help="CPU threads per step.", rich_help_panel=MODEL),
        BuilderSetting("num_threads"),
    ] = None
    tensor_parallel: Annotated[
        str | None,
        typer.Option(
            "--tensor-parallel",
            metavar="N|auto",
            help="Processes that share the model; auto: one per GPU or NUMA node.",
            rich_help_panel=MODEL,
        ),
        Setting("with_tensor_parallel"),
    ] = None


@frozen(kw_only=True)
class PagedOptions:
    """Configures the KV cache. The spellings are those of mistral.rs's command line, including earlier ones."""

    paged_attn: Annotated[
        PagedAttnMode,
        typer.Option(PAGED_ATTN, help="Whether the KV cache is paged; without a value: on.", rich_help_panel=PAGED),
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
            "--pa-memory-fraction",
            help="Size of the KV pool as a fraction of the device's memory.",
            rich_help_panel=PAGED,
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
            help="Type of KV elements: the model's dtype, 8 bits or 4 bits.",
            rich_help_panel=PAGED,
        ),
        Setting("cache_type"),
    ] = None
    # Spellings of earlier command lines of mistral.rs.
    pa_gpu_mem: Annotated[int | None, typer.Option("--pa-gpu-mem", hidden=True)] = None
    pa_gpu_mem_usage: Annotated[float | None, typer.Option("--pa-gpu-mem-usage", hidden=True)] = None
    pa_ctxt_len: Annotated[int | None, typer.Option("--pa-ctxt-len", hidden=True)] = None
    pa_blk_size: Annotated[int | None, typer.Option("--pa-blk-size", hidden=True)] = None
    no_paged_attn: Annotated[bool, typer.Option("--no-paged-attn", hidden=True)] = False


@frozen(kw_only=True)
class EngineOptions:
    """Configures batching, speculative decoding and the prefix cache."""

    max_seqs: Annotated[
        int | None,
        typer.Option("--max-seqs", help="Sequences computed at once (32).", rich_help_panel=ENGINE),
        BuilderSetting("max_num_seqs"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", help="Tokens per step.", rich_help_panel=ENGINE),
        BuilderSetting("max_num_batched_tokens"),
    ] = None
    max_slowdown: Annotated[
        float | None,
        typer.Option(
            "--max-slowdown",
            help="How many times slower decoding may get while a prompt is prefilled (3 on the CPU).",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("max_slowdown"),
    ] = None
    batch_invariance: Annotated[
        bool,
        typer.Option(
            "--batch-invariance",
            help="Make results independent of the batch.",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("batch_invariance"),
    ] = False
    prefix_cache_n: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache-n",
            help="0: no prefix cache. Without paged attention: finished sequences to keep (16).",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("prefix_cache_n"),
    ] = None
    prefix_cache_dir: Annotated[
        str | None,
        typer.Option(
            "--prefix-cache-dir",
            metavar="DIRECTORY",
            help="Keep the prefix cache there, too, also for later processes.",
            rich_help_panel=ENGINE,
        ),
        Setting("with_prefix_cache_dir"),
    ] = None
    prefix_cache_dir_mb: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache-dir-mb", help="Maximum size of that directory in MiB (8192).", rich_help_panel=ENGINE
        ),
        Setting("max_bytes"),
    ] = None
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max-seq-len", help="Tokens per sequence, prompt and output together.", rich_help_panel=ENGINE),
        BuilderSetting("max_model_len"),
    ] = None
    throughput_logging: Annotated[
        bool,
        typer.Option(
            "--throughput-logging",
            help="Show speed and KV pool usage every few seconds of work.",
            rich_help_panel=ENGINE,
        ),
        BuilderSetting("throughput_logging"),
    ] = False
    speculate: Annotated[
        int | None,
        typer.Option(
            SPECULATE,
            metavar="[N]",
            help="Speculative decoding: draft up to N tokens (16) from earlier text. Output is unchanged.",
            rich_help_panel=ENGINE,
        ),
        Setting("gamma"),
        Setting("with_speculation"),
    ] = None
    mtp: Annotated[
        bool,
        typer.Option(
            "--mtp",
            help="Draft with the model's own layer for multi-token prediction, if its checkpoint has one.",
            rich_help_panel=ENGINE,
        ),
        Setting("mtp"),
    ] = False
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            help="A smaller model with the same vocabulary, or the model's assistant, for speculative decoding.",
            rich_help_panel=ENGINE,
        ),
        Setting("draft"),
    ] = None
