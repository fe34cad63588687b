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
# The package does not know these yet: llama.cpp reads them in tests/test_assistant.py.
NEWER: Final = ("gemma4-assistant",)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*RENAMED, *NEWER)])
def test_names_are_the_converters(name: str) -> None:
    architecture, names = ARCHITECTURES[name], gguf.get_tensor_name_map(NUMBERS[name], 3)
    for stem, block_name in architecture.block_names.items():
        for kind in ("weight", "bias"):
            found = architecture.hugging_face_name(f"blk.2.{stem}.{kind}")
            assert found == f"{architecture.body}{architecture.layers}.2.{block_name}.{kind}"
            assert architecture.gguf_name(found) == f"blk.2.{stem}.{kind}"
            # The converter stacks experts and norms of heads, whose names then have no number.
            original = found.replace(f".norms.{EACH}.", ".").replace(f".{EACH}.", ".")
            # Granite 4's MLP is that of a shared expert, if there are experts beside it.
            if name == "granitehybrid":
                original = original.replace("shared_mlp.output_linear", "mlp.down_proj")
            # Bloom's released checkpoints have no prefix, nor do the converter's names of lfm2moe's experts.
            if name == "bloom" or (name == "lfm2moe" and ".experts." in original):
                original = original.removeprefix(architecture.body)
            if name == "nemotron_h_moe" and ".experts." in original:  # which the converter renames
                original = original.replace("mixer", "mlp").replace("backbone.", "model.")
            if name == "granitemoe":
                original = original.replace("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear")
            # The converter writes gates of Gemma 4's experts in one tensor with ups, as its checkpoints have them;
            # those of Granite it divides in its own code.
            is_split = name in ("gemma4", "granitemoe") and stem in ("ffn_gate_exps", "ffn_up_exps")
            theirs = names.get_name(original, try_suffixes=(".weight", ".bias"))
            assert theirs == (None if is_split else f"blk.2.{stem}.{kind}")
    for own, bare in architecture.bare_names.items():
        found = architecture.hugging_face_name(f"blk.2.{own}")
        assert found == f"{architecture.body}{architecture.layers}.2.{bare}"
        assert architecture.gguf_name(found) == f"blk.2.{own}"
        # The converter gives names an ending, or another.
        stem, dot, kind = own.partition(".")
        original = found.replace("dt_bias", "dt_proj").replace("correction_bias", "correction") + dot + kind
        # It names scales of Gemma 4's experts in its own code.
        theirs = names.get_name(original, try_suffixes=(".weight", ".bias"))
        assert theirs == (None if kind == "scale" else f"blk.2.{own}")
        assert architecture.hugging_face_name(f"blk.2.{stem}.other") is None
    for key, (own, _) in architecture.layer_numbers.items():
        assert getattr(gguf.Keys.xIELU, own.rpartition(".")[2].upper()) == key
    for whole, stems in architecture.joined.items():
        found = f"{architecture.body}{architecture.layers}.2.{whole}.weight"
        assert architecture.joined_names(found) == tuple(f"blk.2.{stem}.weight" for stem in stems)
        assert all(architecture.hugging_face_name(f"blk.2.{stem}.weight") == found for stem in stems)
        known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[NUMBERS[name]]}
        assert {f"blk.{{bid}}.{stem}" for stem in stems} <= known
    for stem, block_name in architecture.beside_names.items():
        both = architecture.of_file(["blk.0.attn_norm_2.weight"])
        found = both.hugging_face_name(f"blk.2.{stem}.weight")
        assert found == f"{architecture.body}{architecture.layers}.2.{block_name}.weight"
        assert names.get_name(found, try_suffixes=(".weight",)) == f"blk.2.{stem}.weight"
    for stem, original in architecture.top_names.items():
        assert architecture.hugging_face_name(f"{stem}.weight") == f"{original}.weight"
        if name == "bloom":
            original = original.removeprefix(architecture.body)
        always_tied = ("gemma", "gemma2", "command-r", "cohere2", "lfm2moe")
        is_always_tied = name in always_tied and original == "lm_head"
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
