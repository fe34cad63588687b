"""Compare an encoder's embedding speed with transformers in padded batches.

python -m benchmarks.encoder_speed --shape base

The model has random weights: a BERT, or a ModernBERT, most of whose layers have sliding windows. There are 200 texts of
22 to 252 tokens. transformers gets them as from sentence-transformers: sorted by length, in batches of 32. All take
turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import numpy as np
import tokenizers
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import decoders, models
from transformers import AutoConfig, AutoModel

from paged_sdk import BlockingModel, IsqType, TextModelBuilder
from paged_sdk.system.processors import usable_processors

__all__ = ["SHAPES"]

SHAPES: Final[MappingProxyType[str, dict[str, Any]]] = MappingProxyType(
    {
        "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
        "base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
        "modernbert": {
            "model_type": "modernbert",
            "hidden_size": 768,
            "num_hidden_layers": 22,
            "intermediate_size": 1152,
        },
    }
)
_VOCAB_SIZE: Final = 30_522
_BATCH: Final = 32

_Texts = list[list[int]]


def _write_model(directory: Path, shape: str) -> None:
    torch.manual_seed(0)
    fields = {"model_type": "bert", "vocab_size": _VOCAB_SIZE, "num_attention_heads": 12, **SHAPES[shape]}
    for token in ("pad", "bos", "eos", "cls", "sep"):
        fields[f"{token}_token_id"] = 0  # ModernBERT's ids are beyond this vocabulary
    model: Any = AutoModel
    model.from_config(AutoConfig.for_model(**fields)).save_pretrained(directory)
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={"[UNK]": 0}))
    backend.decoder = decoders.WordPiece()
    backend.save(str(directory / "tokenizer.json"))


def _of_transformers(directory: Path, dtype: str) -> Callable[[_Texts], None]:
    model: Any = AutoModel.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(texts: _Texts) -> None:
        ordered = sorted(texts, key=len)
        for first in range(0, len(ordered), _BATCH):
            batch = ordered[first : first + _BATCH]
            ids = torch.zeros(len(batch), len(batch[-1]), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, text in enumerate(batch):
                ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    return run


def _own(model: BlockingModel) -> Callable[[_Texts], None]:
    def run(texts: Sequence[list[int]]) -> None:
        model.embed(texts, pooling="mean")

    return run


def main(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "minilm",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Measure tokens per second in float32, in bfloat16, and quantized."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape}: expected {', '.join(SHAPES)}")
    num_threads = threads or usable_processors()
    torch.set_num_threads(num_threads)
    random = np.random.default_rng(0)
    texts = [random.integers(5, _VOCAB_SIZE, length).tolist() for length in random.integers(22, 253, 200)]
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as models_in_use:
        _write_model(Path(directory), shape)
        plain = TextModelBuilder(directory).with_force_cpu().with_num_threads(num_threads)
        builders = {
            "paged_sdk, float32": plain.with_dtype("float32"),
            "paged_sdk, bfloat16": plain.with_dtype("bfloat16"),
            "paged_sdk, Q8_0": plain.with_dtype("float32").with_isq(IsqType.Q8_0),
        }
        runs = {f"transformers, {dtype}": _of_transformers(Path(directory), dtype) for dtype in ("float32", "bfloat16")}
        for name, builder in builders.items():
            runs[name] = _own(models_in_use.enter_context(BlockingModel(builder.build())))
        for run in runs.values():
            run(texts[:_BATCH])
        for _ in track(range(rounds), "Rounds"):
            for name, run in runs.items():
                begin = time.perf_counter()
                run(texts)
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
    table = Table("", "tokens per second", title=f"{shape}, {num_threads} threads, medians of {rounds}")
    for name, taken in seconds.items():
        table.add_row(name, f"{sum(map(len, texts)) / statistics.median(taken):,.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
