"""Read the environment variables that tune a deployment; no other module reads ``os.environ``.

They are read once, when a model is built. A value that cannot be read is a :class:`ConfigError`, never a default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from attrs import field, frozen

from paged_sdk.config.checks import path_text
from paged_sdk.config.hang_limits import HangLimits
from paged_sdk.config.isq import IsqType
from paged_sdk.config.launch import Launch
from paged_sdk.config.memory import LARGEST, MemoryGpuConfig
from paged_sdk.config.paged import PagedAttentionMeta, PagedCacheType
from paged_sdk.config.prefix_cache_dir import PrefixCacheDir
from paged_sdk.config.speculative import MOST_DRAFTS
from paged_sdk.errors import ConfigError, shown
from paged_sdk.logs import get_logger

__all__ = [
    "Environment",
    "device_variables",
    "interpreter_variables",
    "nccl_leaves_the_process",
    "read_environment",
    "read_launch",
    "read_variable",
]

PAGED_ATTN = "MISTRALRS_PAGED_ATTN"
"""Whether the KV cache is paged: ``true``, ``1``, ``on``, ``false``, ``0`` or ``off``. Default: on for CPU and CUDA."""
BLOCK_SIZE = "MISTRALRS_PAGED_ATTN_BLOCK_SIZE"
"""Tokens per block, 1 to 1024. Default: 32."""
CACHE_TYPE = "MISTRALRS_PAGED_ATTN_CACHE_TYPE"
"""Type of KV elements: ``auto``, the model's dtype, ``f8e4m3`` or ``q4``. Default: ``auto``."""
GPU_MEM = "MISTRALRS_PAGED_ATTN_GPU_MEM"
"""Size of the KV pool in MiB. At most one of the three sizes may be set."""
GPU_MEM_USAGE = "MISTRALRS_PAGED_ATTN_GPU_MEM_USAGE"
"""Size of the KV pool as a fraction of the device's memory, above 0 and at most 1, weights included."""
CONTEXT_LEN = "MISTRALRS_PAGED_ATTN_CONTEXT_LEN"
"""Size of the KV pool in tokens, over all sequences."""
PREFIX_CACHE_N = "MISTRALRS_PREFIX_CACHE_N"
"""``0``, ``false`` or ``none`` turn the prefix cache off. Any other number turns it on; without paged attention it is
the number of finished sequences to keep. Default: 16.
"""
PREFIX_CACHE_DIR = "MISTRALRS_PREFIX_CACHE_DIR"
"""A directory that keeps up to 8 GiB of the prefix cache, also for later processes. Default: none."""
ISQ = "MISTRALRS_ISQ"
"""Quantize weights while loading, to a type such as ``Q4K`` or to ``2``, ``3``, ``4``, ``5``, ``6`` or ``8`` bits;
``false`` and ``none`` are off. Already quantized checkpoints stay as they are. Default: off.
"""
GAMMA = "MISTRALRS_SPECULATIVE_GAMMA"
"""Maximum number of draft tokens per sequence and step, 1 to 1024. Default: off."""
DRAFT_MODEL = "MISTRALRS_SPECULATIVE_DRAFT_MODEL"
"""Path or Hub id of a draft model: a smaller one with the same vocabulary."""
MTP = "MISTRALRS_SPECULATIVE_MTP"
"""``on`` lets models draft with their checkpoints' layer for multi-token prediction, if they have one and there is no
draft model. Default: off.
"""
SILENT_SECONDS = "PAGED_SDK_SILENT_SECONDS"
"""Seconds without any message after which a replica in its own process counts as hung; ``none`` and ``false``: no
limit. Default: 60.
"""
STEP_SECONDS = "PAGED_SDK_STEP_SECONDS"
"""Seconds of a single engine step after which such a replica counts as hung; ``none`` and ``false``: no limit. Default:
600.
"""
WORLD_SIZE = "WORLD_SIZE"
"""Number of ranks of a model, if they are launched separately, as by torchrun. Affects only models with
``with_tensor_parallel``.
"""
RANK = "RANK"
"""This process's rank, from 0; rank 0 runs the application."""
MASTER_ADDR = "MASTER_ADDR"
"""Host name or address of rank 0's machine, reachable from all ranks."""
MASTER_PORT = "MASTER_PORT"
"""Port of the rendezvous store, on which rank 0 or torchrun listens."""
LOCAL_RANK = "LOCAL_RANK"
"""This process's rank on its machine. Default: 0."""
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Number of ranks on this machine, which divide the CPUs among them. Default: 1."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""``True`` if torchrun hosts the store at the port; set by torchrun."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has restarted the processes; set by torchrun."""

_SETTINGS = (
    *(PAGED_ATTN, BLOCK_SIZE, CACHE_TYPE, GPU_MEM, GPU_MEM_USAGE, CONTEXT_LEN, PREFIX_CACHE_N, PREFIX_CACHE_DIR),
    *(ISQ, GAMMA, DRAFT_MODEL, MTP, SILENT_SECONDS, STEP_SECONDS),
)
# MISTRALRS_PAGED_ATTENTION has 0.89, and of mistral.rs's own variables none above 0.77.
_LIKENESS = 0.85
_INTERPRETER = ("SYSTEMROOT", "WINDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "TZDIR")
# Read by CUDA's libraries and compilers. NCCL's variables are passed by prefix.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "PATH", "HOME", "CC", "TRITON_CACHE_DIR")
# With these on, torch's NCCL watchdog ends this process, rank 0's application included, if another rank ends or is
# late.
_NCCL_LEAVES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
_MAX_PORT = 65535
MAX_DIGITS = 18
"""Numbers of up to 18 digits fit into 64 bits; no setting needs more."""

_log = get_logger(__name__)

_ON = frozenset({"true", "1", "on"})
_OFF = frozenset({"false", "0", "off"})


@frozen(kw_only=True)
class Environment:
    """Holds the settings read from the environment; None for unset ones.

    :ivar paged_attn: True: paged attention is requested; False: forbidden
    :ivar paged_meta: the settings of the KV pool
    :ivar prefix_cache_n: 0 turns the prefix cache off
    :ivar prefix_cache_dir: where blocks of the prefix cache are stored
    :ivar isq: the type to quantize weights to while loading; does not apply to quantized checkpoints
    :ivar gamma: maximum number of draft tokens per sequence and step
    :ivar draft_model: path or Hub id of the draft model
    :ivar mtp: whether models draft with their layer for multi-token prediction
    :ivar hang_limits: when replicas in their own processes count as hung
    """

    paged_attn: bool | None = None
    paged_meta: PagedAttentionMeta | None = None
    prefix_cache_n: int | None = None
    prefix_cache_dir: PrefixCacheDir | None = None
    isq: IsqType | None = None
    gamma: int | None = None
    draft_model: str | None = None
    mtp: bool | None = None
    hang_limits: HangLimits = field(factory=HangLimits)


def interpreter_variables() -> dict[str, str]:
    """Return the variables that a Python interpreter may need to start and to know the time zone.

    Child processes get only these, and those on CUDA also :func:`device_variables`: an application's environment may
    hold keys and tokens.
    """
    return {name: os.environ[name] for name in _INTERPRETER if name in os.environ}


def device_variables() -> dict[str, str]:
    """Return the further variables that a rank on a CUDA device needs."""
    return {name: value for name, value in os.environ.items() if name in _DEVICES or name.startswith("NCCL_")}


@contextmanager
def nccl_leaves_the_process() -> Iterator[None]:
    """Set torch's NCCL variables so that process groups made within the block fail without ending the process.

    torch reads this setting from the environment only.
    """
    before = {name: os.environ.get(name) for name in _NCCL_LEAVES}
    os.environ.update(dict.fromkeys(_NCCL_LEAVES, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_variable(name: str) -> str | None:
    """Return one variable by name; None if it is unset or empty."""
    return os.environ.get(name) or None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read and check every variable. A warning names those that look like misspelt ones.

    :param variables: the variables to read instead of the process's own
    :raises ConfigError: naming the variable, its value and what is allowed
    """
    source = os.environ if variables is None else variables
    given = {name: value.strip() for name, value in source.items() if value.strip()}
    _warn_of_misspelt(given)
    paged_attn, paged_meta = _switch(given, PAGED_ATTN), _paged_meta(given)
    if paged_attn is False and paged_meta is not None:
        pool = (GPU_MEM, GPU_MEM_USAGE, CONTEXT_LEN, BLOCK_SIZE, CACHE_TYPE)
        name = next(name for name in pool if name in given)
        raise ConfigError(
            f"{PAGED_ATTN} = {given[PAGED_ATTN]} and {name} = {shown(given[name])} contradict each other: without "
            "paged attention there is no KV pool",
            setting=name,
            value=given[name],
            allowed=f"nothing beside {PAGED_ATTN} = {given[PAGED_ATTN]}",
        )
    return Environment(
        paged_attn=paged_attn,
        paged_meta=paged_meta,
        prefix_cache_n=_prefix_cache_n(given),
        prefix_cache_dir=_prefix_cache_dir(given),
        isq=_isq(given),
        gamma=_gamma(given),
        draft_model=given.get(DRAFT_MODEL),
        mtp=_switch(given, MTP),
        hang_limits=_hang_limits(given),
    )


def _warn_of_misspelt(given: Mapping[str, str]) -> None:
    """Log the variables of which one letter or word differs from a setting's. They may be right: mistral.rs has
    variables of its own.
    """
    for name in given:
        if name.startswith(("MISTRALRS_", "PAGED_SDK_")) and name not in _SETTINGS:
            for near in get_close_matches(name, _SETTINGS, n=1, cutoff=_LIKENESS):
                _log.warning("The environment variable %s has no effect. Is %s meant?", shown(name), near)


def read_launch(variables: Mapping[str, str] | None = None) -> Launch | None:
    """Read whether this process was launched as one rank of several, as by torchrun.

    :param variables: the variables to read instead of the process's own
    :returns: None if this process is the only rank
    :raises ConfigError: naming the variable, its value and what is allowed
    """
    source = os.environ if variables is None else variables
    given = {name: value.strip() for name, value in source.items() if value.strip()}
    if RANK not in given and WORLD_SIZE not in given:
        return None
    size = _needed(given, WORLD_SIZE, "a number of processes >= 1", minimum=1)
    if size == 1:
        return None
    local_size = _whole_number(given, LOCAL_WORLD_SIZE, allowed="a number of processes >= 1") or 1
    local_rank_allowed = f"a number >= 0 and below {LOCAL_WORLD_SIZE}, {local_size}"
    local_rank = _whole_number(given, LOCAL_RANK, allowed=local_rank_allowed, minimum=0, maximum=local_size - 1) or 0
    address = given.get(MASTER_ADDR)
    if address is None:
        raise _missing(MASTER_ADDR, f"the first process's address, beside {WORLD_SIZE}")
    return Launch(
        rank=_needed(given, RANK, f"a number >= 0 and below {WORLD_SIZE}, {size}", maximum=size - 1),
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=_needed(given, MASTER_PORT, f"a port from 1 to {_MAX_PORT}", minimum=1, maximum=_MAX_PORT),
        has_agent=_switch(given, AGENT_STORE) is True,
        attempt=_whole_number(given, ATTEMPT, allowed="a number >= 0", minimum=0) or 0,
    )


def _hang_limits(given: Mapping[str, str]) -> HangLimits:
    usual = HangLimits()
    return HangLimits(
        silent_seconds=_seconds(given, SILENT_SECONDS, usual.silent_seconds),
        step_seconds=_seconds(given, STEP_SECONDS, usual.step_seconds),
    )


def _seconds(given: Mapping[str, str], name: str, usual: float | None) -> float | None:
    value = given.get(name)
    if value is None:
        return usual
    if value.lower() in {"false", "none"}:
        return None
    try:
        seconds = float(value) if value.isascii() and "_" not in value else 0.0  # float() accepts these
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError.of(name, value, "a number of seconds > 0, false or none")
    return seconds


def _needed(
    given: Mapping[str, str], name: str, allowed: str, *, minimum: int = 0, maximum: int = 10**MAX_DIGITS
) -> int:
    """Return the number of a variable that is required once RANK or WORLD_SIZE is set."""
    number = _whole_number(given, name, allowed=allowed, minimum=minimum, maximum=maximum)
    if number is None:
        raise _missing(name, f"{allowed}, beside {RANK if name == WORLD_SIZE else WORLD_SIZE}")
    return number


def _missing(name: str, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is not set: expected {allowed}", setting=name, allowed=allowed)


def _switch(given: Mapping[str, str], name: str) -> bool | None:
    value = given.get(name)
    if value is None:
        return None
    if value.lower() in _ON:
        return True
    if value.lower() in _OFF:
        return False
    raise ConfigError.of(name, value, "true, 1, on, false, 0 or off")


def _whole_number(
    given: Mapping[str, str], name: str, *, allowed: str, minimum: int = 1, maximum: int = 10**MAX_DIGITS
) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    is_short = value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS
    if not is_short or not minimum <= int(value) <= maximum:
        raise ConfigError.of(name, value, allowed)
    return int(value)


def _paged_meta(given: Mapping[str, str]) -> PagedAttentionMeta | None:
    memory = _memory(given)
    block_size = _whole_number(given, BLOCK_SIZE, allowed="a number of tokens from 1 to 1024")
    cache_type = given.get(CACHE_TYPE)
    if memory is None and block_size is None and cache_type is None:
        return None
    meta = PagedAttentionMeta(
        gpu_memory=memory,
        cache_type=PagedCacheType.AUTO if cache_type is None else PagedCacheType.parse(cache_type, setting=CACHE_TYPE),
    )
    if block_size is None:
        return meta
    try:
        return PagedAttentionMeta(block_size=block_size, gpu_memory=memory, cache_type=meta.cache_type)
    except ConfigError as error:
        raise ConfigError.of(BLOCK_SIZE, given[BLOCK_SIZE], error.allowed) from None


def _memory(given: Mapping[str, str]) -> MemoryGpuConfig | None:
    chosen = [name for name in (GPU_MEM, GPU_MEM_USAGE, CONTEXT_LEN) if name in given]
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen)} are both set: the KV pool's size is given in one way at most",
            setting=chosen[1],
            value=given[chosen[1]],
            allowed="one of the three",
        )
    megabytes = _whole_number(given, GPU_MEM, allowed=f"a number of megabytes >= 1 and <= {LARGEST}", maximum=LARGEST)
    if megabytes is not None:
        return MemoryGpuConfig.MB(megabytes)
    tokens = _whole_number(given, CONTEXT_LEN, allowed=f"a number of tokens >= 1 and <= {LARGEST}", maximum=LARGEST)
    if tokens is not None:
        return MemoryGpuConfig.ContextSize(tokens)
    if GPU_MEM_USAGE in given:
        value = given[GPU_MEM_USAGE]
        try:
            if not value.isascii() or "_" in value:  # float() accepts these
                raise ValueError
            return MemoryGpuConfig.Fraction(float(value))
        except ValueError:
            raise ConfigError.of(GPU_MEM_USAGE, value, "a fraction > 0 and <= 1") from None
    return None


def _prefix_cache_n(given: Mapping[str, str]) -> int | None:
    if given.get(PREFIX_CACHE_N, "").lower() in {"false", "none"}:
        return 0
    return _whole_number(given, PREFIX_CACHE_N, allowed="a number >= 0, false or none", minimum=0)


def _prefix_cache_dir(given: Mapping[str, str]) -> PrefixCacheDir | None:
    value = given.get(PREFIX_CACHE_DIR)
    return None if value is None else PrefixCacheDir(Path(path_text(PREFIX_CACHE_DIR, value, "a path")))


def _isq(given: Mapping[str, str]) -> IsqType | None:
    value = given.get(ISQ)
    if value is None or value.lower() in {"false", "none"}:
        return None
    return IsqType.parse(value, setting=ISQ)


def _gamma(given: Mapping[str, str]) -> int | None:
    return _whole_number(given, GAMMA, allowed=f"a number of tokens from 1 to {MOST_DRAFTS}", maximum=MOST_DRAFTS)
