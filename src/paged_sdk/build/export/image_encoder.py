"""Write the image encoder of a checkpoint as a GGUF file of its own (mmproj)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_mmproj"]


def write_mmproj(source: str | Path, target: str | Path, *, type: str = "F16", show_progress: bool = False) -> Path:
    """Write a checkpoint's image encoder as a separate GGUF file, as llama.cpp's tools do, to go with that of
    :func:`write_gguf`.

    The file is compared with the checkpoint before it gets its name. It is complete or absent.

    :param source: a directory with config.json, safetensors and the image processor's settings, or a Hub id
    :param target: the file, which must not exist; with "mmproj" in its name it is found beside a model
    :param type: of matrices: F32, F16, BF16 or Q8_0. Norms, biases and positions stay float32
    :param show_progress: whether to show a progress bar on a terminal
    :returns: ``target``
    :raises ConfigError: the target exists, the type is unknown, or a required package is not installed
    :raises ModelLoadError: the checkpoint cannot be read or has no encoder that llama.cpp supports, GGUF cannot express
        one of its settings, or the file cannot be written
    """
    # Imported here, so that naming the function loads no torch.
    from paged_sdk.build.export.image_encoder_plan import write

    return write(source, target, type, show_progress=show_progress)
