"""Checks whether a model can be divided among ranks, and chooses the device and CPUs of each rank."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NoReturn

import torch
from attrs import evolve, frozen
from torch.distributed import is_nccl_available

from paged_sdk.attention.choice import Candidate
from paged_sdk.build.encoder_file import EncoderFile
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.env import WORLD_SIZE
from paged_sdk.config.isq import IsqType
from paged_sdk.config.launch import Launch
from paged_sdk.errors import ConfigError
from paged_sdk.logs import get_logger
from paged_sdk.parallel.shard import SETTING
from paged_sdk.runner.device import choose_device
from paged_sdk.system.processors import numa_nodes, usable_processors

__all__ = ["RankPlacement", "check_parts", "check_ranks", "place_launched_rank", "place_ranks", "refuse_isq"]

_log = get_logger(__name__)

_NODES: Final = "NUMA nodes with processors that this process may use"


@frozen(kw_only=True)
class RankPlacement:
    """Says where a rank computes.

    :ivar num_threads: number of threads; None: one per CPU
    :ivar processors: the CPUs that the threads are pinned to; None: any
    :ivar device: the rank's device; None: the one in the settings
    """

    num_threads: int | None
    processors: frozenset[int] | None = None
    device: str | None = None

    def of(self, settings: BuildSettings) -> BuildSettings:
        """Return the settings of the rank."""
        return evolve(settings, num_threads=self.num_threads, device=self.device or settings.device)


def place_ranks(settings: BuildSettings) -> Sequence[RankPlacement]:
    """Decide where each rank computes; the list has a single entry if the model is not divided.

    :raises ConfigError: devices do not exist, or two settings contradict each other
    """
    named = None if settings.topology is None else settings.topology.devices
    size = settings.tensor_parallel
    if named is not None and size not in (None, "auto", len(named)):
        raise ConfigError.of(SETTING, size, f"{len(named)}, as many as the topology has devices, or nothing beside it")
    if named is None and size in (None, 1):
        return [RankPlacement(num_threads=settings.num_threads)]
    kind = choose_device(settings.device).type
    if kind == "cuda":
        return _on_gpus(settings, named)
    if kind != "cpu":
        raise ConfigError.of(SETTING, size or len(named or ()), f"a model on the CPU or on GPUs of CUDA, not on {kind}")
    nodes = numa_nodes()
    if named is None:
        count = len(nodes) if size == "auto" or size is None else size
        # If the ranks cannot be divided evenly among the nodes, they are not pinned.
        on = [list(nodes)[rank * len(nodes) // count] for rank in range(count)] if count % len(nodes) == 0 else None
    else:
        if missing := [number for number in named if number not in nodes]:
            allowed = f"{', '.join(map(str, nodes))}, the {_NODES}; {SETTING} divides a model whatever their number"
            raise ConfigError.of("Topology.devices", missing[0], allowed)
        count, on = len(named), list(named)
    if count == len(nodes) == 1:
        return [RankPlacement(num_threads=settings.num_threads)]
    shares = _shares(settings, count)
    if on is None or len(nodes) == 1:
        return [RankPlacement(num_threads=share) for share in shares]
    return [
        RankPlacement(num_threads=min(share, len(nodes[node])), processors=nodes[node])
        for share, node in zip(shares, on, strict=True)
    ]


def _on_gpus(settings: BuildSettings, named: tuple[int, ...] | None) -> Sequence[RankPlacement]:
    """Return one placement per GPU: those that a topology names, or the first ``tensor_parallel`` ones.

    :raises ConfigError: there are fewer GPUs
    """
    count, size = torch.cuda.device_count(), settings.tensor_parallel
    if settings.device not in ("auto", "cuda"):
        raise ConfigError.of("device", settings.device, f'"cuda", without a number: {SETTING} says how many')
    if named is None:
        numbers: Sequence[int] = range(size if isinstance(size, int) else count)
        if len(numbers) > count:
            raise ConfigError.of(SETTING, size, f"at most {count}, the number of GPUs")
    else:
        numbers = named
        if missing := [number for number in named if number >= count]:
            raise ConfigError.of("Topology.devices", missing[0], f"a number below {count}, the number of GPUs")
    if len(numbers) == 1:
        return [RankPlacement(num_threads=settings.num_threads, device=f"cuda:{numbers[0]}")]
    shares = _shares(settings, len(numbers))
    return [
        RankPlacement(num_threads=share, device=f"cuda:{number}") for share, number in zip(shares, numbers, strict=True)
    ]


def _shares(settings: BuildSettings, count: int) -> list[int]:
    """Divide the threads among ``count`` ranks; each gets at least one."""
    each, more = divmod(settings.num_threads or usable_processors(), count)
    return [max(each + (rank < more), 1) for rank in range(count)]


def place_launched_rank(settings: BuildSettings, launch: Launch) -> RankPlacement:
    """Decide where this process computes as a rank that was launched separately.

    :raises ConfigError: the settings request another number of ranks, or name devices
    """
    size = settings.tensor_parallel
    if settings.topology is not None and (named := settings.topology.devices) is not None:
        allowed = f"nothing beside {WORLD_SIZE} = {launch.size}: whoever starts a process chooses its device"
        raise ConfigError.of("Topology.devices", list(named), allowed)
    if size not in ("auto", launch.size):
        allowed = f"{launch.size}, as {WORLD_SIZE} says; without it, the other ranks are started from here"
        raise ConfigError.of(SETTING, size, allowed)
    if choose_device(settings.device).type == "cuda":
        count = torch.cuda.device_count()
        if count == 1:  # each process may see only its own device
            return RankPlacement(num_threads=settings.num_threads, device="cuda:0")
        if launch.local_rank >= count:
            raise ConfigError.of("LOCAL_RANK", launch.local_rank, f"a number below {count}, the number of GPUs")
        share = _shares(settings, launch.local_size)[launch.local_rank]
        return RankPlacement(num_threads=share, device=f"cuda:{launch.local_rank}")
    if launch.local_size == 1 and settings.num_threads is None:
        return RankPlacement(num_threads=None)
    local = evolve(settings, tensor_parallel=launch.local_size)
    return place_ranks(local)[launch.local_rank]


def check_ranks(settings: BuildSettings, size: int, devices: Iterable[torch.device]) -> None:
    """Check the settings before anything is loaded.

    :param size: number of ranks
    :param devices: the devices that hold part of the model
    :raises ConfigError: a setting is not supported with several ranks
    """
    if size == 1:
        return
    own, *others = dict.fromkeys(devices)
    on_gpus = own.type == "cuda"
    reasons = {
        "a model on the CPU or on GPUs of CUDA": own.type not in ("cpu", "cuda"),
        f"one device for each rank, and nothing on {', '.join(map(str, others))}": bool(others),
        "a torch with NCCL": on_gpus and not is_nccl_available(),
        "no draft model, on GPUs": on_gpus and settings.draft is not None,
        "paged attention, on GPUs": on_gpus and settings.paged_attn is False,
        "no images, on GPUs": on_gpus and settings.images is not None,
        "no calibration file, which needs the whole model in one process": settings.calibration_file is not None,
        "a system with pipes that can be waited for": sys.platform == "win32",
        "a program with a Python interpreter to start": not sys.executable or getattr(sys, "frozen", False),
    }
    if (allowed := next((text for text, holds in reasons.items() if holds), None)) is not None:
        raise ConfigError.of(SETTING, size, allowed)


def check_parts(
    size: int, device: torch.device, encoder: EncoderFile | None, backends: Collection[Candidate]
) -> EncoderFile | None:
    """Check the image encoder and custom attention backends, which are not part of the settings.

    :param size: number of ranks
    :param device: rank 0's device
    :param backends: the caller's attention backends
    :returns: the image encoder to use; on GPUs None, if it was only found beside the model
    :raises ConfigError: several ranks do not support it
    """
    if encoder is not None and device.type != "cpu":
        if encoder.is_asked:
            raise ConfigError.of(SETTING, size, "no image encoder, on GPUs")
        _log.info("%s is not used: several ranks on GPUs take no images.", encoder.path)
        encoder = None
    if backends:
        raise ConfigError.of(SETTING, size, "no custom attention backends")
    return encoder


def refuse_isq(isq: IsqType) -> NoReturn:
    """Refuse to requantize the weights of several ranks on GPUs.

    :raises ConfigError: always
    """
    allowed = f"a model without {SETTING} on GPUs: quantize it while it is loaded, by with_isq()"
    raise ConfigError.of("isq", isq.value, allowed)
