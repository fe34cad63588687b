"""Write a checkpoint as a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_sdk.config.topology import Topology

__all__ = ["write_gguf"]


def write_gguf(
    source: str | Path,
    target: str | Path,
    *,
    type: str = "Q4_K_M",
    overrides: Sequence[tuple[str, str]] = (),
    imatrix: str | Path | None = None,
    calibrate: str | Path | None = None,
    imatrix_out: str | Path | None = None,
    topology: Topology | None = None,
    show_progress: bool = False,
) -> Path:
    """Write a checkpoint as a GGUF file, with its tokenizer and its chat template.

    The metadata of a GGUF source is kept, whatever its architecture; for other sources it is made from config.json and
    tokenizer.json. The new file is compared with the checkpoint before it gets its name. It is complete or absent: a
    full disk, an error or an interruption leaves nothing behind.

    :param source: a directory, a GGUF file (any part of a split one), or a Hugging Face Hub id
    :param target: the file, which must not exist
    :param type: F32, F16, BF16, or one of llama.cpp's mixtures: Q2_K, Q3_K_S, Q3_K_M, Q3_K_L, Q4_0, Q4_1, Q4_K_S,
        Q4_K_M, Q5_0, Q5_1, Q5_K_S, Q5_K_M, Q6_K, Q8_0, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4_MOE. Norms, biases and
        routers of experts stay float32
    :param overrides: pairs of a regular expression and a type: the last one that matches a tensor's GGUF name, such as
        ``blk.0.ffn_down.weight``, sets its type
    :param imatrix: a file from llama.cpp's llama-imatrix, GGUF or .dat: errors in columns that are multiplied by larger
        activations count for more
    :param calibrate: a text file to compute the same from, by running it through the model; added to ``imatrix``
    :param imatrix_out: a file, which must not exist, to save the computed matrix in, as llama-imatrix does
    :param topology: types of single layers, or of matrices by their Hugging Face names. It wins over the mixture, and
        overrides win over it
    :param show_progress: whether to show a progress bar on a terminal
    :returns: ``target``
    :raises ConfigError: the target exists, a type is unknown, an override matches nothing, or the package gguf is not
        installed
    :raises CheckpointError: the importance matrix is invalid, or of another model
    :raises ModelLoadError: the checkpoint cannot be read, GGUF cannot hold it, or the file cannot be written
    """
    # Imported here, so that naming the function loads no torch.
    from paged_sdk.build.export.gguf_plan import write

    return write(
        source, target, type, overrides, imatrix, calibrate, imatrix_out, topology, show_progress=show_progress
    )
