"""Measure one type of in-situ quantization, in a separate process, so that memory of other types does not count.

python -m benchmarks.isq_row SETTINGS        as `benchmarks.isq_table` runs it
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from benchmarks.divergence import divergence
from benchmarks.ggml_quantizer import GgmlQuantizer, find_ggml_quantizer
from benchmarks.inside import OpenEngine, open_engine
from benchmarks.turns import decode_in_turns
from paged_sdk import IsqType, TextModelBuilder
from paged_sdk.kernels.native.library import load, why_not
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.quant.isq import quantize
from paged_sdk.weights.checkpoint import open_checkpoint

__all__ = ["DENSE", "Errors", "Loading", "RowSettings", "TypeFigures", "measure_type", "quantization_errors"]

DENSE = "bfloat16"
"""The name of the row without quantization, against which decode of the others is timed."""

_SAMPLING = 0.004  # seconds between samples of the memory in use
_ROWS = 256  # rows of each matrix whose errors are measured
_MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")

Made = TypeVar("Made")


@frozen(kw_only=True)
class RowSettings:
    """Holds what a process measures.

    :ivar path: the dense model
    :ivar isq: name of the type; :data:`DENSE`: no quantization
    :ivar expected: a file with a text's token ids and the reference's logits
    :ivar output: generated tokens per timed text; 0: no timing
    :ivar rounds: timed texts per model
    """

    path: str
    isq: str
    expected: str
    num_threads: int
    output: int
    rounds: int


@frozen(kw_only=True)
class Loading:
    """Holds the memory of loading a model, beyond that of the process before; pages of mapped files do not count.

    :ivar peak_mib: peak during loading
    :ivar held_mib: memory of the loaded model
    """

    seconds: float
    peak_mib: float
    held_mib: float


@frozen(kw_only=True)
class Errors:
    """Holds root mean square errors over matrices of the first, the middle and the last layer.

    :ivar relative: error relative to the root mean square of the weights
    :ivar to_ggml: error relative to that of ggml's quantizer for the same type; None: it has no such type, or is not
        installed
    """

    relative: float
    to_ggml: float | None


@frozen(kw_only=True)
class TypeFigures:
    """Holds the figures of one type.

    :ivar bits: bits per weight of the layers' matrices, including scales and padding
    :ivar mean_kl: mean Kullback-Leibler divergence from float32 over a text, on the prefill path, in nats
    :ivar top1: fraction of positions whose likeliest token is the same
    :ivar tokens_per_second: decode speed of one stream, the best of several texts; None: not measured
    :ivar times_dense: speed relative to the best text in :data:`DENSE`, measured in turns
    :ivar loading: None if the system does not report a process's private memory
    """

    bits: float
    mean_kl: float
    top1: float
    tokens_per_second: float | None = None
    times_dense: float | None = None
    loading: Loading | None = None
    errors: Errors | None = None


def measure_type(
    builder: TextModelBuilder,
    token_ids: Sequence[int],
    expected: Tensor,
    *,
    dense: TextModelBuilder | None = None,
    output: int = 0,
    rounds: int = 1,
) -> TypeFigures:
    """Measure a builder's model.

    :param expected: the reference's logits of the text, ``[len(token_ids), vocab_size]``
    :param dense: a model to time in turns with this one; None: time this one alone
    :param output: generated tokens per timed text; 0: no timing
    """
    engine, loading = _watched(lambda: open_engine(builder))
    found = divergence(expected, engine.logits(token_ids, chunk=engine.parts.config.max_num_batched_tokens))
    bits, speed, times_dense = engine.bits_per_weight, None, None
    if output:
        engines: dict[str, OpenEngine] = {"": engine} | ({} if dense is None else {DENSE: open_engine(dense)})
        best = {
            name: max(all_of_them)
            for name, all_of_them in asyncio.run(decode_in_turns(engines, output=output, rounds=rounds)).items()
        }
        speed = best[""]
        times_dense = None if dense is None else speed / best[DENSE]
    return TypeFigures(
        bits=bits,
        mean_kl=found.mean_kl,
        top1=found.top1,
        tokens_per_second=speed,
        times_dense=times_dense,
        loading=loading,
    )


def quantization_errors(path: Path, isq: IsqType, ggml: GgmlQuantizer | None) -> Errors:
    """Quantize some rows of a dense model's matrices, and return the errors."""
    checkpoint = open_checkpoint(path)
    source, last = checkpoint.source, int(checkpoint.config["num_hidden_layers"]) - 1
    library = load() if why_not() is None else None
    squares, own, others = 0.0, 0.0, 0.0
    comparable = ggml is not None
    for layer in (0, last // 2, last):
        for name in _MATRICES:
            whole = source.tensor(f"model.layers.{layer}.{name}.weight", torch.float32, torch.device("cpu"))
            values = whole[:_ROWS].contiguous()
            quantized = quantize(values, isq, library)
            squares += float(values.double().square().sum())
            own += float((quantized.decoded() - values).double().square().sum())
            if ggml is not None and isinstance(quantized, BlockMatrix):
                other = ggml.quantized(values, quantized.tensor_type)
                others += float((other.decoded() - values).double().square().sum())
            else:
                comparable = False
    source.close()
    return Errors(relative=(own / squares) ** 0.5, to_ggml=(own / others) ** 0.5 if comparable else None)


def _watched(make: Callable[[], Made]) -> tuple[Made, Loading | None]:
    """Call a function, and measure the process's private memory during the call."""
    before = _own_mib()
    if before is None:
        return make(), None
    peak, over = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_SAMPLING):
            peak = max(peak, _own_mib() or 0.0)

    thread = threading.Thread(target=watch)
    thread.start()
    begun = time.perf_counter()
    try:
        made = make()
        seconds = time.perf_counter() - begun
    finally:
        over.set()
        thread.join()
    held = _own_mib() or 0.0
    return made, Loading(seconds=seconds, peak_mib=max(peak, held) - before, held_mib=held - before)


def _own_mib() -> float | None:
    """Return the resident memory without mapped files, in MiB; None: the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), None)


def main(settings: RowSettings) -> TypeFigures:
    """Measure what the settings say."""
    torch.set_num_threads(settings.num_threads)
    text = torch.load(settings.expected)
    token_ids: list[int] = text["token_ids"]
    # Keeps the KV pool small in comparison with the weights.
    length = max(len(token_ids), 64 + settings.output)
    builder = TextModelBuilder(settings.path).with_num_threads(settings.num_threads)
    builder = builder.with_max_model_len(length).with_max_num_seqs(1)
    dense = builder.with_dtype(DENSE)
    if settings.isq == DENSE:
        return measure_type(dense, token_ids, text["logits"], output=settings.output, rounds=settings.rounds)
    isq = IsqType.parse(settings.isq, setting="isq")
    figures = measure_type(
        builder.with_isq(isq),
        token_ids,
        text["logits"],
        dense=dense,
        output=settings.output,
        rounds=settings.rounds,
    )
    return evolve(figures, errors=quantization_errors(Path(settings.path), isq, find_ggml_quantizer()))


if __name__ == "__main__":
    print(json.dumps(asdict(main(RowSettings(**json.loads(sys.argv[1]))))))
