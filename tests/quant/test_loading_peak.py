"""Check that while a matrix is packed, no more of it than a few rows is in memory besides the packed one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from native_weights import library, needs_library
from paged_sdk.build.free_memory import return_free_memory
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.own_pages import LastingMemory
from paged_sdk.quant.policy import NamedMatrix, Role, WeightPolicy
from paged_sdk.weights.checkpoint import open_checkpoint
from quantized_writers import WRITERS, pack_tensors, section_of

pytestmark = [
    needs_library,
    pytest.mark.skipif(sys.platform != "linux", reason="the largest resident set is set back through /proc"),
]

ROWS, COLS = 2048, 2048
NAME: Final = "model.layers.0.mlp.up_proj.weight"
DTYPES = ("float32", "bfloat16", "float16")
#: Their codes lie down the columns of a tensor, which is read as a whole.
READ_WHOLE = ("gptq", "awq")
QUICK = ("float32", "awq", "fp8")


def write(form: str, directory: Path) -> int:
    """Write a checkpoint of one matrix, and return its bytes."""
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    config: dict[str, object] = {"model_type": "llama"}
    if form in WRITERS:
        writer, settings = WRITERS[form]
        tensors, _ = pack_tensors({NAME: weight}, writer)
        config[section_of(settings)] = settings
    else:
        tensors = {NAME: weight.to(getattr(torch, form))}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def peak_beyond_weights(directory: Path, workspace: Workspace) -> int:
    """Pack the matrix, and return by how much the resident set was larger than with the packed one alone."""
    checkpoint = open_checkpoint(directory)
    policy = WeightPolicy(keep_blocks=True, workspace=workspace, memory=LastingMemory())
    return_free_memory()  # else what is on the heap would hide what is taken
    before = resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the largest resident set cannot be set back")
    matrix = NamedMatrix(NAME, checkpoint.source.matrix(NAME))
    linear = policy.linear([matrix], [None], Role.LINEAR, dtype=torch.bfloat16, device=torch.device("cpu"))
    peak = resident("VmHWM")
    checkpoint.source.close()
    assert linear.native_weights is not None
    return peak - before - sum(each.num_bytes for each in linear.native_weights.few)


@pytest.mark.parametrize(
    "form",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.long) for each in (*DTYPES, *WRITERS)],
)
def test_few_rows_are_in_memory_twice(form: str, tmp_path: Path) -> None:
    stored = write(form, tmp_path)
    workspace = Workspace(library(), num_threads=1)
    # Parts of half a mebibyte in each form, of FP8 one in float32, and huge pages that are not full.
    allowed = (8 << 20) + (stored if form in READ_WHOLE else 0)
    # The first time brings the code itself into memory.
    assert min(peak_beyond_weights(tmp_path, workspace) for _ in range(3)) < allowed < 3 * ROWS * COLS
