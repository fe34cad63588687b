"""Connects ranks that were launched separately, as by torchrun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Final

import torch
from attrs import evolve
from torch._C._distributed_c10d import PrefixStore

from paged_sdk.build.device_setup import host_memory_errors
from paged_sdk.build.loading import Loading
from paged_sdk.build.placement import common_dtype
from paged_sdk.build.ranks.part import ModelPart
from paged_sdk.kernels.native.library import load
from paged_sdk.logs import get_logger
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.rendezvous import CheckCancelled, Rendezvous
from paged_sdk.system.threads import thread_must_start
from paged_sdk.weights.checkpoint import file_stamps

__all__ = ["LaunchedRanks", "follow_launch"]

_log = get_logger(__name__)

_LOOK_SECONDS: Final = 0.1

# Settings that must agree on all ranks; otherwise ranks would compute different things, or in different orders.
_SHARED: Final = (
    "paged_attn",
    "paged_meta",
    "prefix_cache_n",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "isq",
    "topology",
    "batch_invariance",
)
_SHARED_VARIABLES: Final = ("paged_attn", "paged_meta", "prefix_cache_n", "isq")


class LaunchedRanks:
    """Implements :class:`~paged_sdk.build.ranks.followers.Ranks` for ranks that were launched separately.

    :param rendezvous: connects all ranks
    :param loading: what this rank loads
    :raises ConfigError: another rank has other settings
    :raises ModelLoadError: another rank has ended
    :ivar group: all ranks; this process is rank 0
    """

    def __init__(self, rendezvous: Rendezvous, loading: Loading) -> None:
        self._rendezvous = rendezvous
        self._device = loading.device
        self.group: Group = Group(0, rendezvous.launch.size, rendezvous.explain)
        rendezvous.compare(_about(loading), loading.check_cancelled)

    def check(self) -> None:
        """Check that all ranks are still loading.

        :raises ModelLoadError: a rank has failed to load its shard
        """
        self._rendezvous.check()

    def join(self, check_cancelled: CheckCancelled) -> None:
        """Wait until all ranks have loaded their shards, and connect to them.

        :param check_cancelled: called regularly; an exception that it raises ends the wait
        :raises ModelLoadError: a rank has failed to load its shard
        """
        _join(self._rendezvous, self.group, self._device, check_cancelled)

    def end(self, seconds: float, error: BaseException | None) -> None:
        """Let the other ranks end.

        :param seconds: how long to wait for ranks that have been told to end; 0: they have not been told
        :param error: the error that ended this rank, which is sent to the others
        """
        if error is not None:
            self._rendezvous.fail(error)
        if seconds:
            self._rendezvous.end(seconds)
        else:
            self._rendezvous.close()  # but keep answering: the other ranks will ask for the error


def follow_launch(rendezvous: Rendezvous, loading: Loading) -> None:
    """Load this rank's shard and compute the steps that rank 0 sends, until rank 0 ends.

    :param rendezvous: connects all ranks
    :raises ConfigError: rank 0 has other settings
    :raises ModelLoadError: a rank has failed to load its shard
    :raises OutOfMemoryError: this rank has no memory for a step
    :raises EngineDeadError: another rank has ended for another reason
    """
    rank, size, check_cancelled = rendezvous.launch.rank, rendezvous.launch.size, loading.check_cancelled
    group = Group(rank, size, rendezvous.explain)
    try:
        rendezvous.compare(_about(loading), check_cancelled)
        part = ModelPart.load(evolve(loading, check_cancelled=_watched(rendezvous, check_cancelled)), group)
        _join(rendezvous, group, loading.device, check_cancelled)
        _log.info("Rank %d of %d computes its part of %s.", rank, size, loading.path.name)
        with host_memory_errors(f"compute rank {rank}'s part of", loading.path):
            _run(lambda: part.follow(group), check_cancelled)
    finally:
        group.end()
        group.leave()


def _watched(rendezvous: Rendezvous, check_cancelled: CheckCancelled) -> CheckCancelled:
    def going_on() -> None:
        rendezvous.check()
        check_cancelled()

    return going_on


def _join(rendezvous: Rendezvous, group: Group, device: torch.device, check_cancelled: CheckCancelled) -> None:
    rendezvous.wait(check_cancelled)
    group.join(PrefixStore("gloo", rendezvous.store), address=rendezvous.address, device=device)
    rendezvous.on_loss(group.end)


def _run(work: Callable[[], None], check_cancelled: CheckCancelled) -> None:
    """Run a function on another thread, and wait for it.

    :param check_cancelled: called regularly; an exception that it raises ends the wait, but not the thread
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="paged-sdk rank", daemon=True)
    with thread_must_start("to follow the first rank in"):
        thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        check_cancelled()
    if raised:
        raise raised[0]


def _about(loading: Loading) -> dict[str, str]:
    """Return everything that must agree on all ranks, as text."""
    settings, environment = loading.settings, loading.environment
    sizes = [size for size, _ in file_stamps(loading.path).values()]
    return {
        "paged-sdk": version("paged-sdk"),
        "torch": torch.__version__,
        "native kernels": "none" if load() is None else "there",
        "model": f"{len(sizes)} files of {sum(sizes)} bytes",
        "device": loading.device.type,
        "dtype": str(common_dtype(settings.dtype, loading.devices)),
        **{name: str(getattr(settings, name)) for name in _SHARED},
        **{f"environment's {name}": str(getattr(environment, name)) for name in _SHARED_VARIABLES},
    }
