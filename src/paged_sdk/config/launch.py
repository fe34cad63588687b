"""Defines how this process was launched as one rank of several."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Launch"]


@frozen(kw_only=True)
class Launch:
    """Describes this process among the ranks of a model that were launched separately.

    :ivar rank: this process's rank
    :ivar size: number of ranks
    :ivar local_rank: this process's rank on its machine
    :ivar local_size: number of ranks on its machine
    :ivar address: host of the rendezvous store, with ``port``
    :ivar has_agent: whether torchrun's agent hosts the store; otherwise rank 0 does
    :ivar attempt: number of restarts; prefixes the store's keys, so that a restart does not read old entries
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str
    port: int
    has_agent: bool = False
    attempt: int = 0
