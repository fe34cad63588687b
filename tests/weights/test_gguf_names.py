"""Our names of GGUF's tensors and types are those of the gguf package, which llama.cpp's converter writes by."""

from __future__ import annotations

from typing import Any, Final

import gguf
import numpy as np
import pytest

from paged_sdk.weights.gguf.architecture import EACH
from paged_sdk.weights.gguf.metadata import _NUMBERS
from paged_sdk.weights.gguf.names import ARCHITECTURES

NUMBERS: Final = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# Transformers' classes of these have other names than their checkpoints: tests/calls/test_gguf_encoders.py judges them.
RENAMED: Final = ("bert", "nomic-bert", "modern-bert", "eurobert")


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in RENAMED])
def test_names_are_the_converters(name: str) -> None:
    architecture, names = ARCHITECTURES[name], gguf.get_tensor_name_map(NUMBERS[name], 3)
    for stem, block_name in architecture.block_names.items():
        is_bare = stem == "attn_sinks"  # which Hugging Face names without an ending
        for kind in ("weight",) if is_bare else ("weight", "bias"):
            found = architecture.hugging_face_name(f"blk.2.{stem}.{kind}")
            ending = "" if is_bare else f".{kind}"
            assert found == f"{architecture.body}{architecture.layers}.2.{block_name}{ending}"
            assert architecture.gguf_name(found) == f"blk.2.{stem}.{kind}"
            # The converter stacks experts and norms of heads, whose names then have no number.
            original = found.replace(f".norms.{EACH}.", ".").replace(f".{EACH}.", ".")
            if name == "bloom":  # whose released checkpoints have no prefix
                original = original.removeprefix(architecture.body)
            original += ".weight" if is_bare else ""  # which the converter adds
            assert names.get_name(original, try_suffixes=(".weight", ".bias")) == f"blk.2.{stem}.{kind}"
    for stem, block_name in architecture.beside_names.items():
        both = architecture.of_file(["blk.0.attn_norm_2.weight"])
        found = both.hugging_face_name(f"blk.2.{stem}.weight")
        assert found == f"{architecture.body}{architecture.layers}.2.{block_name}.weight"
        assert names.get_name(found, try_suffixes=(".weight",)) == f"blk.2.{stem}.weight"
    for stem, original in architecture.top_names.items():
        assert architecture.hugging_face_name(f"{stem}.weight") == f"{original}.weight"
        if name == "bloom":
            original = original.removeprefix(architecture.body)
        is_always_tied = name in ("gemma", "gemma2", "command-r", "cohere2") and original == "lm_head"
        is_made = original == "score"  # of two rows of the output projection
        assert names.get_name(original) == (None if is_always_tied or is_made else stem)


def test_values_have_the_packages_types() -> None:
    types: Any = gguf.GGUFValueType
    expected = {
        types.UINT8: np.uint8, types.INT8: np.int8, types.UINT16: np.uint16, types.INT16: np.int16,
        types.UINT32: np.uint32, types.INT32: np.int32, types.FLOAT32: np.float32, types.BOOL: np.bool_,
        types.UINT64: np.uint64, types.INT64: np.int64, types.FLOAT64: np.float64,
    }  # fmt: skip
    assert {number.value: np.dtype(kind) for number, kind in expected.items()} == _NUMBERS
