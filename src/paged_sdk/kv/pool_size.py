"""Compute how many blocks the KV pool gets. All sizes are bytes; what a device has is an argument."""

from __future__ import annotations

from math import ceil

from attrs import frozen

from paged_sdk.config.memory import MB, ContextSize, Fraction, MemoryGpuConfig
from paged_sdk.errors import OutOfMemoryError

__all__ = [
    "DEFAULT_CUDA_MEMORY",
    "BlockLayout",
    "DeviceMemory",
    "auto_cpu_blocks",
    "blocks_for",
    "fp8_scale_bytes",
    "free_blocks",
    "q4_scale_bytes",
]

MIB = 2**20
SCALE_BYTES = 4
AUTO_CPU_CONTEXT = 4096
"""Tokens per sequence for which an automatically sized CPU pool has capacity."""
AUTO_CPU_DIVISOR = 4
"""An automatically sized CPU pool takes at most 1 / AUTO_CPU_DIVISOR of the memory that the process may use."""

DEFAULT_CUDA_MEMORY = Fraction(0.9)
"""Share of a CUDA device's memory that the pool takes unless another size is set."""


@frozen(kw_only=True)
class BlockLayout:
    """Says how much memory one block of the pool takes.

    :ivar block_size: tokens per block
    :ivar elements_per_token: K and V elements per token, over all layers
    :ivar bytes_per_element: bytes of one element of the cache's dtype; half a byte for 4-bit codes
    :ivar scale_bytes_per_token: bytes of the scales stored beside the elements, over all layers
    :ivar fp8_block_bytes: bytes of a block if keys and values were stored as f8e4m3; None: they already are codes
    """

    block_size: int
    elements_per_token: int
    bytes_per_element: float
    scale_bytes_per_token: int = 0
    fp8_block_bytes: int | None = None

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block, over all layers."""
        return self.block_size * (int(self.elements_per_token * self.bytes_per_element) + self.scale_bytes_per_token)

    def largest_context(self, num_bytes: int) -> int:
        """Return how many tokens fit into ``num_bytes``."""
        return num_bytes // self.block_bytes * self.block_size


@frozen(kw_only=True)
class DeviceMemory:
    """Says how much memory a device has.

    :ivar total: bytes of the device; on CPU, those that the process may use (a container's limit counts)
    :ivar free: bytes of these not in use once the weights are loaded
    """

    total: int
    free: int


def fp8_scale_bytes(vectors_per_token: int) -> int:
    """Return the bytes of scales per token of an f8e4m3 cache: one float32 per vector.

    :param vectors_per_token: K and V vectors per token, over all layers and KV heads
    """
    return vectors_per_token * SCALE_BYTES


def q4_scale_bytes(elements_per_token: int) -> int:
    """Return the bytes of scales per token of a cache of 4-bit codes: two of 16 bits per 32 elements."""
    return elements_per_token // 32 * 4


def blocks_for(memory: MemoryGpuConfig, layout: BlockLayout, device: DeviceMemory) -> int:
    """Return the number of blocks in a pool of the requested size.

    With B the block size, E the elements per token and D the bytes per element (scales included):
    ``ContextSize(n)`` is ceil(n / B) blocks; ``MB(m)`` is floor(m * 2**20 / (B * E * D)); ``Fraction(f)`` is f times
    the device's total less what is in use, then as ``MB``.

    :raises OutOfMemoryError: if that is no block at all, or more than is free
    """
    match memory:
        case ContextSize(tokens):
            num_blocks = ceil(tokens / layout.block_size)
        case MB(megabytes):
            num_blocks = megabytes * MIB // layout.block_bytes
        case Fraction(fraction):
            num_blocks = _fraction_bytes(fraction, device) // layout.block_bytes
        case _:
            raise AssertionError(f"unknown pool size {memory!r}")
    if num_blocks < 1 or num_blocks * layout.block_bytes > device.free:
        raise _does_not_fit(memory, max(1, num_blocks), layout, device)
    return num_blocks


def auto_cpu_blocks(layout: BlockLayout, device: DeviceMemory, *, max_num_seqs: int, max_model_len: int) -> int:
    """Return the number of blocks in a pool on the CPU when no size is requested.

    The pool has capacity for ``max_num_seqs`` sequences of min(``max_model_len``, 4096) tokens, but takes at most a
    quarter of the memory that the process may use, and at most what is free.

    :raises OutOfMemoryError: if not even one block fits
    """
    wanted = max_num_seqs * ceil(min(max_model_len, AUTO_CPU_CONTEXT) / layout.block_size)
    available = min(device.total // AUTO_CPU_DIVISOR, device.free)
    num_blocks = min(wanted, available // layout.block_bytes)
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"the KV cache needs {_mib(layout.block_bytes)} for one block of {layout.block_size} tokens, "
            f"but {_mib(available)} are available{_fp8_advice(layout, available)}",
            needed=layout.block_bytes,
            available=available,
            largest_context=0,
        )
    return num_blocks


def free_blocks(*, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Return the number of blocks in a pool of a model without attention, whose blocks take no memory.

    As on the CPU, the pool has capacity for ``max_num_seqs`` sequences of min(``max_model_len``, 4096) tokens, and for
    one sequence of the maximum length, whatever size is requested in bytes.
    """
    usual = max_num_seqs * ceil(min(max_model_len, AUTO_CPU_CONTEXT) / block_size)
    return max(usual, ceil(max_model_len / block_size))


def _fraction_bytes(fraction: float, device: DeviceMemory) -> int:
    return max(0, int(fraction * device.total) - (device.total - device.free))


def _does_not_fit(
    memory: MemoryGpuConfig, num_blocks: int, layout: BlockLayout, device: DeviceMemory
) -> OutOfMemoryError:
    needed = num_blocks * layout.block_bytes
    available = _fraction_bytes(memory.fraction, device) if isinstance(memory, Fraction) else device.free
    return OutOfMemoryError(
        f"a KV cache of {memory!r} needs {_mib(needed)} ({num_blocks} blocks of {layout.block_size} tokens), "
        f"but {_mib(available)} are available; {_advice(memory, layout, device)}{_fp8_advice(layout, available)}",
        needed=needed,
        available=available,
        largest_context=layout.largest_context(available),
    )


def _advice(memory: MemoryGpuConfig, layout: BlockLayout, device: DeviceMemory) -> str:
    """Suggest the largest value of the same setting that fits, or the smallest with at least one block."""
    most_blocks = device.free // layout.block_bytes
    if most_blocks < 1:
        return "not one block fits"
    match memory:
        case ContextSize():
            return f"the largest that fits is ContextSize({most_blocks * layout.block_size})"
        case MB():
            least = ceil(layout.block_bytes / MIB)
            return f"the largest that fits is MB({device.free // MIB}), the smallest with a block is MB({least})"
        case _:
            least_fraction = (device.total - device.free + layout.block_bytes) / device.total
            return f"the smallest fraction with a block is {ceil(least_fraction * 1000) / 1000}, the largest 1.0"


def _fp8_advice(layout: BlockLayout, available: int) -> str:
    """Say how many tokens fit with FP8 keys and values, if that is more."""
    if layout.fp8_block_bytes is None:
        return ""
    tokens = available // layout.fp8_block_bytes * layout.block_size
    more = tokens > layout.largest_context(available)
    return f"; PagedCacheType.F8E4M3 has room for {tokens} tokens there" if more else ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
