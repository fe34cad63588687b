"""Compile the Triton kernels that a call launches, without a GPU, and read the compiled code.

Launchers are called with tensors that have a shape but no memory, on a pretended device. Their kernels are compiled by
the ptxas that comes with Triton, and not run.

``TRITON_INTERPRET`` must not be set: Triton reads it at its first import.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import torch
from attrs import frozen
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["DEVICE", "Compile", "CompiledKernel", "Instruction", "innermost_loops", "no_device", "read_sass"]

DEVICE: Final = torch.device("cuda", 0)
_NUM_MULTIPROCESSORS: Final = 108

# /*0120*/    @!P0 BRA 0x250 ;
_LINE: Final = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")


@frozen
class Instruction:
    """Holds a machine instruction.

    :ivar opcode: opcode with its modifiers, such as ``HMMA.16816.F32.BF16``
    """

    address: int
    opcode: str
    operands: str


@frozen(kw_only=True, eq=False)
class CompiledKernel:
    """Holds the compiled kernel of a launch.

    :ivar name: module and function
    :ivar constants: the launch's compile-time arguments by name
    :ivar num_warps: warps per program
    :ivar shared: bytes of shared memory per program
    :ivar ptx: input of ptxas
    :ivar cubin: output of ptxas
    """

    name: str
    constants: Mapping[str, Any]
    num_warps: int
    shared: int
    ptx: str
    cubin: bytes

    def instructions(self) -> list[Instruction]:
        """Return the machine instructions in the order of their addresses."""
        return read_sass(_dumped(self.cubin, "-sass"))

    def resource_usage(self) -> dict[str, int]:
        """Return the registers per thread, and the bytes of spilled registers.

        :raises RuntimeError: the tool does not report them
        """
        said = _dumped(self.cubin, "-res-usage")
        if (found := re.search(r"REG:(\d+) STACK:(\d+)", said)) is None:
            raise RuntimeError(f"cuobjdump said: {said}")
        return {"registers": int(found[1]), "stack": int(found[2])}


Compile: TypeAlias = Callable[[Callable[[], object]], list[CompiledKernel]]
"""Makes a call, and returns the compiled kernels that no earlier call has launched."""


class _Driver:
    """Implements the part of Triton's driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        compiler: Any = importlib.import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def no_device(capability: int) -> Iterator[Compile]:
    """Within this context, launches compile kernels without running them; tensors on :data:`DEVICE` have no memory.

    :param capability: compute capability of the GPU to compile for: 90 for 9.0
    """
    jit: Any = importlib.import_module("triton.runtime.jit")
    driver: Any = importlib.import_module("triton.runtime.driver")
    driver.driver.set_active(_Driver(capability))
    launch = jit.JITFunction.run
    compiled: dict[str, CompiledKernel] = {}

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = launch(self, *args, **kwargs | {"warmup": True})
        source = kernel.src
        compiled.setdefault(
            kernel.hash,
            CompiledKernel(
                name=f"{self.__module__}.{self.__name__}",
                constants={source.fn.arg_names[place[0]]: value for place, value in source.constants.items()},
                num_warps=kernel.metadata.num_warps,
                shared=kernel.metadata.shared,
                ptx=kernel.asm["ptx"],
                cubin=kernel.asm["cubin"],
            ),
        )

    def compile_call(call: Callable[[], object]) -> list[CompiledKernel]:
        known = len(compiled)
        call()
        return list(compiled.values())[known:]

    properties = SimpleNamespace(multi_processor_count=_NUM_MULTIPROCESSORS)
    with ExitStack() as stack:
        stack.enter_context(patch.object(jit.JITFunction, "run", compile_only))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10)))
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda _: properties))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda _: 0))  # aligned like torch's allocations
        stack.enter_context(FakeTensorMode())
        yield compile_call


def _dumped(cubin: bytes, option: str) -> str:
    triton: Any = importlib.import_module("triton")
    (package,) = triton.__path__
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(Path(package, "backends", "nvidia", "bin", "cuobjdump")), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_sass(text: str) -> list[Instruction]:
    """Parse the output of ``cuobjdump -sass``. On newer GPUs, operands are followed by the barriers to wait for."""
    return [
        Instruction(int(found[1], 16), found[2], re.split(r"\s+[&?]", found[3])[0].strip())
        for found in _LINE.finditer(text)
    ]


def innermost_loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Return the loops that contain no other: from the target of a branch backwards to the branch.

    Code that the compiler has moved out of a loop's address range, because it is rarely reached, is missing. The branch
    to itself at the end of a program does not count as a loop.
    """
    spans: list[tuple[int, int]] = []
    for each in instructions:
        target = re.search(r"0x([0-9a-f]+)$", each.operands) if each.opcode.startswith("BRA") else None
        if target is not None and int(target[1], 16) < each.address:
            spans.append((int(target[1], 16), each.address))
    innermost = {
        (first, last)
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    }
    return [[each for each in instructions if first <= each.address <= last] for first, last in sorted(innermost)]
