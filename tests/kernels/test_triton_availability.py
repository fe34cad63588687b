"""Whatever keeps Triton from launching kernels is known before a launch, and said."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paged_sdk.kernels.triton import availability


@pytest.fixture
def starts_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return what has Triton's driver be made by a function, for a device that is said to be there."""
    module: Any = importlib.import_module("triton.runtime.driver")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(module.driver, "_active", None)
    monkeypatch.setattr(module.driver, "_default", None)
    return lambda make: monkeypatch.setattr(module, "_create_driver", make)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler."),
        CalledProcessError(1, ["gcc"]),
        AssertionError("libcuda.so cannot found!\nPossible files are located elsewhere."),
        PermissionError("/.triton/cache"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_keeps_triton_from_starting_is_the_reason(
    error: Exception, starts_by: Callable[[Callable[[], object]], None]
) -> None:
    def fail() -> None:
        raise error

    starts_by(fail)
    reason = availability.why_not.__wrapped__(torch.device("cuda", 0))
    assert reason is not None
    assert reason.endswith(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert "gcc" in reason


def test_where_triton_starts_there_is_no_reason(starts_by: Callable[[Callable[[], object]], None]) -> None:
    class Driver:
        def get_current_target(self) -> None:
            pass

    starts_by(Driver)
    assert availability.why_not.__wrapped__(torch.device("cuda", 0)) is None
