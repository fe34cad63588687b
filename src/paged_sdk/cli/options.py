"""Define how each option is spelled, and what its help says."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

import paged_sdk
from paged_sdk import PagedCacheType

FLAG = ""
"""The metavar of a flag, which takes no value; typer writes its type otherwise, as if it did."""

SPECULATE = "--speculate"
"""The only option whose value may be left out: an argument after it that is no number is not its value."""

PAGED_ATTN = "--paged-attn"
"""Its value may be left out too, and is then "on"."""

MODEL, PAGED, ENGINE, SAMPLING = "Model", "Paged attention", "Engine", "Sampling"


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
    typer.Option("--version", callback=_show_version, is_eager=True, metavar=FLAG, help="Show the version and exit."),
]
Prompt = Annotated[
    str | None, typer.Argument(help="What to say. Without it: stdin if that is a pipe or file, else a chat.")
]
Interactive = Annotated[bool, typer.Option("--interactive", "-i", metavar=FLAG, help="Chat, keeping the turns.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")]
Raw = Annotated[
    bool, typer.Option("--raw", metavar=FLAG, help="Continue the prompt as plain text, without a chat template.")
]
Image = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="An image that the prompt is about; may be given several times.",
        exists=True,
        dir_okay=False,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", metavar=FLAG, help="Show log lines, and tracebacks of errors.")]
Quiet = Annotated[bool, typer.Option("--quiet", metavar=FLAG, help="Show nothing but the text and errors.")]

Model = Annotated[
    str | None,
    typer.Option(
        "--model-id",
        "--model",
        "-m",
        metavar="PATH_OR_ID",
        help="A directory, a GGUF file or a hub id. Without it: the embedded SmolLM2-135M.",
        rich_help_panel=MODEL,
    ),
]
Format = Annotated[
    ModelFormat | None,
    typer.Option("--format", help="What the model is stored as, if it is not plain to see.", rich_help_panel=MODEL),
]
Arch = Annotated[str | None, typer.Option("--arch", "-a", hidden=True)]  # of mistral.rs, which has to be told
QuantizedFile = Annotated[
    list[str] | None,
    typer.Option(
        "--quantized-file",
        "-f",
        metavar="NAME",
        help="The GGUF file within the directory or repository; repeat it for a model in several files.",
        rich_help_panel=MODEL,
    ),
]
TokModelId = Annotated[
    Path | None,
    typer.Option(
        "--tok-model-id",
        "-t",
        metavar="PATH",
        help="A directory with a tokenizer.json, or that file, instead of the model's own tokenizer.",
        rich_help_panel=MODEL,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="PATH_OR_TEXT",
        help="A Jinja chat template instead of the model's own.",
        rich_help_panel=MODEL,
    ),
]
Cpu = Annotated[
    bool, typer.Option("--cpu", metavar=FLAG, help="Run on the CPU whatever else there is.", rich_help_panel=MODEL)
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps ...", rich_help_panel=MODEL),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="auto, bfloat16, float16, float32 ...", rich_help_panel=MODEL),
]
Isq = Annotated[
    str | None,
    typer.Option(
        "--isq",
        metavar="TYPE",
        help="Quantize while loading: 4, 8, Q4K, Q8_0 ... What a file holds quantized is decoded and quantized again.",
        rich_help_panel=MODEL,
    ),
]
TopologyFile = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        metavar="FILE",
        help="YAML: what single layers are quantized to, and where they are.",
        rich_help_panel=MODEL,
    ),
]
Imatrix = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        metavar="FILE",
        help="An importance matrix of llama.cpp's: errors count for more where activations are large.",
        rich_help_panel=MODEL,
    ),
]
IsqCache = Annotated[
    Path | None,
    typer.Option(
        "--isq-cache",
        metavar="DIRECTORY",
        help="Keep weights that are quantized while loading there, for the next start.",
        rich_help_panel=MODEL,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration-file",
        metavar="TEXT",
        help="A file of text to run through the model first, which shows where activations are large.",
        rich_help_panel=MODEL,
    ),
]
NumThreads = Annotated[
    int | None, typer.Option("--num-threads", help="CPU threads of one operation.", rich_help_panel=MODEL)
]

PagedAttn = Annotated[
    PagedAttnMode, typer.Option(PAGED_ATTN, help="A paged KV cache; alone: on.", rich_help_panel=PAGED)
]
PaContextLen = Annotated[
    int | None, typer.Option("--pa-context-len", help="Size of the KV pool in tokens.", rich_help_panel=PAGED)
]
PaMemoryMb = Annotated[
    int | None, typer.Option("--pa-memory-mb", help="Size of the KV pool in MiB.", rich_help_panel=PAGED)
]
PaMemoryFraction = Annotated[
    float | None,
    typer.Option(
        "--pa-memory-fraction", help="Size of the KV pool as a share of the device's memory.", rich_help_panel=PAGED
    ),
]
PaBlockSize = Annotated[
    int | None, typer.Option("--pa-block-size", help="Tokens per block (32).", rich_help_panel=PAGED)
]
PaCacheType = Annotated[
    PagedCacheType | None,
    typer.Option(
        "--pa-cache-type",
        case_sensitive=False,
        help="What a KV element is stored as: the model's dtype, or 8 bits.",
        rich_help_panel=PAGED,
    ),
]
# Spellings of earlier command lines of mistral.rs.
PaGpuMem = Annotated[int | None, typer.Option("--pa-gpu-mem", hidden=True)]
PaGpuMemUsage = Annotated[float | None, typer.Option("--pa-gpu-mem-usage", hidden=True)]
PaCtxtLen = Annotated[int | None, typer.Option("--pa-ctxt-len", hidden=True)]
PaBlkSize = Annotated[int | None, typer.Option("--pa-blk-size", hidden=True)]
NoPagedAttn = Annotated[bool, typer.Option("--no-paged-attn", metavar=FLAG, hidden=True)]

MaxSeqs = Annotated[
    int | None, typer.Option("--max-seqs", help="Sequences that are computed at once (32).", rich_help_panel=ENGINE)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Tokens in one step.", rich_help_panel=ENGINE)
]
PrefixCacheN = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache-n",
        help="0: no prefix cache. Not paged: finished sequences that are kept (16).",
        rich_help_panel=ENGINE,
    ),
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option("--max-seq-len", help="Tokens in a sequence, prompt and output together.", rich_help_panel=ENGINE),
]
Speculate = Annotated[
    int | None,
    typer.Option(
        SPECULATE,
        metavar="[N]",
        help="Guess up to N tokens ahead (16) from what was written before: the same text, sooner.",
        rich_help_panel=ENGINE,
    ),
]

Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="A LoRA adapter that the text goes through: a directory as PEFT saves it, a GGUF file, or a hub id.",
        rich_help_panel=MODEL,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="A smaller model with the same vocabulary that guesses tokens: the same text, sooner.",
        rich_help_panel=ENGINE,
    ),
]

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Tokens to generate at most.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="Divides the logits; 0 is greedy. Without any option but --max-tokens the choice is greedy.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the likeliest tokens that together reach p.", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", help="Keep tokens at least this times as likely as the likeliest.", rich_help_panel=SAMPLING
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Repeat the same choices.", rich_help_panel=SAMPLING)]
