"""Measure this machine's memory read bandwidth, and count the bytes of a model that decode reads per token."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

__all__ = ["bytes_per_token", "read_bandwidth"]

_REPEATS = 5


def read_bandwidth(num_threads: int, num_bytes: int) -> float:
    """Return the bytes per second at which ``num_threads`` read one buffer: the median of five int64 sums by torch.

    The buffer must be much larger than the caches. This is the fastest reduction of torch and numpy: on an AMD Zen 5
    server, a third faster than two threads of numpy.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        buffer = torch.ones(num_bytes // 8, dtype=torch.int64)  # written, so that every page has its own memory
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            assert int(buffer.sum()) == len(buffer)
            seconds.append(time.perf_counter() - start)
        return buffer.nbytes / median(seconds)
    finally:
        torch.set_num_threads(before)


def bytes_per_token(path: Path) -> int:
    """Return the bytes of weights that decoding one token reads: all weights except embeddings that are only looked up,
    and of a mixture's experts only the selected ones.

    These are bytes of the file; the engine's form of the weights may be larger or smaller. Keys and values are not
    counted.

    :param path: a GGUF file, or a directory with a safetensors file of a model without experts
    """
    if path.is_dir():
        sizes = _safetensors_sizes(path)
        lookup, head = "model.embed_tokens.weight", "lm_head.weight"
    else:
        sizes = _gguf_sizes(path)
        lookup, head = "token_embd.weight", "output.weight"
    # Models without a separate output projection multiply by the embeddings.
    return sum(sizes.values()) - (sizes.get(lookup, 0) if head in sizes else 0)


def _gguf_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each tensor that one token reads."""
    from paged_sdk.weights.gguf.file import GgufFile

    file = GgufFile(path)
    sizes = {name: tensor.blocks().nbytes for name, tensor in file.tensors.items()}
    architecture = file.metadata["general.architecture"]
    num_experts = file.metadata.get(f"{architecture}.expert_count", 0)
    num_selected = file.metadata.get(f"{architecture}.expert_used_count", 0)
    for name in sizes:
        if name.endswith("_exps.weight"):
            sizes[name] = sizes[name] * num_selected // num_experts
    return sizes


def _safetensors_sizes(directory: Path) -> dict[str, int]:
    sizes = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            sizes[name] = last - first
    return sizes
