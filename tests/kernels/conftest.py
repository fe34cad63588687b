"""Where Triton's kernels run: compiled on a CUDA device, else in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when Triton is first imported, so set before any test can do that.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """The device of tensors that Triton kernels are given."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
