"""Where Triton's kernels run: compiled on a CUDA device, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """The device of tensors that Triton kernels are given."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
