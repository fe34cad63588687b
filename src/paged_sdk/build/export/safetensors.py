"""Write a checkpoint as a directory of unquantized safetensors, which transformers can read."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_safetensors"]


def write_safetensors(
    source: str | Path, target: str | Path, *, type: str = "BF16", show_progress: bool = False
) -> Path:
    """Write a checkpoint as a directory of unquantized safetensors, with config.json, tokenizer, chat template and the
    files of sentence-transformers.

    It is complete or absent: a full disk, an error or an interruption leaves nothing behind.

    :param source: a directory, a GGUF file (any part of a split one), or a Hugging Face Hub id
    :param target: the directory, which must not exist
    :param type: F32, F16 or BF16, for all tensors
    :param show_progress: whether to show a progress bar on a terminal
    :returns: ``target``
    :raises ConfigError: the target exists, or the type is unknown
    :raises ModelLoadError: the checkpoint cannot be read, config.json cannot express it, or the directory cannot be
        written
    """
    # Imported here, so that naming the function loads no torch.
    from paged_sdk.build.export.safetensors_plan import write

    return write(source, target, type, show_progress=show_progress)
