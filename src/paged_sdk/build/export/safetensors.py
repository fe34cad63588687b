"""Write any checkpoint that loads as a directory of safetensors, decoded: what transformers and others read."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_safetensors"]


def write_safetensors(
    source: str | Path, target: str | Path, *, type: str = "BF16", show_progress: bool = False
) -> Path:
    """Write a checkpoint as a directory of safetensors that are not quantized, with config.json, tokenizer and chat
    template.

    It is whole or not there: a full disk, an error or an interruption leave nothing behind.

    :param source: a directory, a GGUF file (any part of a split one), or an id on the Hugging Face Hub
    :param target: the directory, which must not exist
    :param type: F32, F16 or BF16, of all tensors
    :param show_progress: whether a terminal shows a bar
    :returns: ``target``
    :raises ConfigError: the target exists, or the type is unknown
    :raises ModelLoadError: the checkpoint cannot be read, config.json has no words for it, or the directory cannot be
        written
    """
    # Imported here, so that naming the function loads no torch.
    from paged_sdk.build.export.safetensors_plan import write

    return write(source, target, type, show_progress=show_progress)
